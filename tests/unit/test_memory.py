"""rm_abstract.memory: what is held, what is given up, and that calls are right afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm


@pytest.fixture
def model() -> Any:
    with rm.init("cpu", fallback="error"):
        made = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.Softmax(-1))
        yield rm.accelerate(made.eval())


def served(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model(inputs)
        return model(inputs)


def test_stats_count_weights_once_and_scratch_is_given_up(model: Any) -> None:
    model.append(model[0])  # the same weights again
    model.append(nn.Linear(256, 64))
    inputs = torch.randn(32, 64)
    want = served(model, inputs)
    found = rm.memory.stats()
    (row,) = found["models"]
    assert row["model"] == "Sequential" and row["processes"] == {}
    assert row["weights"] == 4 * (64 * 256 + 256 + 2 * (256 * 64 + 64))
    assert row["scratch"] > 0 and found["process"] > 1 << 20
    assert 0 < found["devices"]["cpu"]["free"] < found["devices"]["cpu"]["total"]
    assert rm.memory.empty_cache() == row["scratch"]
    assert rm.memory.stats()["models"][0]["scratch"] == 0
    assert torch.equal(served(model, inputs), want)
    assert rm.memory.stats()["models"][0]["scratch"] > 0


def test_an_unloaded_model_is_served_again_from_the_cache(model: Any) -> None:
    inputs = torch.randn(3, 64)
    want = served(model, inputs)
    rm.memory.unload(model)
    assert rm.explain(model).models[0]["entries"] == []
    assert rm.memory.stats()["models"][0]["scratch"] == 0
    assert torch.equal(served(model, inputs), want)
    (entry,) = rm.explain(model).models[0]["entries"]
    assert entry["cache"] == "hit" and entry["calls"] >= 1


def test_without_a_session_or_a_caught_model_it_is_an_error(model: Any) -> None:
    with pytest.raises(rm.Error, match="was caught"):
        rm.memory.unload(nn.Linear(2, 2))
    rm.shutdown()
    for function in (rm.memory.stats, rm.memory.empty_cache, rm.memory.unload):
        with pytest.raises(rm.Error, match=r"rm_abstract\.init"):
            function()
