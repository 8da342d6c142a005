"""In-place operators inside forward: results, aliases and memory are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import rm_abstract as rm


def _windows(mask: torch.Tensor) -> torch.Tensor:
    """As Swin numbers the windows of an image."""
    count = 0
    for rows in ((0, -3), (-3, -1), (-1, None)):
        for columns in ((0, -2), (-2, None)):
            mask[rows[0] : rows[1], columns[0] : columns[1]] = count
            count += 1
    return mask


def _added(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y[1:, 1:] += x[1:, 1:]
    y[:, :2] *= x[:, :2]
    return y.softmax(-1)


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
    "a masked write behind an evaluated dropout": lambda x: (
        *(y := (x * 2), z := nn.functional.dropout(y, 0.5, False)),
        z.__setitem__(x[:, 0] > 0, 0),
        z + y,
    )[-1],
    "type_as": lambda x: (y := x * 2, y.type_as(x).relu_(), y)[2],
    "both are returned": lambda x: (y := x * 2, (y, y.relu_()))[1],
    "a result of two": lambda x: (y := (x * 2).chunk(2), y[0].relu_(), torch.cat(y))[2],
    "the input's copy": lambda x: (y := x.clone(), y.sigmoid_(), x + y)[2],
    "with another tensor": lambda x: (x * 2).add_(x, alpha=2).mul_(x),
    "filled in windows": lambda x: _windows(x.new_zeros(6, 4)) + x[:1],
    "a part with itself": lambda x: _added(x * 2, x),
    "a row of a part": lambda x: (y := x * 2, y[1:][:, 2:][0].mul_(x[0, 2:]), y + 1)[2],
    "a part read before and after": lambda x: (
        *(y := x * 2, v := y[1:], z := v + 1, v.add_(1.0), w := y[:2]),
        z + v + w.sum(),
    )[5],
    "a part and the whole": lambda x: (y := x * 2, y[:, 0].zero_(), y.neg_(), y[:, 1].add_(1), y)[
        4
    ],
    "the whole under a part": lambda x: (y := x * 2, v := y[1:], y.relu_(), v.add_(1.0), y)[4],
    "a part of another type": lambda x: (y := x.double(), y[1:].copy_(x[:-1]), y.float())[2],
    "every second row": lambda x: (y := x * 2, y[::2].zero_(), y)[2],
    "a transposed part": lambda x: (y := x * 2, y.t()[1:].zero_(), y)[2],
    "a part's part": lambda x: (y := x * 2, v := y[2:], v[1:].zero_(), v + y[0])[3],
    "one memory under two names": lambda x: (y := x * 2, z := y.type_as(x), y[1:].neg_(), z)[3],
    "one memory, changed whole": lambda x: (y := x * 2, z := y.type_as(x), y.relu_(), z + 0)[3],
    "a part of the input's copy": lambda x: (y := x.clone(), y[0].zero_(), x + y)[2],
    "part and whole are returned": lambda x: (y := x * 2, v := y[:4], v.neg_(), (y, v))[3],
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
                    assert expected[0].data_ptr() == expected[1].data_ptr()
        assert vars(model)["_compiled_call_impl"].route.routed() > 0
    finally:
        rm.shutdown()


@pytest.mark.parametrize(
    ("body", "size"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), (2, 3, 8, 8)),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5, inplace=True)), (6, 4)),
        (Changing("filled in windows"), (6, 4)),
        (Changing("a part with itself"), (6, 4)),
    ],
)
def test_what_models_of_images_write_in_place_needs_no_second_trace(body, size, monkeypatch):
    from torch.export import ExportedProgram

    traced = []
    monkeypatch.setattr(ExportedProgram, "run_decompositions", lambda *a, **k: traced.append(a))
    rm.init("cpu")
    try:
        rm.accelerate(body.eval())
        with torch.no_grad():
            body(torch.randn(size)), body(torch.randn(size))
        assert vars(body)["_compiled_call_impl"].route.routed() == 1 and not traced
    finally:
        rm.shutdown()
