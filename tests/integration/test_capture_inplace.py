"""In-place operators inside forward: results, aliases and memory are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import rm_abstract as rm

CASES: dict[str, Callable[[torch.Tensor], object]] = {
    "one after the other": lambda x: (x * 2).relu_().add_(1.0),
    "the tensor is read later": lambda x: (y := x * 2, y.relu_(), y + 1)[2],
    "the tensor was read before": lambda x: (y := x * 2, z := y + 1, y.relu_(), z * y)[3],
    "a view taken before": lambda x: (y := x * 2, v := y.t(), y.relu_(), v + 1)[3],
    "a view is changed": lambda x: (y := x * 2, y[0].relu_(), y + 1)[2],
    "a view taken after": lambda x: (y := x * 2, y.relu_(), v := y.t(), v.neg_(), y)[4],
    "an evaluated dropout": lambda x: (y := x * 2, nn.functional.dropout(y, 0.5, False).relu_(), y)[
        2
    ],
    "type_as": lambda x: (y := x * 2, y.type_as(x).relu_(), y)[2],
    "both are returned": lambda x: (y := x * 2, (y, y.relu_()))[1],
    "a result of two": lambda x: (y := (x * 2).chunk(2), y[0].relu_(), torch.cat(y))[2],
    "the input's copy": lambda x: (y := x.clone(), y.sigmoid_(), x + y)[2],
    "with another tensor": lambda x: (x * 2).add_(x, alpha=2).mul_(x),
    "chosen by a mask": lambda x: (x * 2).masked_fill_(x > 0, -1.0),
}


class Changing(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.name = name

    def forward(self, x: torch.Tensor) -> object:
        return CASES[self.name](self.first(x))


@pytest.mark.parametrize("name", CASES)
def test_what_forward_changes_in_place_is_as_in_eager(name):
    rm.init("cpu")
    try:
        model = rm.accelerate(Changing(name).eval())
        with torch.no_grad():
            for x in (torch.randn(6, 4), torch.randn(6, 4), torch.randn(8, 4)):
                found = model(x)
                with rm.disabled():
                    expected = model(x)
                torch.testing.assert_close(found, expected)
                if isinstance(found, tuple):
                    assert found[0].data_ptr() == found[1].data_ptr()
        assert vars(model)["_compiled_call_impl"].route.routed() > 0
    finally:
        rm.shutdown()


def test_activations_in_place_need_no_second_trace(monkeypatch):
    from torch.export import ExportedProgram

    traced = []
    monkeypatch.setattr(ExportedProgram, "run_decompositions", lambda *a, **k: traced.append(a))
    rm.init("cpu")
    try:
        body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).eval()
        rm.accelerate(body)
        with torch.no_grad():
            body(torch.randn(2, 3, 8, 8)), body(torch.randn(2, 3, 8, 8))
        assert vars(body)["_compiled_call_impl"].route.routed() == 1 and not traced
    finally:
        rm.shutdown()
