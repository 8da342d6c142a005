"""Weights changed in every way torch has: the next call computes with them.

Compared with the same steps on a copy of the model that is never routed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm

SIZE = 128  # large enough for weights to be packed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(SIZE, SIZE)
        self.norm = nn.BatchNorm1d(SIZE)
        self.b = nn.Linear(SIZE, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.norm(self.a(x))))


@pytest.fixture(autouse=True)
def session() -> Iterator[Any]:
    torch.manual_seed(0)
    yield rm.init("cpu")
    rm.shutdown()


def stats(model: nn.Module) -> dict[str, Any]:
    (found,) = (a for a in rm.session.current().routers() if a.module_ref() is model)
    return dict(found.route.stats())


def step(model: Net, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    torch.manual_seed(1)
    model.train()
    model(torch.randn(4, SIZE)).square().sum().backward()
    optimizer.step()
    model.eval()


def moving_average(model: Net) -> None:
    torch.manual_seed(2)
    for mine, other in zip(model.parameters(), Net().parameters(), strict=True):
        mine.data.mul_(0.5).add_(other.data, alpha=0.5)


def assigned(model: Net) -> None:
    state = {k: v * 2 for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def in_place(model: Net) -> None:
    with torch.no_grad():
        model.a.weight.mul_(2)


def in_inference_mode(model: Net) -> None:
    with torch.inference_mode():
        model.a.weight.mul_(2)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "one row of .data": lambda m: m.a.weight.data[3].fill_(5.0),
    ".data scaled": lambda m: m.a.weight.data.mul_(2),
    ".data assigned": lambda m: setattr(m.a.weight, "data", m.a.weight.data * 2),
    "a buffer's .data": lambda m: m.norm.running_mean.data.fill_(1.0),
    "a moving average": moving_average,
    "apply": lambda m: m.apply(lambda p: hasattr(p, "weight") and p.weight.data.fill_(0.1)),
    "a step of AdamW": step,
    "a fused step of AdamW": lambda m: step(m, fused=True),
    "load_state_dict": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "load_state_dict(assign=True)": assigned,
    "in place": in_place,
    "in place in inference mode": in_inference_mode,
    "detach": lambda m: m.a.weight.detach().mul_(2),
    "another parameter": lambda m: setattr(m.a, "weight", nn.Parameter(m.a.weight.detach() * 2)),
    "another type and back": lambda m: m.double().float().a.weight.data.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_weights_are_computed_with(change: Callable[[Net], Any]) -> None:
    plain = Net().eval()
    model = copy.deepcopy(plain)
    rm.accelerate(model)
    x = torch.randn(3, SIZE)
    with torch.no_grad(), rm.disabled():
        before = plain(x)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    routed = stats(model)["routed"]
    assert routed == 3
    with rm.disabled():
        change(plain)
    change(model)
    with torch.no_grad():
        with rm.disabled():
            after = plain(x)
        assert not torch.allclose(before, after, rtol=1e-2, atol=1e-2)
        for _ in range(4):
            torch.testing.assert_close(model(x), after, rtol=1e-4, atol=1e-4)
    assert stats(model)["routed"] > routed, stats(model)


def test_a_held_alias_of_a_weight_keeps_the_model_eager_until_it_is_gone() -> None:
    model = rm.accelerate(Net().eval())
    x = torch.randn(3, SIZE)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        held = model.a.weight.data
        for factor in (1.0, 2.0, 3.0):
            held.mul_(factor)
            with rm.disabled():
                expected = model(x)
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
        routed = stats(model)["routed"]
        assert ".data is held" in stats(model)["declined"]["RM107"][1]
        row = held[2]  # a view keeps its base
        del held
        row.fill_(7.0)
        with rm.disabled():
            expected = model(x)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
        del row
        for _ in range(70):
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    assert stats(model)["routed"] > routed


def test_aliases_that_outlive_their_models_do_not_hold_up_later_models() -> None:
    """Later parameters get the addresses of those that died."""
    x, held = torch.randn(3, 8), []
    for _ in range(20):
        model = nn.Sequential(nn.Linear(8, 8)).eval()
        with torch.no_grad():
            for _ in range(3):
                model(x)
        assert stats(model)["routed"] == 2, stats(model)
        held.append(model[0].weight.data)
        del model


def test_an_evaluation_after_each_epoch_leaves_nothing_new_in_the_cache(own_cache: Path) -> None:
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, 8)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, files = torch.randn(3, SIZE), []
    for _ in range(5):
        with torch.no_grad():
            expected = model._call_impl(x)
            for _ in range(3):
                torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
        files.append(sorted(path for path in own_cache.rglob("*") if path.is_file()))
        model.train()
        model(x).square().sum().backward()
        optimizer.step()
        model.eval()
    assert stats(model)["routed"] == 10, stats(model)
    assert files[0] and all(a == b for a, b in itertools.pairwise(files))


def test_torch_data_attribute_works_as_before_and_is_put_back() -> None:
    replaced = vars(torch.nn.Parameter)["data"]
    tensor = torch.nn.Parameter(torch.ones(3))
    assert tensor.data.data_ptr() == tensor.data_ptr() and not tensor.data.requires_grad
    tensor.data = torch.zeros(2)
    assert tensor.shape == (2,) and torch.nn.Parameter.data is replaced
    rm.shutdown()
    assert "data" not in vars(torch.nn.Parameter)
    assert tensor.data.data_ptr() == tensor.data_ptr()
