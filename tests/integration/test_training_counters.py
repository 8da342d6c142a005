"""The optimiser's counters and rates beside compiled steps: torch's own, seen at every step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm
from rm_abstract.training.place import Slots

STRICT = {"fallback": "error"}


def _pair() -> list[tuple[nn.Module, torch.optim.Adam]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))
    models = (model, copy.deepcopy(model))
    return [(m, torch.optim.Adam(m.parameters(), lr=1e-2)) for m in models]


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 12), torch.randint(0, 3, (8,))


def _eager(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def _alike(pair: Any, step: Any, count: int = 3) -> None:
    """So many steps give eager's losses, parameters and counters."""
    (ours, mine), (theirs, other) = pair
    for _ in range(count):
        x, y = _batch()
        assert float(step(x, y)) == pytest.approx(float(_eager(theirs, other, x, y)), rel=1e-4)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)
        assert torch.equal(mine.state[p]["step"], other.state[q]["step"])


def test_rates_that_change_between_steps_are_seen() -> None:
    pair = _pair()
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)) for _, o in pair]
    step = rm.compile_step(pair[0][0], F.cross_entropy, pair[0][1], options=STRICT)
    for _ in range(8):
        _alike(pair, step, 1)
        for schedule in schedules:
            schedule.step()
    for _, optimizer in pair:
        optimizer.param_groups[0]["lr"] = 0.5
    _alike(pair, step)
    assert step.report()["compiled"] >= 8


@pytest.mark.parametrize("how", ["fill", "replace", "data", "whole", "integer"])
def test_counters_that_somebody_else_writes_are_read_and_counted_on(how: str) -> None:
    pair = _pair()
    step = rm.compile_step(pair[0][0], F.cross_entropy, pair[0][1], options=STRICT)
    _alike(pair, step, 4)
    compiled = step.report()["compiled"]
    for model, optimizer in pair:
        for p in model.parameters():
            state = optimizer.state[p]
            if how == "fill":
                state["step"].fill_(500.0)
            elif how == "replace":
                state["step"] = torch.tensor(500.0)
            elif how == "data":
                state["step"].data = torch.tensor(500.0)
            elif how == "whole":
                optimizer.state[p] = {**state, "step": torch.tensor(500.0, dtype=torch.float64)}
            else:
                state["step"] = torch.tensor(500)
    _alike(pair, step)
    assert step.report()["compiled"] == compiled + 3
    counters = [pair[0][1].state[p]["step"] for p in pair[0][0].parameters()]
    assert [float(s) for s in counters] == [503.0] * 4
    versions = [s._version for s in counters]
    _alike(pair, step, 1)
    assert all(s._version > v for s, v in zip(counters, versions, strict=True))


def test_a_state_that_is_loaded_in_mid_training_is_the_one_that_counts() -> None:
    pair = _pair()
    step = rm.compile_step(pair[0][0], F.cross_entropy, pair[0][1], options=STRICT)
    _alike(pair, step, 3)
    kept = copy.deepcopy([(m.state_dict(), o.state_dict()) for m, o in pair])
    old = [s["step"] for s in pair[0][1].state.values()]
    _alike(pair, step, 5)
    for (model, optimizer), (weights, state) in zip(pair, kept, strict=True):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    _alike(pair, step)
    assert {float(s["step"]) for s in pair[0][1].state.values()} == {6.0}
    assert {float(s) for s in old} == {8.0}  # nobody's any more


def test_counters_that_differ_within_a_group_are_eagers() -> None:
    pair = _pair()
    step = rm.compile_step(pair[0][0], F.cross_entropy, pair[0][1], options={"fallback": "allow"})
    _alike(pair, step)
    for model, optimizer in pair:
        optimizer.state[next(model.parameters())]["step"].fill_(70.0)
    _alike(pair, step)
    assert "different numbers of steps" in step.report()["reasons"]["RM701"]


class _Slots(Slots):
    """With events that are told when they are waited for."""

    def __init__(self, like: torch.Tensor, rows: int) -> None:
        super().__init__(like, torch.device("cpu"), rows)
        self.said: list[str] = []

    def _mark(self) -> Any:
        number = sum(text.startswith("mark") for text in self.said)
        self.said.append(f"mark {number}")
        said = self.said

        class Event:
            def synchronize(self) -> None:
                said.append(f"wait {number}")

        return Event()


def test_rows_are_written_again_only_behind_the_copies_from_them() -> None:
    slots = _Slots(torch.zeros(2), rows=4)
    where = []
    for i in range(10):
        there = slots.send(torch.tensor([float(i), -float(i)]))
        assert there is slots.there
        assert there.tolist() == [float(i), -float(i)]
        where.append([row.tolist()[0] for row in slots._rows].index(float(i)))
    assert where == [0, 1, 2, 3] * 2 + [0, 1]
    # Copies 0 and 1, then 2 and 3, have an event behind them; copy 4 waits for the first.
    assert slots.said == [
        "mark 0", "mark 1", "wait 0", "mark 2", "wait 1", "mark 3", "wait 2", "mark 4",
    ]  # fmt: skip
