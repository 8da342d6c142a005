"""A compiled step and its twin in eager, for tests that edit both in the same way between steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import rm_abstract as rm


class Pair:
    """Two equal models of [*, 8] to [*, 3]: the first one's steps are compiled."""

    def __init__(self, model: nn.Module, kind: Any = torch.optim.SGD, **numbers: Any) -> None:
        self.models = model, copy.deepcopy(model)
        numbers = {"lr": 0.05, **numbers}
        self.optimizers = [kind(m.parameters(), **numbers) for m in self.models]
        self.step = rm.compile_step(
            self.models[0], F.cross_entropy, self.optimizers[0], options={"fallback": "allow"}
        )
        self.draw = torch.Generator().manual_seed(1)

    def eager(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizers[1].zero_grad()
        loss = F.cross_entropy(self.models[1](x), y)
        loss.backward()
        self.optimizers[1].step()
        self.optimizers[1].zero_grad()
        return loss.detach()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(5, 8, generator=self.draw)
        return x, torch.randint(0, 3, (5,), generator=self.draw)

    def both(self, *given: torch.Tensor) -> None:
        """A step of each, on this batch or on a new one."""
        x, y = given or self.batch()
        got, wanted = self.step(x, y), self.eager(x, y)
        torch.testing.assert_close(got.detach(), wanted, rtol=1e-5, atol=1e-6)

    def run(self, steps: int) -> None:
        """``steps`` of at least eight leave a step that runs without Python."""
        for _ in range(steps):
            self.both()
        assert (self.step._settled is not None) == (steps >= 8)

    def compare(self) -> None:
        mine, theirs = (m.state_dict() for m in self.models)
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)
        for ours, eagers in zip(*(self._states(i) for i in range(2)), strict=True):
            torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-6)

    def _states(self, i: int) -> list[Any]:
        return [self.optimizers[i].state[p] for p in self.models[i].parameters()]

    def goes_on_as_eager(self, code: str) -> None:
        """Three steps, of which the first is left to eager for this reason."""
        eager = self.step.report()["eager"]
        self.both()
        assert self.step.report()["eager"] == eager + 1
        assert code in self.step.report()["reasons"]
        for _ in range(2):
            self.both()
        self.compare()


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
