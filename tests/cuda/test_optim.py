"""Optimiser steps against torch.optim in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from problems import DTYPES, assert_close, from_numpy, to_numpy, tolerance

pytestmark = pytest.mark.cuda
SETTINGS: tuple[dict[str, Any], ...] = (
    {"kind": "sgd", "weight_decay": 0.1},
    {"kind": "sgd", "momentum": 0.9},
    {"kind": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"kind": "adam", "weight_decay": 0.1},
    {"kind": "adamw", "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95},
)


def torch_optimiser(params: list[torch.Tensor], lr: float, s: dict[str, Any]) -> Any:
    options = {"lr": lr, "weight_decay": s.get("weight_decay", 0.0), "foreach": False}
    if s["kind"] == "sgd":
        return torch.optim.SGD(
            params, momentum=s.get("momentum", 0.0), nesterov=s.get("nesterov", False), **options
        )
    betas = (s.get("beta1", 0.9), s.get("beta2", 0.999))
    make = torch.optim.Adam if s["kind"] == "adam" else torch.optim.AdamW
    return make(params, betas=betas, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["optim_vector_sm80", "optim_naive_any"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_steps_equal_torch_in_float64(
    module: Callable[[str], ModuleType],
    dtype: str,
    kernel: str,
    settings: dict[str, Any],
    seed: int,
) -> None:
    m, rng, t = module("optim"), np.random.default_rng(seed), DTYPES[dtype]
    torch.manual_seed(seed)
    unit = 8 if kernel == "optim_vector_sm80" else 1
    few = rng.random() < 0.3  # an element a thread
    sizes = [unit * int(rng.integers(1, 60 if few else 1500)) for _ in range(70)]
    params = [torch.randn(n, device="cuda").to(t) for n in sizes]
    state = torch.float32
    first, second = ([torch.zeros(n, device="cuda", dtype=state) for n in sizes] for _ in range(2))
    adam = settings["kind"] != "sgd"
    momentum = adam or settings.get("momentum", 0.0) != 0
    lr, clock = 0.01, torch.zeros(1, dtype=torch.int64, device="cuda")
    reference = [p.double().requires_grad_() for p in params]
    optimiser = torch_optimiser(reference, lr, settings)
    for step in range(1, 4):
        grads = [torch.randn(n, device="cuda").to(t) for n in sizes]
        for p, r, g in zip(params, reference, grads, strict=True):
            # adam's first step is +-lr but where g + decay * p is as small as eps: ill-conditioned
            g[(g.float() + settings.get("weight_decay", 0.0) * p.float()).abs() < 2.0**-10] = 1.0
            r.data.copy_(p)  # rounding of earlier steps is not this step's error
            r.grad = g.double()
        optimiser.step()
        clock += 1
        m.step(params, grads, first if momentum else (), second if adam else (), lr=lr,
               step=clock if step == 2 else step, kernel=kernel, **settings)  # fmt: skip
        for k, (p, r) in enumerate(zip(params, reference, strict=True)):
            bound = tolerance(dtype, 4) + 2.0**-18 * lr
            assert_close(p, r.detach(), bound, 1e-2, f"step {step}, tensor {k}, seed {seed}")


def test_the_numpy_form_gives_what_the_dlpack_form_gives(
    module: Callable[[str], ModuleType],
) -> None:
    m = module("optim")
    p, g = torch.randn(2, 40).bfloat16()
    state = [torch.zeros(40), torch.zeros(40)]
    got = m.step_numpy(to_numpy(p), to_numpy(g), *(s.numpy() for s in state), kind="adam", lr=0.1)
    on = [x.cuda() for x in (p, g, *state)]
    m.step(*([x] for x in on), kind="adam", lr=0.1)
    assert torch.equal(from_numpy(got[0]), on[0].cpu())
    with pytest.raises(m.InvalidArgument, match="expected m and v with adam"):
        m.step([on[0]], [on[1]], kind="adam", lr=0.1)
