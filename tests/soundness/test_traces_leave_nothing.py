"""What traces a user's module leaves its tensors as they were: nothing remembers them."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import pytest
import torch
from soundness import Base, X, eager, quiet, routed
from torch import nn

from rm_abstract.guards import sources


class Scaled(Base):
    """Code of the user's: dynamo is asked, then torch.export captures."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 2.0))
        self.register_buffer("shift", torch.full((8,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x)) * self.scale + self.shift


@pytest.mark.parametrize("make", [Scaled, lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU())])
def test_weights_can_be_swapped_behind_a_capture(make: type[nn.Module]) -> None:
    """torch.utils.swap_tensors refuses tensors that anybody refers to weakly."""
    model, x = make().eval(), X.clone()
    for _ in range(3):
        quiet(lambda: model(x))
    assert routed(model) == 2
    tensors = [*model.parameters(), *model.buffers(), x]
    assert not any(weakref.getweakrefs(tensor) for tensor in tensors)
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.rand_like(parameter)))
    expected = eager(lambda: model(x))
    for _ in range(3):
        torch.testing.assert_close(quiet(lambda: model(x)), expected, rtol=1e-4, atol=1e-4)
    assert routed(model) > 2


def test_a_capture_sees_what_a_parameter_carries() -> None:
    class Carries(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.inner.weight.gain

    model = Carries().eval()
    model.inner.weight.gain = 2.0
    for gain in (2.0, 2.0, 2.0, 3.0, 3.0):
        model.inner.weight.gain = gain
        expected = eager(lambda: model(X))
        torch.testing.assert_close(quiet(lambda: model(X)), expected, rtol=1e-4, atol=1e-4)


class Proxy:
    """Counts who asks it anything, its class included (torch.distributed.reduce_op warns then)."""

    asked: ClassVar[list[str]] = []

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            Proxy.asked.append(name)
        return object.__getattribute__(self, name)


PROXY = Proxy()


class HoldsAProxy(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (2.0 if PROXY is not None else 1.0)


def test_the_search_asks_no_object_for_its_class() -> None:
    model = HoldsAProxy().eval()
    Proxy.asked.clear()  # pytest asked
    sources.of_module(model)
    assert not Proxy.asked
