"""Steps of several micro-batches: gradients are summed and applied as a loop in torch does it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from step_cases import MODELS, WIDTH
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm

STRICT = {"fallback": "error"}
ALLOW = {"fallback": "allow"}
Batch = tuple[torch.Tensor, torch.Tensor]


def _batch(number: int, rows: int = 8) -> Batch:
    g = torch.Generator().manual_seed(number)
    return torch.randn(rows, WIDTH, generator=g), torch.randint(0, 5, (rows,), generator=g)


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Loop:
    """What the step is compared with."""

    def __init__(
        self, model: nn.Module, optimizer: Any, count: int, clip: float | None = None
    ) -> None:
        self.model, self.optimizer, self.count, self.clip = model, optimizer, count, clip
        self.done = 0

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> float:
        loss = F.cross_entropy(self.model(x), y)
        (loss / self.count).backward()
        self.done += 1
        if self.done == self.count:
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done = 0
        return float(loss.detach())


def _pair(name: str, kind: str, count: int, clip: float | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    ours = MODELS[name]()
    theirs = copy.deepcopy(ours)
    loop = Loop(theirs, _optimizer(kind, theirs), count, clip)
    step = rm.compile_step(
        ours,
        F.cross_entropy,
        _optimizer(kind, ours),
        accumulate=count,
        clip_norm=clip,
        options=options or STRICT,
    )
    return step, loop


def _agree(ours: nn.Module, theirs: nn.Module) -> None:
    # Adam moves what is rounding noise by its rate.
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-3)
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            largest = float(q.grad.abs().max())
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-3 * largest + 1e-6)
    for b, c in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(b, c, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "kind", "clip"),
    [
        ("mlp", "sgd", None),
        ("batch norm", "sgd", None),
        ("residual", "adamw", None),
        ("tied", "sgd", 0.05),
    ],
)
def test_a_step_of_micro_batches_is_that_of_a_loop(name: str, kind: str, clip: Any) -> None:
    step, loop = _pair(name, kind, 3, clip)
    for i in range(12):
        wanted = loop(*_batch(i))
        loss = step(*_batch(i))
        assert float(loss) == pytest.approx(wanted, rel=1e-4) and not loss.requires_grad
        assert step.accumulated == (i + 1) % 3
        _agree(step.model, loop.model)
    report = step.report()
    # Eager made the micro-batch that was watched, one for each program, and the first update.
    assert report["compiled"] == 8 and report["eager"] == 4
    assert report["captured"] + report["found"] == 2


def test_random_runs_with_micro_batches_of_several_sizes_and_eager_between(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def drawn(most: int) -> int:
        return int(torch.randint(most, (1,), generator=draw))

    step, loop = _pair(["mlp", "residual", "batch norm"][drawn(3)], "sgd", 2 + drawn(3), **ALLOW)
    for i in range(24):
        x, y = _batch(seed + i, (5, 8)[drawn(2)])
        if drawn(6) == 0:  # a micro-batch of a loop of one's own
            with rm.disabled():
                assert float(step(x, y)) == pytest.approx(loop(x, y), rel=1e-3)
        elif drawn(8) == 0:  # gradients are thrown away
            step.optimizer.zero_grad()
            loop.optimizer.zero_grad()
        else:
            assert float(step(x, y)) == pytest.approx(loop(x, y), rel=1e-3)
        _agree(step.model, loop.model)
    assert step.report()["compiled"] > 0


def test_a_micro_batch_that_fails_is_not_counted_and_loses_nothing() -> None:
    step, loop = _pair("mlp", "adamw", 2)
    for i in range(8):
        step(*_batch(i))
        loop(*_batch(i))
    step(*_batch(8))
    loop(*_batch(8))
    before = [p.grad.clone() for p in step.model.parameters()]
    x, y = _batch(9)
    with pytest.raises((RuntimeError, IndexError)):
        step(x, y + 5)
    assert step.accumulated == 1
    assert all(torch.equal(p.grad, g) for p, g in zip(step.model.parameters(), before, strict=True))
    step(*_batch(10))
    loop(*_batch(10))
    _agree(step.model, loop.model)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient")


def test_a_backward_that_fails_starts_the_step_over() -> None:
    step, _ = _pair("mlp", "sgd", 2, **ALLOW)
    step(*_batch(0))
    kept = [p.detach().clone() for p in step.model.parameters()]
    step._module.loss_fn = lambda o, t: F.cross_entropy(_Fails.apply(o), t)
    with pytest.raises(ValueError, match="no gradient"):
        step(*_batch(1))
    assert step.accumulated == 0 and all(p.grad is None for p in step.model.parameters())
    assert all(torch.equal(p, k) for p, k in zip(step.model.parameters(), kept, strict=True))


def test_parameters_that_only_an_earlier_micro_batch_reached_are_updated() -> None:
    step, loop = _pair("tied", "sgd", 2, **ALLOW)
    for i in range(6):
        for world in (step, loop):
            world.model.use_other = i % 2 == 0
        assert float(step(*_batch(i))) == pytest.approx(loop(*_batch(i)), rel=1e-4)
        _agree(step.model, loop.model)
    assert all(p.grad is None for p in step.model.parameters())


def test_one_infinite_gradient_skips_the_whole_step() -> None:
    torch.manual_seed(0)
    model = MODELS["mlp"]()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = _optimizer("adamw", model)
    step = rm.compile_step(
        model, F.cross_entropy, optimizer, scaler=scaler, accumulate=2, options=STRICT
    )
    for i in range(8):
        step(*_batch(i))
    compiled = step.report()["compiled"]
    kept = [p.detach().clone() for p in model.parameters()]
    x, y = _batch(9)
    x[0, 0] = math.inf
    step(x, y)
    step(*_batch(10))
    assert step.report()["compiled"] == compiled + 2
    assert scaler.get_scale() == 128.0 and step.accumulated == 0
    assert all(torch.equal(p, k) for p, k in zip(model.parameters(), kept, strict=True))
    assert {float(s["step"]) for s in optimizer.state.values()} == {4.0}


def test_the_rest_of_an_epoch_is_the_users_to_apply() -> None:
    step, loop = _pair("mlp", "sgd", 4)
    for i in range(10):
        step(*_batch(i))
        loop(*_batch(i))
    assert step.accumulated == 2
    for optimizer in (step.optimizer, loop.optimizer):
        optimizer.step()
        optimizer.zero_grad()
    step.accumulated = loop.done = 0
    for i in range(10, 14):
        assert float(step(*_batch(i))) == pytest.approx(loop(*_batch(i)), rel=1e-4)
    _agree(step.model, loop.model)
    with pytest.raises(ValueError, match="micro-batch"):
        rm.compile_step(step.model, F.cross_entropy, step.optimizer, accumulate=0)
