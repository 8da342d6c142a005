"""Running statistics that a forward in training mode moves: PyTorch counts no write to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rm_abstract as rm


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("grads", [True, False])
def test_a_forward_in_training_mode_between_calls_is_noticed(
    momentum: float | None, grads: bool
) -> None:
    torch.manual_seed(0)
    with rm.init("cpu"):
        norm = nn.BatchNorm1d(8, momentum=momentum)
        model = nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 5)).eval()
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
