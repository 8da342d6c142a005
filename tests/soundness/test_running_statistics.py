"""Running statistics that a forward in training mode moves: PyTorch counts no write to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm


class Plain(nn.Module):
    """Statistics that no counter stands beside."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, None, None, self.training, 0.5)


def uncounted() -> nn.Module:
    norm: Any = nn.BatchNorm1d(8)
    norm.num_batches_tracked = None
    return norm  # type: ignore[no-any-return]


NORMS: dict[str, Callable[[], nn.Module]] = {
    "counted": lambda: nn.BatchNorm1d(8),
    "averaged": lambda: nn.BatchNorm1d(8, momentum=None),
    "uncounted": uncounted,
    "of the user's": Plain,
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("grads", [True, False])
def test_a_forward_in_training_mode_between_calls_is_noticed(norm: str, grads: bool) -> None:
    torch.manual_seed(0)
    with rm.init("cpu"):
        model = nn.Sequential(nn.Linear(6, 8), NORMS[norm](), nn.Linear(8, 5)).eval()
        for _ in range(4):
            for rows in (8, 4, 2):
                x = torch.randn(rows, 6)
                with torch.no_grad():
                    found = model(x)
                    with rm.disabled():
                        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)
            model.train()
            with torch.set_grad_enabled(grads):
                model(torch.randn(8, 6))
            model.eval()
