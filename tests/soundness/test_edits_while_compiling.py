"""What another thread changes while a first call is compiled is noticed by the next call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from soundness import Base, X, quiet, routed, same_as_eager
from torch import nn

from rm_abstract.engines.eager_gate import EagerGate
from rm_abstract.engines.module_weights import WeightVersions
from rm_abstract.engines.program_engine import ProgramEngine
from rm_abstract.guards import purity
from rm_abstract.hooks.snapshots import Snapshots


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
    """Does something once, when a method of the engine, or of its gate, has run."""

    def install(method: str, work: Callable[[], Any]) -> None:
        owner = EagerGate if method == "check" else ProgramEngine
        stock, todo = getattr(owner, method), [work]

        def patched(*args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            while todo:
                todo.pop()()
            return result

        monkeypatch.setattr(owner, method, patched)

    return install


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("method", ["signature_of", "make_variant", "check"])
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


@pytest.mark.parametrize("edit", [replace_a_weight, write_a_weight, replace_a_buffer])
def test_weights_that_change_while_they_are_compared_condemn_no_program(
    edit: Callable[[Scaled], None], behind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of the cache is compared with older weights than the original had, the program that
    is made then with newer ones."""
    quiet(lambda: Scaled().eval()(X))  # leaves the record
    model = Scaled().eval()
    behind("cached_variant", lambda: in_thread(lambda: edit(model)))
    stock, edits = ProgramEngine.make_variant, [edit]

    def make_variant(*args: Any) -> Any:
        while edits:
            in_thread(lambda: edits.pop()(model))
        return stock(*args)

    monkeypatch.setattr(ProgramEngine, "make_variant", make_variant)
    for _ in range(2):
        quiet(lambda: model(X))  # the weights before or behind the edit
    for _ in range(6):
        same_as_eager(model, X)
    assert routed(model) >= 2


def give_other_memory(model: Scaled) -> None:
    model.inner.weight.data = model.inner.weight.detach() + 1


@pytest.mark.parametrize("edit", [*EDITS, give_other_memory])
@pytest.mark.parametrize("watched", [True, False])
def test_an_edit_right_behind_the_original_is_in_the_program(
    edit: Callable[[Scaled], None], watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot that is taken then knows the new weights, a record of the cache the old ones."""
    quiet(lambda: Scaled().eval()(X))  # leaves the record
    model, edits = Scaled().eval(), [edit]
    if not watched:
        monkeypatch.setattr(purity, "_changed", lambda rows: "")
    stock = Snapshots.settled

    def settled(snapshots: Snapshots) -> int:
        while edits:
            edits.pop()(model)
        return stock(snapshots)

    monkeypatch.setattr(Snapshots, "settled", settled)
    quiet(lambda: model(X))
    for _ in range(6):
        same_as_eager(model, X)
    assert routed(model) >= 2


def test_two_swaps_are_no_return_to_the_first_weights() -> None:
    """The memory of a tensor that is gone is the next one's: the address shows no change."""
    weight = nn.Parameter(torch.ones(512, 512))
    before = WeightVersions([weight])
    for _ in range(4):
        weight = nn.Parameter(torch.ones(512, 512))
        assert WeightVersions([weight]) != before
