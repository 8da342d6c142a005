"""Objects made in C whose inside can be compared are served, and an edit of them is noticed."""

from __future__ import annotations

import array
import collections
import ctypes
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from soundness import Base, X, eager, routed

import rm_abstract as rm


class ListWithSlot(list[float]):
    __slots__ = ("scale",)


def with_slot() -> ListWithSlot:
    made = ListWithSlot([1.0])
    made.scale = 2.0
    return made


def pick(box: list[float], i: int = 0) -> float:
    return box[i]


def _set(holder: Any) -> None:
    holder[0] = 3


BEHIND = {"v": 2.0}

# holder, how forward reads it, an edit
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytearray": (lambda: bytearray([2]), lambda h: float(h[0]), _set),
    "array": (lambda: array.array("d", [2.0]), lambda h: h[0], _set),
    "ctypes": (lambda: ctypes.c_double(2.0), lambda h: h.value, lambda h: setattr(h, "value", 3.0)),
    "proxy": (
        lambda: types.MappingProxyType(BEHIND),
        lambda h: h["v"],
        lambda h: BEHIND.update(v=BEHIND["v"] + 1),
    ),
    "default_dict": (
        lambda: collections.defaultdict(lambda: 2.0),
        lambda h: h["absent"] if "absent" in h else h.default_factory(),
        lambda h: setattr(h, "default_factory", lambda: 3.0),
    ),
    "partial": (
        lambda: functools.partial(pick, box=[2.0]),
        lambda h: h(),
        lambda h: h.__setstate__((pick, (), {"box": [3.0]}, {})),
    ),
    "slot_of_a_list": (with_slot, lambda h: h.scale, lambda h: setattr(h, "scale", 3.0)),
}


class Reads(Base):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        make, self.read, _ = CASES[kind]
        self.h = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x)) * self.read(self.h)


@pytest.mark.parametrize("kind", CASES)
def test_an_object_made_in_c_is_served_and_watched(kind: str) -> None:
    model = Reads(kind).eval()
    rm.init()
    with torch.no_grad():
        before = [model(X) for _ in range(4)][-1]
        assert routed(model)
        CASES[kind][2](model.h)
        after, expected = model(X), eager(lambda: model(X))
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, expected)
