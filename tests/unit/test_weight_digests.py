"""A digest of weights says what they hold now, also where other threads read them ahead."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

import rm_abstract as rm
from rm_abstract.engines.weight_digests import WeightDigests

Weights = dict[str, torch.Tensor]


@pytest.fixture
def session() -> Iterator[None]:
    rm.init("cpu")
    yield
    rm.shutdown()


def some() -> Weights:
    shared = torch.randn(40, 3)
    return {
        "shared": shared,
        "tied": shared,
        "turned": shared.t(),
        "none": torch.empty(0, 3),
        "half": torch.nn.Parameter(torch.randn(7).to(torch.bfloat16), requires_grad=False),
        "flags": torch.tensor([True, False]),
        **{f"many.{i}": torch.full((2,), float(i)) for i in range(20)},
    }


def now(weights: Weights) -> bytes:
    return WeightDigests().of(weights)


def test_what_is_read_ahead_gives_the_same_digest() -> None:
    weights, digests = some(), WeightDigests()
    digests.begin(list(weights.values())[::2])  # the others are read when they are asked for
    assert digests.of(weights) == digests.of(weights) == now(weights)
    digests.forget()
    assert digests.of(weights) == now(weights)


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights["shared"].add_(1),
        lambda weights: weights.update(flags=torch.tensor([True, True])),
        lambda weights: weights.update(shared=weights["tied"].view(3, 40)),
        lambda weights: weights.update(many=weights.pop("many.3")),
    ],
)
def test_what_changes_afterwards_is_read_anew(change: Callable[[Weights], object]) -> None:
    weights, digests = some(), WeightDigests()
    digests.begin(weights.values())
    before = digests.of(weights)
    change(weights)
    assert digests.of(weights) == now(weights) != before


def test_so_is_what_a_write_through_data_changes(session: None) -> None:
    model = rm.accelerate(torch.nn.Linear(4, 4).eval())
    with torch.no_grad():
        model(torch.randn(2, 4))  # from now on the guard hears of such writes
    weights, digests = dict(model.named_parameters()), WeightDigests()
    digests.begin(weights.values())
    before = digests.of(weights)
    model.weight.data.mul_(2)
    assert digests.of(weights) == now(weights) != before


def test_a_fork_does_not_wait_for_its_parents_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, digests = some(), WeightDigests()
    digests.begin(weights.values())
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert digests._ahead is not None
    for name in digests._ahead.read:
        digests._ahead.read[name] = None  # type: ignore[assignment]
    assert digests.of(weights) == now(weights)


def test_no_memory_is_held_after_a_first_call(session: None) -> None:
    model = rm.accelerate(torch.nn.Linear(4, 4).eval())
    with torch.no_grad():
        model(torch.randn(2, 4))
    engine = vars(model)["_compiled_call_impl"].engine
    assert engine.variants() and engine.artefacts.digests._ahead is None
