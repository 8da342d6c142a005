"""Running products and extremes, and writes that combine: equal to torch's with ties, NaN,
infinities, places met twice or never, and integers that wrap."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_special_functions import run

from rm_abstract.capture.export import capture

LINES = torch.tensor(
    [
        [1.0, 3, 3, 2, -1, 3],
        [math.nan, 1, 2, math.inf, 0, 1],
        [2, math.nan, 5, math.nan, 1, 0],
        [-math.inf, -math.inf, 0, math.inf, -math.inf, 1],
        [0.0, -0.0, 0, -0.0, 1e-30, 1e30],
    ]
)


def everything(x: torch.Tensor) -> list[torch.Tensor]:
    found = [x.cumprod(1), x.cumprod(0), *x.cummax(1), *x.cummin(1), *x.cummax(0), *x.cummin(-2)]
    return [*found, x.logcumsumexp(1), x.logcumsumexp(0)] if x.is_floating_point() else found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_running_values_and_places_are_torchs(dtype: torch.dtype) -> None:
    x = LINES if dtype.is_floating_point else LINES.nan_to_num(3, 2**40, -(2**40)).long()
    x = x.to(dtype)
    tolerance = {"rtol": 2**-7, "atol": 0.0} if dtype == torch.bfloat16 else {}
    for found, expected in zip(run(everything, x), everything(x), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)


def test_a_running_product_in_a_narrow_type_wraps() -> None:
    x = torch.arange(1, 31, dtype=torch.int64)[None].expand(2, -1).contiguous()
    found = run(lambda x: [x.cumprod(1), x.cumprod(1, dtype=torch.int32)], x)
    assert torch.equal(found[0], x.cumprod(1))
    assert torch.equal(found[1], x.cumprod(1, dtype=torch.int32))


@pytest.mark.parametrize("included", [True, False], ids=["with itself", "without itself"])
def test_writes_combine_with_what_was_there(included: bool) -> None:
    x = torch.tensor([[5.0, -5, math.nan, 7, 9], [1, 2, 3, 4, math.inf]])
    index = torch.tensor([[0, 0, 2, 3, 3], [1, 4, 4, 0, 1]])  # place 4 of row 0 is never met
    source = torch.tensor([[6.0, 4, 1, math.nan, 8, 9], [-2, -math.inf, 1, 0, 3, 9]])
    row = torch.tensor([1, 1])

    def combined(x: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
        made = []
        for how in ("sum", "prod", "mean", "amax", "amin"):
            made.append(x.scatter_reduce(1, index, source, how, include_self=included))
            if how != "sum":
                narrow = source[:, :5]
                made.append(x.index_reduce(0, row, narrow, how, include_self=included))
        return made

    for found, expected in zip(run(combined, x, source), combined(x, source), strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_integers_and_marks_combine_too() -> None:
    index = torch.tensor([0, 0, 2])
    x, source = torch.tensor([2**62, -3, 5]), torch.tensor([4, 7, 2])
    marks, more = torch.tensor([True, False, True]), torch.tensor([True, False, False])

    def combined(x: Any, source: Any, marks: Any, more: Any) -> list[torch.Tensor]:
        ways = ("sum", "prod", "amax", "amin")
        return [
            *(x.scatter_reduce(0, index, source, how) for how in ways),
            *(marks.scatter_reduce(0, index, more, how) for how in ways[2:]),
        ]

    given = (x, source, marks, more)
    for found, expected in zip(run(combined, *given), combined(*given), strict=True):
        assert torch.equal(found, expected)


def test_a_number_is_a_line_of_one_element() -> None:
    x, index, source = torch.tensor(2.0), torch.tensor([0]), torch.tensor(-1.5)

    def function(x: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
        ways = ("mean", "amin", "prod")
        return [*(x.index_reduce(0, index, source, how) for how in ways), x.cumprod(0)]

    for found, expected in zip(run(function, x, source), function(x, source), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_place_outside_is_refused() -> None:
    from test_capture_operators import Wrapped

    from rm_abstract import _core

    x, index = torch.zeros(3), torch.tensor([0, 3])
    module = Wrapped(lambda x, i: x.scatter_reduce(0, i, x[:2], "amax"))
    captured = capture(module, (x, torch.tensor([0, 1])), {})
    program = _core.Program(captured.ir, {}, ["cpu"])
    with pytest.raises(_core.CoreError, match=r"\[scatter\] expected indices in \[0, 3\), got 3"):
        program.run([x, index])
