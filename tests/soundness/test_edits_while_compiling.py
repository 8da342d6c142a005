"""What another thread changes while a first call is compiled is noticed by the next call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from soundness import Base, X, quiet, routed, same_as_eager
from torch import nn

from rm_abstract.engines.native import NativeEngine


class Scaled(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        out = self.inner(x) * self.scale + self.shift
        return out if y is None else out + y


def in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def replace_a_weight(model: Scaled) -> None:
    model.inner.weight = nn.Parameter(model.inner.weight.detach() + 1)


def write_a_weight(model: Scaled) -> None:
    with torch.no_grad():
        model.inner.weight.add_(1)


def replace_a_buffer(model: Scaled) -> None:
    model.shift = model.shift + 1


def set_an_attribute(model: Scaled) -> None:
    model.scale = 3.0


def call_too(model: Scaled) -> None:
    """Its call sees the change before the first call is through."""
    replace_a_weight(model)
    quiet(lambda: model(X))


EDITS = [replace_a_weight, write_a_weight, replace_a_buffer, set_an_attribute, call_too]


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], Any]], None]:
    """Does something once, when a method of the engine has run."""

    def install(method: str, work: Callable[[], Any]) -> None:
        stock, todo = getattr(NativeEngine, method), [work]

        def patched(*args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            while todo:
                todo.pop()()
            return result

        monkeypatch.setattr(NativeEngine, method, patched)

    return install


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("method", ["signature_of", "make_variant", "gate"])
def test_an_edit_in_the_middle_of_a_first_call_is_noticed(
    edit: Callable[[Scaled], None], method: str, behind: Any
) -> None:
    model = Scaled().eval()
    behind(method, lambda: in_thread(lambda: edit(model)))
    quiet(lambda: model(X))  # gives the state before or behind the edit
    for _ in range(6):
        same_as_eager(model, X)
    assert routed(model) >= 2


@pytest.mark.parametrize("edit", EDITS)
def test_calls_compiled_before_notice_it_too(edit: Callable[[Scaled], None], behind: Any) -> None:
    model = Scaled().eval()
    for _ in range(3):
        same_as_eager(model, X)
    before = routed(model)
    behind("signature_of", lambda: in_thread(lambda: edit(model)))
    quiet(lambda: model(X, X))  # another kind of call: compiled
    for _ in range(6):
        same_as_eager(model, X)
        same_as_eager(model, X, X)
    assert routed(model) > before
