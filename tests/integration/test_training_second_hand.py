"""What a second hand found in steps that C++ makes: each against the same steps in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import step_pairs
import torch
import torch.nn.functional as F
from step_pairs import layers
from torch import nn

import rm_abstract as rm

pytestmark = pytest.mark.usefixtures("closed_session")


class Pair(step_pairs.Pair):
    """Whose parameters of the names that begin with ``frozen`` are not trained at first."""

    def __init__(self, model: nn.Module, frozen: str = "", **sgd: Any) -> None:
        for name, p in model.named_parameters():
            p.requires_grad_(not frozen or not name.startswith(frozen))
        super().__init__(model, lr=0.1, **sgd)

    def settle(self, steps: int = 8) -> None:
        for _ in range(steps):
            self.both()
        assert self.step._settled is not None  # or this tests nothing

    def compare(self) -> None:
        mine, theirs = (m.state_dict() for m in self.models)
        for name, tensor in mine.items():
            torch.testing.assert_close(
                tensor.resolve_neg(), theirs[name].resolve_neg(), rtol=1e-4, atol=1e-6
            )


@pytest.mark.parametrize("steps", [2, 8, 20])
def test_a_layer_that_is_trained_again_moves(steps: int) -> None:
    pair = Pair(layers(), frozen="0.")
    for _ in range(steps):
        pair.both(*pair.batch())
    for m in pair.models:
        m[0].requires_grad_(True)  # type: ignore[index]
    before = pair.models[0][0].weight.detach().clone()  # type: ignore[index]
    for _ in range(4):
        pair.both(*pair.batch())
    pair.compare()
    assert not torch.equal(before, pair.models[0][0].weight)  # type: ignore[index]


def test_a_gradient_by_hand_of_a_frozen_weight_is_cleared() -> None:
    pair = Pair(layers(), frozen="0.")
    pair.settle()
    for m in pair.models:
        m[0].weight.grad = torch.ones(8, 8)  # type: ignore[index]
    pair.both(*pair.batch())
    for m in pair.models:
        assert m[0].weight.grad is None  # type: ignore[index]


@pytest.mark.parametrize("steps", [2, 8])
def test_a_weight_outside_the_optimizer_gets_its_gradient_once_it_wants_one(steps: int) -> None:
    model = layers()
    model[0].requires_grad_(False)  # type: ignore[index]
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)  # type: ignore[index]
    step = rm.compile_step(model, F.cross_entropy, optimizer)
    for _ in range(steps):
        step(torch.randn(5, 8), torch.arange(5) % 3)
    model[0].weight.requires_grad_(True)  # type: ignore[index]
    step(torch.randn(5, 8), torch.arange(5) % 3)
    assert model[0].weight.grad is not None  # type: ignore[index]
    assert "RM703" in step.report()["reasons"]


def test_an_optimizer_with_other_attributes_is_asked_for_them() -> None:
    pair = Pair(layers())
    pair.settle()
    for o in pair.optimizers:
        o.__dict__ = {**o.__dict__, "param_groups": [{**o.param_groups[0], "lr": 0.0}]}
    for _ in range(2):
        pair.both(*pair.batch())
    pair.compare()


def test_a_plain_optimizer_keeps_no_empty_states() -> None:
    pair = Pair(layers())
    pair.settle()
    assert pair.optimizers[0].state_dict()["state"] == {}


def test_two_names_of_one_buffer_are_a_reason_and_no_assertion() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 3), nn.BatchNorm1d(3)
            self.mean = self.norm.running_mean

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.norm(self.linear(x))
            return y + self.mean

    pair = Pair(Norm())
    for _ in range(3):
        pair.both(*pair.batch())
    pair.compare()
    assert "RM201" in pair.step.report()["reasons"]


def _momentum(optimizer: torch.optim.Optimizer, model: Any) -> None:
    state = optimizer.state[model[2].weight]
    state["momentum_buffer"] = torch._neg_view(state["momentum_buffer"])


def _weight(optimizer: torch.optim.Optimizer, model: Any) -> None:
    model[2].weight.data = torch._neg_view(model[2].weight.data)


@pytest.mark.parametrize("edit", [_weight, _momentum])
def test_a_negated_view_is_its_value(edit: Callable[[Any, Any], None]) -> None:
    pair = Pair(layers(), momentum=0.9)
    pair.settle()
    for optimizer, model in zip(pair.optimizers, pair.models, strict=True):
        edit(optimizer, model)
    for _ in range(3):
        pair.both(*pair.batch())
    pair.compare()


@pytest.mark.parametrize("turned", ["inputs", "targets", "conjugated"])
def test_a_batch_that_is_a_negated_view_is_its_value(turned: str) -> None:
    pair = Pair(layers())
    pair.settle()
    x, y = pair.batch()
    if turned == "inputs":
        pair.both(torch._neg_view(x), y)
    elif turned == "conjugated":
        pair.both(torch.complex(x, x).conj().imag, y)
    else:
        pair.both(x, torch._neg_view(-y))
    pair.both(*pair.batch())
    pair.compare()


@pytest.mark.parametrize("settled", [False, True])
def test_a_target_that_is_refused_moves_running_means_once(settled: bool) -> None:
    torch.manual_seed(0)
    pair = Pair(nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    if settled:
        pair.settle()
    else:
        for _ in range(3):
            pair.both(*pair.batch())
    x, y = pair.batch()
    for step in (pair.step, pair.eager):
        with pytest.raises(IndexError):
            step(x, torch.full_like(y, 99))
    pair.compare()
    pair.both(*pair.batch())
    pair.compare()


def test_a_weight_that_is_a_negated_view_is_its_value_for_a_routed_model() -> None:
    rm.init("cpu", fallback="warn", compile_options={"when_slower": "compiled"})
    model, x = layers().eval(), torch.randn(4, 8)
    rm.accelerate(model)
    with torch.no_grad():
        for _ in range(6):
            model(x)
        model[2].weight.data = torch._neg_view(model[2].weight.data)  # type: ignore[index]
        for _ in range(3):
            got = model(x)
            with rm.disabled():
                wanted = model(x)
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
def test_a_loss_that_closes_over_the_model_gives_its_parameters_gradients(norm: bool) -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 3)
    )
    torch.manual_seed(0)
    pair = Pair(model)

    def loss(m: nn.Module) -> Any:
        return lambda o, y: F.cross_entropy(o, y) + sum(p.pow(2).sum() for p in m.parameters())

    step = rm.compile_step(model, loss(model), pair.optimizers[0], options={"fallback": "error"})
    twin = loss(pair.models[1])
    for _ in range(6):
        x, y = pair.batch()
        step(x, y)
        pair.optimizers[1].zero_grad()
        twin(pair.models[1](x), y).backward()
        pair.optimizers[1].step()
        pair.compare()
    assert step.report()["compiled"] == 4


@pytest.mark.parametrize("name", ["model", "loss_fn", "precision"])
def test_what_a_step_was_made_of_cannot_be_set(name: str) -> None:
    pair = Pair(layers())
    with pytest.raises(AttributeError):
        setattr(pair.step, name, None)
