"""The small framework and recorded steps under input that nobody meant: torch's answer or a typed
error, never other numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import rm_abstract as rm
from rm_abstract import functional as F
from rm_abstract import nn, optim


@pytest.fixture(params=["cpu", "torch"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    rm.use_backend(request.param)
    yield request.param
    rm.use_backend("cpu")


def _x() -> rm.Tensor:
    return rm.Tensor(torch.arange(6.0).reshape(2, 3))


OUTSIDE: dict[str, Callable[[rm.Tensor], Any]] = {
    "sum": lambda x: x.sum(5),
    "mean": lambda x: x.mean((0, 2)),
    "max": lambda x: x.max(-3),
    "argmax": lambda x: x.argmax(4),
    "permute": lambda x: x.permute(0, 3),
    "transpose": lambda x: x.transpose(0, 4),
    "softmax": lambda x: F.softmax(x, 7),
    "log_softmax": lambda x: F.log_softmax(x, -3),
    "concat": lambda x: F.concat([x, x], 9),
    "stack": lambda x: F.stack([x, x], 9),
    "softmax of a number": lambda x: F.softmax(x.sum(), 0),
    "index": lambda x: x[2],
    "two ellipses": lambda x: x[..., ...],
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_axis_that_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(IndexError):
        OUTSIDE[name](_x())


REFUSED: dict[str, Callable[[rm.Tensor], Any]] = {
    "axis twice": lambda x: x.sum((0, -2)),
    "shapes of a stack": lambda x: F.stack([x, x.T]),
    "empty stack": lambda x: F.stack([]),
    "empty concat": lambda x: F.concat([]),
    "-1 beside 0": lambda x: x[:0].reshape(-1, 0),
    "targets of another count": lambda x: F.cross_entropy(x, rm.Tensor([0])),
    "probabilities of another shape": lambda x: F.cross_entropy(x, rm.Tensor([0.5])),
    "negative padding": lambda x: F.conv2d(
        x.reshape(1, 1, 2, 3), rm.Tensor(torch.ones(1, 1, 1, 1)), padding=-1
    ),
    "pools of nothing": lambda x: F.max_pool2d(x.reshape(1, 1, 2, 3), 0),
    "parameter twice": lambda x: optim.SGD([x, x]),
    "negative rate": lambda x: optim.SGD([x], -1.0),
    "no rate": lambda x: optim.Adam([x], float("nan")),
    "betas": lambda x: optim.Adam([x], betas=(1.0, 0.9)),
    "the largest of none": lambda x: x[:0].max(0),
    "the smallest of none": lambda x: x[:, :0].min(),
    "the place of the largest of none": lambda x: x[:, :0].argmax(1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_an_error(name: str) -> None:
    with pytest.raises(ValueError):
        REFUSED[name](_x())


MISTAKEN: dict[str, Callable[[rm.Tensor], Any]] = {
    "a logical index": lambda x: x[True],
    "an array of NumPy": lambda x: np.ones((2, 3)) + x,
    "text": lambda x: x + "a",
    "torch's parameter": lambda x: optim.SGD([torch.ones(2)]),  # type: ignore[list-item]
    "length of a number": lambda x: len(x.sum()),
}


@pytest.mark.parametrize("name", MISTAKEN)
def test_what_is_of_another_kind_is_an_error(name: str) -> None:
    with pytest.raises(TypeError):
        MISTAKEN[name](_x())


def test_extremes_beside_an_empty_axis_are_empty() -> None:
    x = _x()[:0]
    assert x.max(1).shape == x.min(1).shape == x.argmax(1).shape == (0,)


@pytest.mark.parametrize("scale", [0.0, -0.0, -0.5, 2.0, None])
def test_attention_takes_the_scale_that_is_given(scale: float | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    got = F.scaled_dot_product_attention(*map(rm.Tensor, (q, k, v)), scale=scale)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
    torch.testing.assert_close(got.torch(), expected)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64])
def test_numbers_of_numpy_are_numbers(kind: Any) -> None:
    x = _x()
    for got in (kind(2) * x, x * kind(2)):
        assert isinstance(got, rm.Tensor) and torch.equal(got.torch(), x.torch() * 2)
    assert torch.equal(x[np.int64(1)].torch(), x.torch()[1])


def test_other_objects_are_not_equal() -> None:
    x = _x()
    assert not (x == None) and x != "a" and x in [None, x]  # noqa: E711


def test_expand_keeps_sizes() -> None:
    assert _x()[:, :1].expand(4, -1, 3).shape == (4, 2, 3)


def test_a_view_that_is_turned_when_it_is_read_is_its_value() -> None:
    ones = torch.ones(3)
    for turned in (torch._neg_view(ones), torch.complex(ones, ones).conj().imag):
        assert torch.equal((rm.Tensor(turned) * 2.0).torch(), -2 * ones)


def test_a_tensor_of_inference_mode_can_be_trained() -> None:
    with torch.inference_mode():
        p = nn.Parameter(torch.ones(3))
    (p * p).sum().backward()
    optim.SGD([p], 0.1).step()
    torch.testing.assert_close(p.torch(), torch.full((3,), 0.8))


def test_a_gradient_that_does_not_fit_leaves_all_parameters_as_they_were() -> None:
    p, q = nn.Parameter([1.0, 2.0]), nn.Parameter([1.0, 2.0])
    optimizer = optim.SGD([p, q], 0.1)
    (p * 2.0).sum().backward()
    q.grad = rm.Tensor(torch.ones(3))
    with pytest.raises(ValueError, match="gradient"):
        optimizer.step()
    assert torch.equal(p.torch(), torch.tensor([1.0, 2.0])) and optimizer.steps == 0


@pytest.mark.parametrize(
    ("kind", "how"),
    [("Adam", {}), ("AdamW", {}), ("SGD", {"momentum": 0.9, "dampening": 0.5})],
)
def test_a_parameter_that_is_trained_later_takes_its_first_step_then(kind: str, how: Any) -> None:
    ours = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    theirs = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    a = getattr(optim, kind)(ours, lr=0.1, **how)
    b = getattr(torch.optim, kind)(theirs, lr=0.1, **how)
    late = getattr(optim, kind)(ours, lr=0.1, **how)

    def loss(tensors: list[Any], both: bool) -> Any:
        first = (tensors[0] * tensors[0]).sum()
        return first + (tensors[1] * tensors[1]).sum() if both else first

    for i in range(6):
        for optimizer, tensors in ((a, ours), (b, theirs)):
            optimizer.zero_grad()
            loss(tensors, i > 2).backward()
            optimizer.step()
        if i == 4:
            late.load_state_dict(a.state_dict())
            a = late
    assert a.counts == [6, 3] and a.steps == 6
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.torch(), q.detach())


def test_a_recorded_step_whose_parameters_went_apart_is_an_error() -> None:
    p, q = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = optim.Adam([p, q], 0.1)

    def train(x: rm.Tensor) -> Any:
        optimizer.zero_grad()
        loss = (p * q * x).sum()
        loss.backward()
        optimizer.step()
        return loss

    recorded, x = rm.record(train), rm.Tensor(torch.ones(2))
    recorded(x)
    optimizer.zero_grad()
    (p * x).sum().backward()
    optimizer.step()
    before = p.torch().clone()
    with pytest.raises(rm.Error, match="took 1 and others 2"):
        recorded(x)
    assert torch.equal(p.torch(), before) and optimizer.counts == [2, 1]


# ---- recorded steps ------------------------------------------------------------------------------


def _training(p: rm.Tensor, view: Callable[[rm.Tensor], rm.Tensor]) -> Callable[[rm.Tensor], Any]:
    optimizer = optim.SGD([p], 0.1)

    def step(x: rm.Tensor) -> Any:
        seen = view(p)
        loss = (p * p * x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, seen

    return step


@pytest.mark.parametrize("kind", ["reshape", "slice", "transpose", "itself"])
def test_a_view_of_what_a_state_held_is_returned_as_it_was(kind: str) -> None:
    views: dict[str, Callable[[rm.Tensor], rm.Tensor]] = {
        "reshape": lambda p: p.reshape(2, 2),
        "slice": lambda p: p[1:3],
        "transpose": lambda p: p.reshape(2, 2).T,
        "itself": lambda p: p,
    }
    ours, theirs = (nn.Parameter(torch.arange(4.0)) for _ in range(2))
    recorded, eager = rm.record(_training(ours, views[kind])), _training(theirs, views[kind])
    for i in range(3):
        x = rm.Tensor(torch.tensor(1.0 + i))
        for a, b in zip(recorded(x), eager(x), strict=True):
            torch.testing.assert_close(a.torch(), b.torch())
        torch.testing.assert_close(ours.torch(), theirs.torch())


def test_an_empty_state_and_its_view_are_empty() -> None:
    step = rm.record(_training(nn.Parameter(torch.zeros(0)), lambda p: p.expand(0)))
    loss, seen = step(rm.Tensor(torch.ones(())))
    assert loss.item() == 0 and seen.shape == (0,)


def test_numbers_that_are_equal_and_not_the_same_have_steps_of_their_own() -> None:
    step = rm.record(lambda x, c: x / c)
    x = rm.Tensor(torch.ones(1))
    assert step(x, 0.0).item() == float("inf") and step(x, -0.0).item() == -float("inf")
    for _ in range(2):
        step(x, float("nan"))
    assert len(step.programs) == 3


def test_a_step_that_was_recorded_with_gradients_is_another_one_without() -> None:
    p = nn.Parameter(torch.ones(3))

    def step(x: rm.Tensor) -> Any:
        (p * x).sum().backward()
        return p.grad

    recorded = rm.record(step)
    assert torch.equal(recorded(rm.Tensor(torch.ones(3))).torch(), torch.ones(3))
    with rm.no_grad(), pytest.raises(ValueError, match="backward"):
        recorded(rm.Tensor(torch.ones(3)))


def test_gradients_of_arguments_exist_in_the_step() -> None:
    def step(x: rm.Tensor) -> Any:
        (x * x).sum().backward()
        return x.grad

    x = rm.Tensor(torch.ones(3), requires_grad=True)
    assert torch.equal(rm.record(step)(x).torch(), torch.full((3,), 2.0)) and x.grad is None


def test_an_array_that_was_replaced_is_read_and_updated() -> None:
    p = nn.Parameter(torch.ones(4))
    step = rm.record(_training(p, lambda p: p * 1.0))
    one = rm.Tensor(torch.ones(()))
    step(one)
    p.data = torch.full((4,), 5.0)
    loss, _ = step(one)
    assert loss.item() == 100 and torch.equal(p.torch(), torch.full((4,), 4.0))


@pytest.mark.parametrize("kind", ["argument", "outside", "states"])
def test_memory_that_is_updated_and_read_elsewhere_is_an_error(kind: str) -> None:
    base = torch.arange(8.0)
    p, q, w = nn.Parameter(base[:4]), nn.Parameter(base[3:7]), rm.Tensor(base[3:7])
    optimizer = optim.SGD([p, q] if kind == "states" else [p], 0.1)

    def step(x: rm.Tensor) -> Any:
        loss = (p * x * (q if kind == "states" else w if kind == "outside" else 1.0)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    x = rm.Tensor(base[3:7] if kind == "argument" else torch.ones(4))
    with pytest.raises(rm.Error, match=r"\[record\]"):
        rm.record(step)(x)
    assert torch.equal(base, torch.arange(8.0))


def test_a_parameter_whose_elements_share_memory_is_an_error_and_no_fault_of_a_kernel(
    backend: str,
) -> None:
    p = nn.Parameter(torch.zeros(1).expand(4))
    (p * rm.Tensor(torch.arange(4.0))).sum().backward()
    with pytest.raises(RuntimeError, match="memory" if backend == "cpu" else ""):
        optim.SGD([p], 0.1).step()
    held = nn.Parameter(torch.zeros(4))  # the kernels that it needs are there
    (held * 2.0).sum().backward()
    optim.SGD([held], 0.1).step()
    torch.testing.assert_close(held.torch(), torch.full((4,), -0.2))
