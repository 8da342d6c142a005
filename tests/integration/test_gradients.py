"""Calls with gradients enabled on models in evaluation mode: served, with eager's gradients."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import rm_abstract as rm

LEARNING_CALLS = 2  # the first learns what requires gradients, the second compiles and compares


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        return {"scores": self.second(hidden), "best": x.argmax(-1), "hidden": hidden * 2}


@pytest.fixture(autouse=True)
def session():
    rm.init("cpu")
    yield
    rm.shutdown()


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 16)


def ready(module: nn.Module, *args: torch.Tensor) -> nn.Module:
    """The module, with calls like this one served from now on."""
    model = rm.accelerate(module.eval())
    for _ in range(LEARNING_CALLS):
        model(*args)
    return model


def routed(model: nn.Module) -> int:
    return vars(model)["_compiled_call_impl"].route.stats()["routed"]


def eager_gradients(model: nn.Module, x: torch.Tensor, loss) -> list[torch.Tensor]:
    with rm.disabled():
        towards = [t for t in (x, *model.parameters()) if t.requires_grad]
        return list(torch.autograd.grad(loss(model(x)), towards, allow_unused=True))


def assert_same(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_call_without_no_grad_is_served_and_its_outputs_require_what_eager_s_do(x):
    model = ready(Net(), x)
    before = routed(model)
    outputs = model(x)
    assert routed(model) == before + 1
    assert outputs["scores"].requires_grad and outputs["hidden"].requires_grad
    assert not outputs["best"].requires_grad
    with rm.disabled():
        expected = model(x)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_weights_and_inputs_equal_eager_s(x):
    x.requires_grad_()
    model = ready(Net(), x)
    before = routed(model)
    outputs = model(x)
    assert routed(model) == before + 1
    loss = outputs["scores"].pow(2).sum() + outputs["hidden"].sum()
    loss.backward()
    found = [x.grad, *(p.grad for p in model.parameters())]

    def same_loss(out):
        return out["scores"].pow(2).sum() + out["hidden"].sum()

    assert_same(found, eager_gradients(model, x, same_loss))


def test_an_output_that_is_not_used_gives_no_gradient(x):
    model = ready(Net(), x)
    found = torch.autograd.grad(model(x)["hidden"].sum(), model.parameters(), allow_unused=True)
    assert_same(found, eager_gradients(model, x, lambda out: out["hidden"].sum()))
    assert found[2] is None and found[3] is None


def test_frozen_weights_get_no_gradient_and_thawed_ones_do(x):
    module = Net()
    module.first.requires_grad_(False)
    model = ready(module, x)
    model(x)["scores"].sum().backward()
    assert model.first.weight.grad is None and model.second.weight.grad is not None
    model.first.requires_grad_(True)
    model(x)["scores"].sum().backward()
    assert model.first.weight.grad is not None


def test_a_second_backward_needs_retain_graph_as_in_eager(x):
    model = ready(Net(), x)
    loss = model(x)["scores"].sum()
    loss.backward(retain_graph=True)
    once = model.first.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.first.weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_gives_eager_s_second_derivatives(x):
    x.requires_grad_()
    model = ready(Net(), x)

    def penalty(scores):
        (slope,) = torch.autograd.grad(scores.pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.pow(2).sum(), [x, *model.parameters()], allow_unused=True)

    before = routed(model)
    found = penalty(model(x)["scores"])
    assert routed(model) == before + 1
    with rm.disabled():
        expected = penalty(model(x)["scores"])
    assert_same(found, expected)


def test_hooks_run_once_on_outputs_inputs_and_weights(x):
    x.requires_grad_()
    model = ready(Net(), x)
    seen: list[str] = []
    outputs = model(x)
    outputs["scores"].register_hook(lambda grad: seen.append("output"))
    x.register_hook(lambda grad: seen.append("input"))
    handle = model.first.weight.register_hook(lambda grad: grad * 2)
    outputs["scores"].retain_grad()
    outputs["scores"].sum().backward()
    doubled = model.first.weight.grad.clone()
    handle.remove()
    assert sorted(seen) == ["input", "output"]
    assert outputs["scores"].grad is not None
    (plain,) = eager_gradients(model, x.detach(), lambda out: out["scores"].sum())[:1]
    torch.testing.assert_close(doubled, 2 * plain, rtol=1e-4, atol=1e-5)


def test_a_gradient_flows_through_the_model_into_what_comes_before(x):
    before = nn.Linear(16, 16)
    model = ready(Net(), before(x))
    model(before(x))["scores"].sum().backward()
    found = before.weight.grad.clone()
    before.weight.grad = None
    with rm.disabled():
        model(before(x))["scores"].sum().backward()
    torch.testing.assert_close(found, before.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["weight", "input"])
def test_a_change_in_place_before_backward_raises_as_in_eager(x, change):
    x = x.requires_grad_().mul(1)
    model = ready(Net(), x)
    loss = model(x)["scores"].sum()
    with torch.no_grad():
        (model.second.weight if change == "weight" else x).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_training_mode_set_before_backward_does_not_change_the_gradients(x):
    class Dropping(Net):
        def forward(self, x):
            return {"scores": self.second(nn.functional.dropout(self.first(x), 0.5, self.training))}

    model = ready(Dropping(), x)
    loss = model(x)["scores"].sum()
    model.train()
    loss.backward()
    assert model.training and model.first.training
    found = model.first.weight.grad.clone()
    model.eval()
    expected = eager_gradients(model, x, lambda out: out["scores"].sum())
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)


def test_weights_replaced_before_backward_leave_the_old_ones_their_gradient(x):
    model = ready(Net(), x)
    old = model.first.weight
    loss = model(x)["scores"].sum()
    model.first.weight = nn.Parameter(torch.zeros_like(old))
    loss.backward()
    assert old.grad is not None and old.grad.abs().sum() > 0
    assert model.first.weight.grad is None


def test_a_model_that_computes_something_else_in_backward_is_an_error(x):
    class Scaled(Net):
        scale = 1.0

        def forward(self, x):
            return {"scores": self.second(self.first(x)) * self.scale}

    model = ready(Scaled(), x)
    loss = (outputs := model(x))["scores"].sum()
    model.scale = 5.0
    with pytest.raises(rm.Error, match="other values in backward") as error:
        loss.backward()
    assert error.value.code == "RM503" and outputs is not None


def test_calls_that_are_differentiated_stay_with_the_original_for_a_while(x):
    model = ready(Net(), x)
    model(x)["scores"].sum().backward()
    before = routed(model)
    for _ in range(3):
        model(x)["scores"].sum().backward()
    assert routed(model) == before
    declined = vars(model)["_compiled_call_impl"].route.stats()["declined"]
    assert "PyTorch's own forward is faster" in declined["RM117"][1]
    with torch.no_grad():  # calls without gradients are served as always
        model(x)
        before = routed(model)
        model(x)
    assert routed(model) == before + 1


def test_a_tensor_of_a_torch_func_transform_that_ended_is_left_to_pytorch(x):
    """Its gradients come from the original: what connects programs to autograd takes none."""
    model, kept = ready(Net(), x), []

    def loss(inner):
        kept.append(inner)
        return inner.sum()

    torch.func.grad(loss)(x)
    (ended,) = kept
    assert torch._C._functorch.is_functorch_wrapped_tensor(ended)
    before = routed(model)
    output = model(ended)["scores"].sum()
    assert routed(model) == before
    assert_same(
        torch.autograd.grad(output, [*model.parameters()]),
        eager_gradients(model, x, lambda out: out["scores"].sum()),
    )


def test_a_forward_with_an_effect_runs_once_a_call(x, capsys):
    class Loud(Net):
        def forward(self, x):
            print("called")
            return self.second(self.first(x))

    model = rm.accelerate(Loud().eval())
    for _ in range(4):
        model(x).sum().backward()
    assert capsys.readouterr().out.count("called") == 4


def test_a_forward_that_asks_for_the_gradient_mode_stays_with_the_original(x):
    class Asking(Net):
        def forward(self, x):
            return self.first(x) * (2.0 if torch.is_grad_enabled() else 1.0)

    model = rm.accelerate(Asking().eval())
    for _ in range(4):
        with rm.disabled():
            expected = model(x)
        torch.testing.assert_close(model(x), expected)


def test_no_activation_is_kept_between_forward_and_backward(x):
    model = ready(Net(), x)
    outputs = model(x)
    kept = [id(t) for t in outputs["scores"].grad_fn.saved_tensors]
    given = {id(x), *map(id, model.parameters())}
    assert len(kept) == len(given)  # the input and the weights, nothing else
    reference = weakref.ref(outputs["hidden"])
    scores = outputs["scores"]
    del outputs
    gc.collect()
    assert reference() is None and scores.requires_grad


def test_the_option_leaves_such_calls_to_the_original(x, monkeypatch):
    rm.shutdown()
    monkeypatch.setenv("RM_SERVE_GRADIENTS", "false")
    rm.init("cpu")
    model = rm.accelerate(Net().eval())
    for _ in range(4):
        assert model(x)["scores"].requires_grad
    assert routed(model) == 0


def along(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The derivative of the scores along ones, by forward-mode gradients."""
    with forward_ad.dual_level():
        scores = model(forward_ad.make_dual(x, torch.ones_like(x)))["scores"]
        tangent = forward_ad.unpack_dual(scores).tangent
    assert tangent is not None
    return tangent


@pytest.mark.parametrize("enabled", [True, False])
def test_forward_mode_gradients_are_eager_s(x, enabled):
    """From the second call on the tangent was lost without a word."""
    model = rm.accelerate(Net().eval())
    with torch.set_grad_enabled(enabled):
        for _ in range(3):
            with rm.disabled():
                expected = along(model, x)
            assert_same([along(model, x)], [expected])
        for _ in range(3):
            model(x)
        assert_same([along(model, x)], [expected])
    assert routed(model) >= 1


def test_an_executable_gives_no_tangent_and_says_so(x):
    executable = rm.compile(Net().eval(), (x,))
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(rm.CompileError, match="dual"):
        executable(forward_ad.make_dual(x, torch.ones_like(x)))


def test_hooks_of_saved_tensors_see_what_eager_saves(x):
    """A script that keeps activations in fewer bits, or counts them: it met none."""
    model = ready(Net(), x)

    def rounded() -> tuple[int, list[torch.Tensor]]:
        seen: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(tensor.numel())
            return tensor.bfloat16().float() if tensor.is_floating_point() else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            scores = model(x)["scores"]
        return len(seen), list(torch.autograd.grad(scores.square().sum(), model.parameters()))

    with rm.disabled():
        expected = rounded()
    for _ in range(3):
        found = rounded()
        assert found[0] == expected[0]
        assert_same(found[1], expected[1])
