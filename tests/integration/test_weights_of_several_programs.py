"""A model's programs share what is made of its weights: copies for a device's worker, joined and
packed weights on the CPU. Weights that change reach all of them, whatever tells of the change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm

SIZE = 64
SHAPES = ((3,), (2, 5), (2, 2, 3))  # a program each


class Attentive(nn.Module):
    """Three products of one operand, whose weights the CPU's programs join."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.q(x)) + torch.sigmoid(self.k(x)) * self.v(x)


def fused(model: Attentive) -> None:
    optimizer = torch.optim.AdamW([model.v.weight], lr=0.3, fused=True)
    model.v.weight.grad = torch.linspace(-1, 1, SIZE * SIZE).reshape(SIZE, SIZE)
    optimizer.step()
    model.v.weight.grad = None


def transposed(model: Attentive) -> None:
    model.v.weight.data = model.v.weight.data.t()


CHANGES: dict[str, Callable[[Attentive], Any]] = {
    ".data scaled": lambda m: m.v.weight.data.mul_(-1.5),
    "several of .data": lambda m: torch._foreach_mul_([m.q.weight.data, m.v.weight.data], -1.5),
    "a fused step of AdamW": fused,
    ".data transposed": transposed,
    ".data of another": lambda m: setattr(m.v.weight, "data", m.k.weight.data.clone()),
}


@pytest.fixture(params=["cpu", "sim:0"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.manual_seed(0)
    yield request.param
    rm.shutdown()


def routed_and_codes(model: nn.Module) -> tuple[int, set[str]]:
    seen = rm.explain(model).to_dict()
    return seen["routed"], {reason["code"] for m in seen["models"] for reason in m["reasons"]}


def serve(model: nn.Module, plain: nn.Module, calls: int = 4) -> None:
    with torch.no_grad():
        for shape in SHAPES * calls:
            x = torch.randn(*shape, SIZE)
            with rm.disabled():
                expected = plain(x)
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_weights_reach_every_program(
    change: Callable[[Attentive], Any], device: str
) -> None:
    rm.init(device)
    plain = Attentive().eval()
    model = rm.accelerate(copy.deepcopy(plain))
    serve(model, plain)
    before, codes = routed_and_codes(model)
    assert before >= 2 * len(SHAPES) and "RM501" not in codes
    for _ in range(2):
        with rm.disabled():
            change(plain)
        change(model)
        serve(model, plain)
    after, codes = routed_and_codes(model)
    assert after >= before + 2 * len(SHAPES) and "RM501" not in codes


def test_a_write_that_nobody_hears_of_is_found_and_reaches_every_program(device: str) -> None:
    rm.init(device, verify="always")
    plain = Attentive().eval()
    model = rm.accelerate(copy.deepcopy(plain))
    serve(model, plain)
    for each in (plain, model):
        each.v.weight.detach().numpy()[:] *= -1.5
    serve(model, plain)
    _, codes = routed_and_codes(model)
    assert "RM504" in codes and not codes & {"RM501", "RM502"}
