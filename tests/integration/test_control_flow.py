"""torch.cond and map inside captured modules: both sides of a condition, infinities on the side
that is not taken, any number of rows, and what is left to PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_capture_operators import Wrapped, check, floats
from test_special_functions import run
from torch import nn
from torch._higher_order_ops.map import map as over

import rm_abstract as rm
from rm_abstract.capture.errors import CaptureError
from rm_abstract.capture.export import capture


@pytest.fixture
def session() -> Iterator[Any]:
    yield rm.init("cpu")
    rm.shutdown()


class Gated(nn.Module):
    """Its layer where the input is positive on average, else its double; a count of rows beside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        def yes(x: torch.Tensor) -> Any:
            return self.layer(x).relu(), x.sum(0)

        def no(x: torch.Tensor) -> Any:
            return x * 2, x.amax(0)

        return torch.cond(x.mean() > 0, yes, no, (x,))


def test_a_condition_is_decided_at_every_call(session: Any) -> None:
    module = Gated().eval()
    rm.accelerate(module)
    expected = Gated().eval()
    expected.load_state_dict(module.state_dict())
    torch.manual_seed(3)
    with torch.no_grad():
        for i in range(6):
            x = torch.randn(3 + i % 2, 4) + (2 if i % 3 else -2)
            for found, wanted in zip(module(x), expected(x), strict=True):
                torch.testing.assert_close(found, wanted)
    report = rm.explain(module)
    assert report.routed > 0, str(report)


def test_the_side_that_is_not_taken_may_overflow() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.log(), lambda x: x.exp(), (x,))

    for x in (torch.full((5,), 1e30), torch.tensor([-1.0, math.nan, 2, -math.inf, 0])):
        torch.testing.assert_close(run(function, x), function(x), equal_nan=True)


def test_conditions_may_be_inside_of_each_other() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cond((x > 1).any(), lambda x: x * 3, lambda x: x - 1, (x,))

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, inner, lambda x: -x, (x,))

    for x in (torch.tensor([0.5, 0.2]), torch.tensor([2.0, 0.2]), torch.tensor([-2.0, 0.2])):
        torch.testing.assert_close(run(function, x), function(x))


def test_a_look_up_on_one_side_is_left_to_pytorch() -> None:
    """An index is good only where its side is taken."""
    table = torch.randn(3, 4)

    def function(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return torch.cond(i.max() < 3, lambda x, i: x + table[i], lambda x, i: x, (x, i))

    # PyTorch 2.11 refuses the tensor of the surrounding function before we see the branch.
    reasons = "branches that may both be computed, got index|UncapturedHigherOrderOpError"
    with pytest.raises(CaptureError, match=reasons):
        capture(Wrapped(function).eval(), (torch.randn(2, 4), torch.tensor([1, 2])), {})


def test_a_map_takes_any_number_of_rows() -> None:
    def row(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).softmax(-1) + x.sum()

    check(lambda x, w: over(row, x, w), lambda a, b: (floats(a, 5, b), floats(b, b)), True)


def test_a_loop_is_refused_by_name() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def function(x: torch.Tensor) -> Any:
        return while_loop(lambda x: x.sum() < 9, lambda x: (x + 1,), (x,))

    with pytest.raises(CaptureError, match="the region while_loop"):
        capture(Wrapped(function).eval(), (torch.zeros(3),), {})


class Pairs(nn.Module):
    """A number for every pair of rows, and one for each row, as torch.vmap makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)

        def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a * b).sum() + self.layer.bias[0]

        pairs = torch.vmap(torch.vmap(product, in_dims=(None, 0)), in_dims=(0, None))(y, y)
        return pairs + torch.vmap(lambda row: row.cumsum(0)[-1])(y)[:, None]


def test_vmap_is_what_it_makes_of_the_operators_inside(session: Any) -> None:
    module = Pairs().eval()
    rm.accelerate(module)
    with torch.no_grad():
        for rows in (3, 5, 4, 3, 6):
            x = torch.randn(rows, 4)
            with rm.disabled():
                wanted = module(x)
            torch.testing.assert_close(module(x), wanted, rtol=1e-4, atol=1e-5)
    report = rm.explain(module)
    assert report.routed == 4, str(report)
