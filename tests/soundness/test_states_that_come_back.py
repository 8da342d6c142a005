"""A module whose structure is again what it was runs what was compiled for it, at the cost of
comparisons (decision 0260): and only then, whatever a script does to lists, weights and parts."""

from __future__ import annotations

import importlib
import random
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rm_abstract as rm
from rm_abstract.guards import sources

LAYER = """
    import torch

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base = torch.nn.Linear(6, 6)
            self.adapters = torch.nn.ModuleDict(
                {name: torch.nn.Linear(6, 6) for name in ("first", "second")}
            )
            self.scaling = {"first": 1.0, "second": 2.0}
            self.active = ["first"]

        def forward(self, x):
            result = self.base(x)
            for name in self.active:
                result = result + self.adapters[name](x) * self.scaling[name]
            return result

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(), Layer()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
            return x
    """


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Of an installed package; there is a session."""
    installed = tmp_path / "site-packages"
    (installed / "coming_back").mkdir(parents=True)
    (installed / "coming_back" / "__init__.py").write_text(textwrap.dedent(LAYER))
    monkeypatch.syspath_prepend(str(installed))
    torch.manual_seed(0)
    rm.init("cpu")
    yield rm.accelerate(importlib.import_module("coming_back").Model().eval())
    rm.shutdown()
    del sys.modules["coming_back"]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each time that a module is searched for what its forward reads."""
    real, found = sources.of_module, []

    def of_module(module: torch.nn.Module) -> Any:
        found.append(module)
        return real(module)

    monkeypatch.setattr(sources, "of_module", of_module)
    return found


def agree(model: Any) -> None:
    x = torch.randn(3, 6)
    with torch.no_grad():
        with rm.disabled():
            wanted = model(x)
        torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)


def switch(model: Any, name: str) -> None:
    for layer in model.layers:
        layer.active = [name]


def routed(model: Any) -> int:
    return int(rm.explain(model).to_dict()["models"][0]["routed"])


def test_a_switch_to_a_known_state_searches_nothing(model: Any, searches: list[Any]) -> None:
    for turn in range(4):
        switch(model, ("first", "second")[turn % 2])
        agree(model)
    searches.clear()
    before = routed(model)
    for turn in range(20):
        switch(model, ("first", "second")[turn % 2])
        agree(model)
    assert not searches
    assert routed(model) - before == 20


def test_calls_of_another_kind_are_compiled_for_their_own_state(model: Any) -> None:
    for turn in range(24):
        switch(model, ("first", "second")[turn % 2])
        rows = 1 + turn // 4 % 3
        x = torch.randn(rows, 2, 6) if turn % 3 else torch.randn(rows, 6)
        with torch.no_grad():
            with rm.disabled():
                wanted = model(x)
            torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)


def test_an_entry_of_a_list_that_was_taken_over_is_watched(model: Any) -> None:
    for turn in range(6):
        switch(model, ("first", "second")[turn % 2])
        agree(model)
    for layer in model.layers:
        layer.active[0] = "first"  # in place: the list came with the last switch
    agree(model)
    model.layers[1].active.append("second")
    agree(model)


def test_one_list_for_all_layers_is_watched_in_each(model: Any) -> None:
    for turn in range(6):
        shared = [("first", "second")[turn % 2]]
        for layer in model.layers:
            layer.active = shared
        agree(model)
    kept, model.layers[0].active = model.layers[0].active, ["second"]
    agree(model)
    kept[0] = "first"  # of the second layer alone by now
    agree(model)


def test_weights_written_while_another_state_ran_are_read(model: Any) -> None:
    for turn in range(16):
        switch(model, ("first", "second")[turn % 2])
        if turn in (5, 6, 9):
            with torch.no_grad():
                model.layers[0].adapters["second"].weight.mul_(1.5)
        if turn in (7, 12):
            model.layers[1].base.weight.data.add_(0.5)
        agree(model)


def lists(rng: random.Random, layer: Any) -> None:
    names = rng.choice([["first"], ["second"], ["first", "second"], []])
    rng.choice(
        [
            lambda: setattr(layer, "active", names),
            lambda: layer.active.__setitem__(slice(None), names),
        ]
    )()


def numbers(rng: random.Random, layer: Any) -> None:
    layer.scaling[rng.choice(["first", "second"])] = rng.choice([1.0, 2.0])


def dictionaries(rng: random.Random, layer: Any) -> None:
    layer.scaling = {"first": 1.0, "second": rng.choice([1.0, 2.0])}


def written(rng: random.Random, layer: Any) -> None:
    weight = rng.choice([layer.base, layer.adapters["first"]]).weight
    with torch.no_grad():
        weight.mul_(1.1) if rng.random() < 0.5 else weight.data.add_(0.1)


def replaced(rng: random.Random, layer: Any) -> None:
    name = rng.choice(["first", "second"])
    layer.adapters[name] = torch.nn.Linear(6, 6).eval()


def exchanged(rng: random.Random, layer: Any) -> None:
    first, second = layer.adapters["first"], layer.adapters["second"]
    layer.adapters["first"], layer.adapters["second"] = second, first


EDITS: list[Callable[[random.Random, Any], None]] = [
    *([lists] * 6),
    *(numbers, numbers, dictionaries, written, replaced, exchanged),
]


def test_whatever_is_edited_between_calls_the_answer_is_of_now(model: Any, seed: int) -> None:
    rng = random.Random(seed)
    shared = rng.random() < 0.5
    for _ in range(3):  # compiled before edits come so often that the router pauses
        agree(model)
    for _ in range(30):
        for _ in range(rng.randrange(1, 4)):
            rng.choice(EDITS)(rng, rng.choice(model.layers))
        if shared and rng.random() < 0.3:
            model.layers[0].active = model.layers[1].active
        for _ in range(rng.randrange(1, 4)):
            agree(model)
    assert routed(model)


class Asking(torch.nn.Module):
    """Code of the user's asks whether two lists are one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.one = self.other = [1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2.0 if self.one is self.other else 3.0)


def test_code_of_the_user_may_ask_which_list_it_is() -> None:
    rm.init("cpu")
    try:
        model: Any = rm.accelerate(Asking().eval())
        for turn in range(12):
            model.one = model.other if turn // 2 % 2 else list(model.other)
            agree(model)
    finally:
        rm.shutdown()
