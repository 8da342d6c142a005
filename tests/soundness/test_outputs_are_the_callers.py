"""What a caller writes into an output shows where it shows in eager, and nowhere else: in tensors
that forward keeps and gives back, not in later results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from soundness import Base, eager, quiet, routed
from torch import nn

KEPT = torch.full((8,), 3.0)


class Gives(Base):
    def __init__(self, output: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.kept, self.output = torch.full((8,), 3.0), output
        self.register_buffer("held", torch.arange(8.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x), self.output(self, x)


OUTPUTS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "attribute": lambda self, x: self.kept,
    "view_of_an_attribute": lambda self, x: self.kept[2:],
    "global": lambda self, x: KEPT,
    "buffer": lambda self, x: self.held,
    "argument": lambda self, x: x,
    "constant": lambda self, x: torch.ones(3),
    "numbers": lambda self, x: torch.tensor([1.0, 2.0]),
    "folded": lambda self, x: self.kept * 2,
    "made_of_a_buffer": lambda self, x: self.held.clone(),
}
KEEPS = {"attribute", "view_of_an_attribute", "global", "buffer"}


@pytest.mark.parametrize("name", OUTPUTS)
def test_writing_into_an_output(name: str) -> None:
    model = Gives(OUTPUTS[name]).eval()
    twin: nn.Module = copy.deepcopy(model)
    torch.manual_seed(1)
    for round in (0, 0, 0, 1, 0, 2):  # what is added: 0 leaves tensors alone, even their versions
        x = torch.randn(4, 8)
        given, other = x.clone(), x.clone()
        expected = eager(lambda other=other: twin(other))
        found = quiet(lambda given=given: model(given))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for side in (found, expected) if round else ():
            side[1].add_(round)
        torch.testing.assert_close(given, other)
        torch.testing.assert_close(model.kept, twin.kept)
        torch.testing.assert_close(model.held, twin.held)
        assert (found[1] is KEPT) == (name == "global")
    assert routed(model) == (0 if name in KEEPS else 5)
