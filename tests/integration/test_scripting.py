"""torch.jit.script of modules that have a router."""

from __future__ import annotations

import torch
from torch import nn

import rm_abstract as rm


class Model(nn.Module):
    """Without annotations of its own: torch.jit.script reads those of nn.Module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1.0


def test_a_routed_module_can_be_scripted() -> None:
    rm.init("cpu")
    try:
        model, x = Model().eval(), torch.randn(5, 4)
        with torch.no_grad():
            for _ in range(4):
                model(x)
            assert rm.explain(model).routed
            scripted = torch.jit.script(model)
            with rm.disabled():
                torch.testing.assert_close(scripted(x), model(x))
    finally:
        rm.shutdown()
