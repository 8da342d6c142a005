"""explain() says what compiled steps and losses did."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm

X, Y = torch.arange(32.0).reshape(4, 8) / 32, torch.tensor([0, 1, 2, 0])


@pytest.fixture(autouse=True)
def session() -> Iterator[Any]:
    torch.manual_seed(0)
    yield rm.init("cpu", fallback="allow")
    rm.shutdown()
    gc.collect()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))


def test_a_step_is_listed_with_its_model() -> None:
    model, other = network(), network()
    step = rm.compile_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(4):
        step(X, Y)
    (row,) = rm.explain(model).training
    assert (row["compiled"], row["eager"]) == (step.report()["compiled"], step.report()["eager"])
    assert row["compiled"] >= 2
    text = str(rm.explain(model))
    assert f"compile_step of Sequential: {row['compiled']} steps ran compiled" in text
    assert "RM116" not in text and "no model was caught" not in str(rm.explain())
    assert rm.explain(model).to_dict()["training"] == [row]
    assert not rm.explain(other).training and "RM116" in str(rm.explain(other))


def test_why_a_loss_stays_eager_is_said() -> None:
    class Draws(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(x.sum())

    model = Draws(8, 3)
    loss = rm.compile_loss(model, F.cross_entropy)
    for _ in range(3):
        loss(X, Y).backward()
    (row,) = rm.explain(model).training
    assert row["compiled"] == 0 and row["eager"] == 3 and row["reasons"]
    (code,) = row["reasons"]
    text = str(rm.explain(model))
    assert "0 steps ran compiled, 3 in PyTorch" in text
    assert f"  {code} " in text and "remedy: " in text


def test_a_step_that_is_gone_is_not_listed() -> None:
    model = network()
    step = rm.compile_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    step(X, Y)
    del step
    gc.collect()
    assert not rm.explain(model).training


def test_eager_runs_of_a_step_are_no_calls_of_its_model() -> None:
    model = rm.accelerate(network().eval())
    with torch.no_grad():
        for _ in range(3):
            model(X)
    before = rm.explain(model).to_dict()["models"][0]
    step = rm.compile_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(3):
        step(X, Y)
    assert rm.explain(model).to_dict()["models"][0]["reasons"] == before["reasons"] == []
    with rm.disabled(), torch.no_grad():
        model(X)
    (reason,) = rm.explain(model).to_dict()["models"][0]["reasons"]
    assert (reason["code"], reason["calls"], reason["detail"]) == ("RM108", 1, "disabled()")
