"""PyTorch models with unsigned tensors of 16, 32 and 64 bits, and bits read as another type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm


class Applied(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.body = body

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.body(self.scale, *tensors)


@pytest.fixture(autouse=True)
def session() -> Iterator[Any]:
    yield rm.init("cpu")
    rm.shutdown()


UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
CASES: dict[str, Callable[..., Any]] = {
    "to floats": lambda w, x: x.float() * w,
    "to doubles": lambda w, x: x.double() + w,
    "to i64": lambda w, x: (x.long() * 3, w + 1),
    "moved": lambda w, x: (x.t(), x[1:], torch.cat([x, x], 1), w + 1),
    "there and back": lambda w, x: (x.long().to(x.dtype), w + 1),
    "bits": lambda w, x: ((x + w).view(torch.int32) >> 3, w + 1),
    "bits and back": lambda w, x: ((x + w).view(torch.int32) ^ 1).view(torch.float32),
    "another size stays": lambda w, x: ((x + w).view(torch.uint8), w + 1),
}


OF_FLOATS = ("bits", "bits and back", "another size stays")
TRIED = [(name, dtype) for name in CASES if name not in OF_FLOATS for dtype in UNSIGNED]


@pytest.mark.parametrize(("name", "dtype"), TRIED + [(n, torch.float32) for n in OF_FLOATS])
def test_what_forward_does_with_unsigned_tensors_is_as_in_eager(name: str, dtype: Any) -> None:
    module = Applied(CASES[name]).eval()
    rm.accelerate(module)
    for shape in ((3, 4), (3, 4), (5, 2), (0, 4), (1, 1), (3, 4)):
        if dtype is torch.float32:
            x: Any = torch.randn(shape)
        else:
            raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
            raw[..., -1:] |= 128  # of the upper half
            x = raw.view(dtype).reshape(shape)
        with torch.no_grad():
            with rm.disabled():
                expected = module(x)
            given = module(x)
        as_list = [given] if isinstance(given, torch.Tensor) else given
        wanted = [expected] if isinstance(expected, torch.Tensor) else expected
        for a, b in zip(as_list, wanted, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert a.detach().numpy().tobytes() == b.detach().numpy().tobytes()
    assert rm.explain(module).routed > 0, rm.explain(module)
