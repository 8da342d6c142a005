"""Calls with gradients enabled: faults that random scripts found (decision 0261)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm

LEARNING_CALLS = 2  # the first learns what requires gradients, the second compiles and compares


@pytest.fixture(autouse=True)
def session():
    torch.manual_seed(0)
    rm.init("cpu", compile_options={"when_slower": "compiled"})
    yield
    rm.shutdown()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).eval()


def routed(model: nn.Module) -> int:
    return int(rm.explain(model).to_dict()["models"][0]["routed"])


@pytest.mark.parametrize("before", [0, 1, 2, 4])
def test_a_functional_call_without_gradients_takes_none_from_the_model(before: int) -> None:
    model, x = net(), torch.randn(3, 6)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        model(x)  # nothing is compiled, but the weights were looked at
    for _ in range(before):
        model(x)
    detached = {name: p.detach() * 1.1 for name, p in model.named_parameters()}
    for _ in range(LEARNING_CALLS):
        assert not torch.func.functional_call(model, detached, (x,)).requires_grad
    given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for _ in range(LEARNING_CALLS + 1):
        output = torch.func.functional_call(model, given, (x,))
        assert all(g is not None for g in torch.autograd.grad(output.sum(), [*given.values()]))
        assert model(x).requires_grad
    rows = x.clone().requires_grad_()  # with an input that wants one, nothing would raise
    model(rows).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("before", [0, 1, 2, 4])
def test_a_functional_call_with_gradients_gives_a_frozen_model_none(before: int) -> None:
    model, x = net().requires_grad_(False), torch.randn(3, 6)
    rows = x.clone().requires_grad_()
    for _ in range(before):
        model(rows)
    given = {name: p.clone().requires_grad_() for name, p in model.named_parameters()}
    for _ in range(LEARNING_CALLS):
        assert torch.func.functional_call(model, given, (x,)).requires_grad
    for _ in range(LEARNING_CALLS + 1):
        assert not model(x).requires_grad


def _ready(model: nn.Module, x: torch.Tensor) -> Any:
    """The output of a served call."""
    for _ in range(LEARNING_CALLS):
        model(x)
    was, output = routed(model), model(x)
    assert routed(model) == was + 1
    return output


def _halve(part: nn.Module) -> Any:
    return part.register_full_backward_hook(
        lambda m, i, o: tuple(None if g is None else g * 0.5 for g in i)
    )


@pytest.mark.parametrize(
    "hook",
    [
        _halve,
        lambda part: part.register_full_backward_pre_hook(lambda m, o: (o[0] * 0.5,)),
        lambda part: part.register_forward_hook(lambda m, a, o: o * 1.0 + 0.0),
        lambda part: part.register_forward_pre_hook(lambda m, a: (a[0] * 0.5,)),
    ],
    ids=["backward", "before backward", "forward", "before forward"],
)
@pytest.mark.parametrize("where", ["root", "part"])
def test_a_hook_that_came_behind_the_call_is_not_in_its_gradient(
    hook: Callable[[nn.Module], Any], where: str
) -> None:
    model, x = net(), torch.randn(3, 6)
    with rm.disabled():
        expected = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    output = _ready(model, x)
    handle = hook(model if where == "root" else model[0])
    found = torch.autograd.grad(output.sum(), [*model.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    seen = len(vars(model if where == "root" else model[0])[_dictionary(hook)])
    handle.remove()
    assert seen == 1 and not vars(model if where == "root" else model[0])[_dictionary(hook)]


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("where", ["root", "part"])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_backward_hook_of_the_call_is_in_its_gradient(
    where: str, removed: bool, calls: int
) -> None:
    model, x, found = net(), torch.randn(3, 6), []
    for served in (False, True):
        for _ in range(calls if served else 0):
            model(x)
        handle = _halve(model if where == "root" else model[0])
        rows = x.clone().requires_grad_()
        if served:
            output = model(rows)
        else:
            with rm.disabled():
                output = model(rows)
        if removed:
            handle.remove()
        found.append(torch.autograd.grad(output.sum(), [rows, *model.parameters()]))
        handle.remove()
        assert not (model if where == "root" else model[0])._backward_hooks
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
@pytest.mark.parametrize("grads", [True, False])
def test_forward_hooks_of_the_call_run_once_and_are_in_its_gradient(
    calls: int, grads: bool
) -> None:
    model, x, ran = net(), torch.randn(3, 6), []
    for _ in range(calls):
        with torch.set_grad_enabled(grads):
            model(x)

    def halve(part: nn.Module, given: Any) -> Any:
        ran.append(part)
        return (given[0] * 0.5,)

    model[0].register_forward_pre_hook(halve)
    for number in range(3):
        found = torch.autograd.grad(model(x).sum(), [*model.parameters()])
        assert len(ran) == 2 * number + 1
        with rm.disabled():
            expected = torch.autograd.grad(model(x).sum(), [*model.parameters()])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _dictionary(hook: Callable[[nn.Module], Any]) -> str:
    """Where the hook is kept."""
    part = nn.Identity()
    hook(part)
    return next(
        name for name, held in vars(part).items() if name.endswith("hooks") and len(held) == 1
    )


class First(nn.Module):
    """Gives a view of what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.unsqueeze(0))[0]


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("model", [First, net], ids=["a view", "no view"])
def test_an_output_may_be_changed_in_place(model: Callable[[], nn.Module], before: int) -> None:
    made, x = model().eval(), torch.randn(3, 6)
    with rm.disabled():
        output = made(x)
        output.mul_(2).add_(1)
        output[0] = 0.0
        expected = torch.autograd.grad(output.pow(2).sum(), [*made.parameters()])
    for _ in range(before):
        made(x)
    output = made(x)
    output.mul_(2).add_(1)
    output[0] = 0.0
    found = torch.autograd.grad(output.pow(2).sum(), [*made.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_detached_output_may_be_changed_in_place(before: int) -> None:
    model, x = First().eval(), torch.randn(3, 6)
    for _ in range(before):
        model(x)
    output = model(x)
    output.detach().zero_()
    output.sum().backward()
    assert model.inner.weight.grad is not None


class Turned(nn.Module):
    """Gives a view that is negated when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(x, self.inner(x)).conj().imag


@pytest.mark.parametrize("before", [0, 1, 2])
def test_an_output_that_is_negated_when_it_is_read_is_its_value(before: int) -> None:
    model, x = Turned().eval(), torch.randn(3, 6)
    with rm.disabled():
        expected = model(x)
    for _ in range(before):
        model(x)
    output = model(x)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    output.sum().backward()
    torch.testing.assert_close(model.inner.bias.grad, torch.full((6,), -3.0))


class Added(nn.Module):
    """Autograd needs nothing of the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.shift).tanh()


def test_an_input_of_inference_mode_is_taken_where_eager_takes_it() -> None:
    model = Added().eval()
    with torch.inference_mode():
        x = torch.randn(3, 6)
    for _ in range(LEARNING_CALLS + 2):
        model(x).sum().backward()
    with rm.disabled():
        (expected,) = torch.autograd.grad(model(x).sum() * 4, [model.shift])
    torch.testing.assert_close(model.shift.grad, expected)
