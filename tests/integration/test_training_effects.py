"""Forwards that do more than compute: eager makes their steps, one forward each, and says why."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rm_abstract as rm
from rm_abstract.training.pure_forward import _CHANGES, _PAUSE

pytestmark = pytest.mark.usefixtures("closed_session")


def _of(effect: Callable[[Any], None], optimizer: str = "sgd") -> tuple[nn.Module, Any]:
    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            effect(self)
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Layer(8, 8), nn.Linear(8, 3))
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    return model, rm.compile_step(
        model,
        F.cross_entropy,
        kinds[optimizer](model.parameters(), lr=0.1),
        options={"fallback": "allow"},
    )


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 8), torch.arange(5) % 3


def _counts(where: Any) -> None:
    where.seen = getattr(where, "seen", 0) + 1


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", ["list", "dict", "attribute", "tensors"])
def test_a_forward_that_stores_runs_once_a_step(kind: str, optimizer: str) -> None:
    calls: list[Any] = []
    numbers = {"n": 0}
    effects: dict[str, Callable[[Any], None]] = {
        "list": lambda _: calls.append(1),
        "dict": lambda _: numbers.update(n=numbers["n"] + 1),
        "attribute": _counts,
        "tensors": lambda layer: calls.append(layer.bias.detach().mean()),
    }
    model, step = _of(effects[kind], optimizer)
    for i in range(1, 9):
        step(*_batch())
        happened = {"dict": numbers["n"], "attribute": getattr(model[0], "seen", 0)}  # type: ignore[index]
        assert happened.get(kind, len(calls)) == i
    report = step.report()
    assert report["reasons"].keys() == {"RM205"}
    assert report["eager"] == 8 and report["compiled"] == 0
    assert "captured" not in report  # nothing was made to be thrown away


def test_a_loss_that_stores_runs_once_a_call() -> None:
    calls: list[int] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(len(output))
        return F.cross_entropy(output, target)

    compiled = rm.compile_loss(nn.Linear(8, 3), loss, options={"fallback": "allow"})
    for i in range(1, 6):
        compiled(*_batch()).backward()
        assert len(calls) == i
    assert "RM205" in compiled.report()["reasons"]


def test_a_forward_that_sets_something_up_is_compiled_behind_it() -> None:
    kept: dict[str, int] = {}
    _, step = _of(lambda _: kept.setdefault("first", 1) and None)
    for _ in range(6):
        step(*_batch())
    assert step.report()["compiled"] >= 2 and not step.report()["reasons"]


def test_a_forward_whose_effect_ends_is_compiled_later() -> None:
    calls: list[int] = []
    flags = {"watch": True}
    _, step = _of(lambda _: calls.append(1) if flags["watch"] else None)
    for _ in range(4):
        step(*_batch())
    assert "RM205" in step.report()["reasons"]
    flags["watch"] = False
    for _ in range(_PAUSE + 6):
        step(*_batch())
    assert len(calls) == 4 and step.report()["compiled"] > 0


def test_python_numbers_are_drawn_once_a_step() -> None:
    draw = random.Random(0)
    seen: list[float] = []
    _, step = _of(lambda _: seen.append(draw.random()))
    for _ in range(5):
        step(*_batch())
    twin = random.Random(0)
    assert seen == [twin.random() for _ in range(5)]


def test_an_argument_that_the_forward_changes_is_a_reason() -> None:
    class Pops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
            y: torch.Tensor = self.layer(inputs.pop())
            return y

    model = Pops()
    step = rm.compile_step(
        model,
        F.cross_entropy,
        torch.optim.SGD(model.parameters(), lr=0.1),
        options={"fallback": "allow"},
    )
    for _ in range(3):
        x, y = _batch()
        given = [x]
        step((given,), y)
        assert not given
    assert "RM205" in step.report()["reasons"]


def test_a_module_that_changes_in_front_of_each_step_is_a_reason() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(8, 3), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            return y * self.scale

    model = Scaled()
    step = rm.compile_step(
        model,
        F.cross_entropy,
        torch.optim.SGD(model.parameters(), lr=0.1),
        options={"fallback": "allow"},
    )
    for _ in range(_CHANGES + 3):
        model.scale *= 0.9
        step(*_batch())
    assert "scale" in step.report()["reasons"]["RM118"]
    for _ in range(_PAUSE + 6):  # it stays as it is now
        step(*_batch())
    assert step.report()["compiled"] > 0


def test_a_profiler_leaves_the_first_step_to_eager() -> None:
    import cProfile

    _, step = _of(lambda _: None)
    with cProfile.Profile():
        step(*_batch())
    assert "RM210" in step.report()["reasons"]
    for _ in range(4):
        step(*_batch())
    assert step.report()["compiled"] > 0


@pytest.mark.parametrize("place", ["model", "closure"])
def test_running_means_and_dropout_are_no_effects(place: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scale = 0.5 if place == "closure" and model.training else 1.0
        return F.cross_entropy(output, target) * scale

    step = rm.compile_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        step(*_batch())
    assert step.report()["compiled"] == 3 and not step.report()["reasons"]
