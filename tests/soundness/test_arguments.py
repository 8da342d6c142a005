"""Arguments are told apart by the same table of kinds as attributes."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from soundness import Base, X, quiet, routed, same_as_eager


class Level(enum.IntEnum):
    LOW = 2
    HIGH = 3


class Mode(str, enum.Enum):
    PLAIN = "plain"
    DOUBLE = "double"


class Scales(Base):
    def forward(self, x: torch.Tensor, scale: Any = 1.0, mode: Any = "plain") -> torch.Tensor:
        y = self.inner(x) * (2 if mode == "double" else 1)
        return torch.copysign(y, torch.full((), float(scale))) * (abs(scale) + 1)


@pytest.mark.parametrize(
    "values",
    [
        [np.float64(0.5), np.float64(2.5)],
        [np.float32(0.5), np.int64(2)],
        [Level.LOW, Level.HIGH, 2, 3],
        [True, 1, 1.0, np.bool_(True).item()],
        [0.0, -0.0, 0, False],
        [float("inf"), float("-inf")],
        [2**40, -(2**40)],
    ],
    ids=str,
)
def test_numbers_of_every_kind_may_be_arguments(values: list[Any]) -> None:
    model = Scales().eval()
    for _ in range(3):
        for value in values:
            same_as_eager(model, X, scale=value)
            if not isinstance(value, np.generic):
                now = quiet(lambda value=value: model(X, scale=value))
                with torch.no_grad():
                    right = model.forward(X, scale=value)
                assert torch.equal(torch.signbit(now), torch.signbit(right))


def test_members_of_an_enum_are_routed_and_told_apart() -> None:
    model = Scales().eval()
    for _ in range(3):
        for mode in (Mode.PLAIN, Mode.DOUBLE, "plain", "double"):
            same_as_eager(model, X, mode=mode)
    assert routed(model) == 8


@pytest.mark.parametrize(
    "value", [b"raw", 1 + 2j, range(3), {1, 2}, object()], ids=lambda value: type(value).__name__
)
def test_what_is_no_data_is_left_to_eager_without_an_exception(value: Any) -> None:
    class Ignores(Base):
        def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
            return self.inner(x)

    model = Ignores().eval()
    for _ in range(3):
        same_as_eager(model, X, other=value)


def test_a_class_of_numbers_of_the_users_own_is_an_argument_as_in_eager() -> None:
    class Own(float):
        def __abs__(self) -> float:
            return 7.0

    model = Scales().eval()
    for _ in range(3):
        same_as_eager(model, X, scale=Own(0.5))
        same_as_eager(model, X, scale=0.5)


class Walks(Base):
    def forward(self, **parts: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(8)
        for weight, part in enumerate(parts.values()):
            out = out + self.inner(part) * (weight + 1)
        return out


def test_keywords_beyond_the_signature_keep_their_order() -> None:
    """A program that took them in the order of another call gave one the other's place."""
    model = Walks().eval()
    for _ in range(3):
        same_as_eager(model, a=X, b=X + 1)
        same_as_eager(model, b=X, a=X + 1)  # another program
        same_as_eager(model, b=X[None], c=X[None] - 1, a=X[None] + 1)  # other names before
        same_as_eager(model, a=X[None], c=X[None] - 1, b=X[None] + 1)
    assert routed(model) == 8


class Asks(Base):
    def __init__(self, ask: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1.0 + float(self.ask(x)))


def parameter() -> torch.Tensor:
    return torch.nn.Parameter(X, requires_grad=False)


def with_gradient() -> torch.Tensor:
    made = X.clone().requires_grad_()
    made.grad = torch.ones_like(made)
    return made


ASKED: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[], torch.Tensor]]] = {
    "class": (lambda x: isinstance(x, torch.nn.Parameter), parameter),
    "version": (lambda x: x._version % 8, lambda: X.clone().add_(1)),
    "offset": (lambda x: x.storage_offset(), lambda: torch.randn(5, 8)[1:]),
    "stride": (lambda x: x.stride(0), lambda: torch.randn(1, 16)[:, :8]),
    "shared": (lambda x: x.is_shared(), lambda: X.clone().share_memory_()),
    "gradient": (lambda x: x.grad is not None, with_gradient),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_forward_asks_a_tensor_is_answered_as_in_eager(name: str) -> None:
    ask, other = ASKED[name]
    model = Asks(ask).eval()
    for _ in range(3):
        same_as_eager(model, X.clone())
        same_as_eager(model, X[:1].clone())
        same_as_eager(model, other())
