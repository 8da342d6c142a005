"""A digest of weights says what they hold now, also where other threads read them ahead."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator

import pytest
import torch

import rm_abstract as rm
from rm_abstract.engines import weight_digests
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


def test_a_share_is_read_once_by_whoever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Hashable] = []
    stock, begun, go_on = weight_digests._contents, threading.Event(), threading.Event()
    mine = threading.get_ident()

    def counted(tensors: dict[Hashable, torch.Tensor], names: Iterable[Hashable]) -> object:
        if threading.get_ident() != mine:
            begun.set()
            assert go_on.wait(30)
        read.extend(names)
        if threading.get_ident() == mine:
            go_on.set()  # the other thread had one share, this one read all the rest
        return stock(tensors, names)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    weights, digests = some(), WeightDigests()
    expected = now(weights)
    monkeypatch.setattr(weight_digests, "_contents", counted)
    digests.begin(weights.values())
    assert begun.wait(30)
    assert digests.of(weights) == digests.of(weights) == expected
    assert len(read) == len(set(read)) == len({id(t) for t in weights.values()})


def test_what_reading_ahead_raises_reaches_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, digests = some(), WeightDigests()

    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(weight_digests, "_contents", broken)
    digests.begin(weights.values())
    with pytest.raises(MemoryError):
        digests.of(weights)


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
