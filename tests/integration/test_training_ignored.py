"""What lies beside the tensors of a step and changes what eager does: it is seen, and named."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_pairs import Pair, layers
from torch import nn

import rm_abstract as rm

pytestmark = pytest.mark.usefixtures("closed_session")


BEFORE = pytest.mark.parametrize("steps", [2, 9])  # 9: the step runs without Python


def _accumulation(p: torch.Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(p).node


@BEFORE
@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
def test_hooks_where_gradients_are_added_run(steps: int, kind: str) -> None:
    pair = Pair(layers(), torch.optim.Adam)
    pair.run(steps)
    seen: list[int] = []
    nodes, handles = [], []
    for i, m in enumerate(pair.models):
        node = _accumulation(m[0].weight)  # type: ignore[index]

        def hook(*given: Any, i: int = i) -> Any:
            seen.append(i)
            return (given[0][0] * 0.5,) if kind == "register_prehook" else None

        nodes.append(node)
        handles.append(getattr(node, kind)(hook))
    pair.goes_on_as_eager("RM706")
    assert seen == [0, 1] * 3
    for handle in handles:
        handle.remove()
    compiled = pair.step.report()["compiled"]
    pair.both()
    assert pair.step.report()["compiled"] == compiled + 1  # the node alone changes nothing


def test_a_hook_on_a_node_that_was_there_before_is_seen() -> None:
    pair = Pair(layers())
    nodes = [_accumulation(m[0].weight) for m in pair.models]  # type: ignore[index]
    pair.run(9)
    seen: list[int] = []
    for node in nodes:
        node.register_hook(lambda *_: seen.append(1))
    pair.goes_on_as_eager("RM706")
    assert len(seen) == 6


def test_a_graph_that_somebody_keeps_does_not_keep_steps_from_running() -> None:
    pair = Pair(layers())
    outputs = [m(torch.ones(1, 8)) for m in pair.models]
    pair.run(9)
    settled = pair.step._settled
    pair.both()
    assert outputs and pair.step._settled is settled and settled is not None


@BEFORE
def test_hooks_of_saved_tensors_run(steps: int) -> None:
    pair = Pair(layers())
    pair.run(steps)
    seen: list[int] = []

    def half(t: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return t * 0.5 if t.is_floating_point() else t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, half):
        pair.both()
    assert len(seen) == 16 and "RM706" in pair.step.report()["reasons"]
    pair.both()
    pair.compare()


@BEFORE
@pytest.mark.parametrize("name", ["step", "zero_grad", "_init_group"])
@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_function_of_the_optimizer_that_was_replaced_is_called(
    steps: int, name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(layers(), torch.optim.Adam)
    pair.run(steps)
    seen: list[Any] = []
    plain = getattr(torch.optim.Adam, name)

    def mine(self: Any, *args: Any, **named: Any) -> Any:
        seen.append(self)
        return plain(self, *args, **named)

    if where == "class":
        monkeypatch.setattr(torch.optim.Adam, name, mine)
    else:
        for o in pair.optimizers:
            setattr(o, name, mine.__get__(o))
    pair.goes_on_as_eager("RM701")
    ours, eagers = (sum(o is s for s in seen) for o in pair.optimizers)
    assert ours == eagers >= 3


@BEFORE
@pytest.mark.parametrize("where", [torch.Tensor, torch.autograd], ids=["Tensor", "autograd"])
def test_a_backward_that_was_replaced_is_called(
    steps: int, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(layers(), torch.optim.Adam)
    pair.run(steps)
    plain, seen = where.backward, []

    def doubled(tensor: Any, gradient: Any = None, *rest: Any, **named: Any) -> None:
        seen.append(1)
        plain(tensor * 2.0, gradient, *rest, **named)

    monkeypatch.setattr(where, "backward", doubled)
    pair.goes_on_as_eager("RM706")
    assert len(seen) == 6
    monkeypatch.undo()
    compiled = pair.step.report()["compiled"]
    pair.both()
    assert pair.step.report()["compiled"] == compiled + 1


@BEFORE
@pytest.mark.parametrize("kind, name", [(torch.optim.Adam, "adam"), (torch.optim.SGD, "sgd")])
def test_a_formula_that_was_replaced_is_called(
    steps: int, kind: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(layers(), kind)
    pair.run(steps)
    module = sys.modules[f"torch.optim.{name}"]
    plain = getattr(module, name)

    def slower(*args: Any, **named: Any) -> Any:
        return plain(*args, **{**named, "lr": named["lr"] * 0.5})

    monkeypatch.setattr(module, name, slower)
    pair.goes_on_as_eager("RM701")


@BEFORE
@pytest.mark.parametrize("kind", ["object", "memory"])
def test_a_counter_that_two_parameters_share_counts_twice(steps: int, kind: str) -> None:
    pair = Pair(layers(), torch.optim.Adam)
    pair.run(steps)
    for o, m in zip(pair.optimizers, pair.models, strict=True):
        mine, other = o.state[m[0].weight], o.state[m[0].bias]  # type: ignore[index]
        if kind == "object":
            mine["step"] = other["step"]
        else:
            mine["step"].data = other["step"].data
    pair.goes_on_as_eager("RM701")
    assert float(mine["step"]) == steps + 6


class Doubling(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        return out * 2 if func is F.linear else out


@BEFORE
@pytest.mark.parametrize("trained", [True, False])
def test_a_weight_of_another_class_does_what_that_does(steps: int, trained: bool) -> None:
    model = layers()
    model[2].requires_grad_(trained)  # type: ignore[index]
    pair = Pair(model)
    pair.run(steps)
    for m in pair.models:
        m[2].weight.__class__ = Doubling  # type: ignore[index]
    pair.goes_on_as_eager("RM113")


@BEFORE
def test_a_batch_with_a_tangent_is_eagers(steps: int) -> None:
    pair = Pair(layers())
    pair.run(steps)
    with torch.autograd.forward_ad.dual_level():
        x, y = pair.batch()
        x = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        torch.testing.assert_close(pair.step(x, y), pair.eager(x, y), rtol=1e-5, atol=1e-6)
    assert "RM706" in pair.step.report()["reasons"]
    pair.both()
    pair.compare()


@BEFORE
def test_a_dict_of_backward_hooks_that_was_replaced_is_read(steps: int) -> None:
    pair = Pair(layers())
    pair.run(steps)
    seen: list[int] = []
    for m in pair.models:
        m[2]._backward_hooks = OrderedDict({1: lambda *_: seen.append(1)})  # type: ignore[index]
        m[2]._is_full_backward_hook = True  # type: ignore[index]
    pair.goes_on_as_eager("RM706")
    assert len(seen) == 6


@pytest.mark.parametrize("steps", [3, 9])
def test_a_tensor_of_the_loss_that_wants_a_gradient_gets_it(steps: int) -> None:
    model = layers()
    weights = torch.ones(3)
    step = rm.compile_step(
        model,
        lambda o, y: F.cross_entropy(o * weights, y),
        torch.optim.SGD(model.parameters(), lr=0.1),
        options={"fallback": "allow"},
    )
    x, y = torch.randn(5, 8), torch.arange(5) % 3
    for _ in range(steps):
        step(x, y)
    assert step.report()["compiled"] > 0
    weights.requires_grad_(True)
    step(x, y)
    assert weights.grad is not None and "RM703" in step.report()["reasons"]


def test_a_tensor_of_the_loss_that_is_negated_is_its_value() -> None:
    model = layers()
    weights = torch.ones(3)
    step = rm.compile_step(
        model,
        lambda o, y: F.cross_entropy(o * weights, y),
        torch.optim.SGD(model.parameters(), lr=0.0),
        options={"fallback": "allow"},
    )
    x, y = torch.randn(5, 8), torch.arange(5) % 3
    for _ in range(9):
        step(x, y)
    weights.data = torch._neg_view(weights.data)
    wanted = F.cross_entropy(-model(x), y)
    torch.testing.assert_close(step(x, y), wanted.detach(), rtol=1e-5, atol=1e-6)
