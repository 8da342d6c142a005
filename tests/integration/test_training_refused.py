"""Where eager raises a compiled step does; what is freed, swapped or copied acts as in eager."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_pairs import Pair, layers
from torch import nn

import rm_abstract as rm

pytestmark = pytest.mark.usefixtures("closed_session")


BEFORE = pytest.mark.parametrize("steps", [2, 9])  # 9: the step runs without Python


def _both_raise(pair: Pair, kind: Any, batch: Any = None) -> None:
    x, y = batch or pair.batch()
    for step in (pair.step, pair.eager):
        with pytest.raises(kind):
            step(x, y)
    for o in pair.optimizers:
        o.zero_grad()
    pair.compare()


@BEFORE
@pytest.mark.parametrize("counts, betas", [(-1.0, (0.9, 0.999)), (5.0, (1, 0.9)), (-1.0, (0, 0))])
def test_a_bias_that_cannot_be_corrected_is_torchs_error(
    steps: int, counts: float, betas: tuple[float, float]
) -> None:
    pair = Pair(layers(), torch.optim.Adam)
    pair.run(steps)
    for o in pair.optimizers:
        o.param_groups[0]["betas"] = betas
        for state in o.state.values():
            state["step"].fill_(counts)
    x, y = pair.batch()
    for step in (pair.step, pair.eager):
        with pytest.raises(ZeroDivisionError):
            step(x, y)
    assert "RM701" in pair.step.report()["reasons"]


@BEFORE
@pytest.mark.parametrize(
    "kind, name",
    [(torch.optim.SGD, "maximize"), (torch.optim.SGD, "nesterov"), (torch.optim.Adam, "maximize")],
)
def test_a_group_without_a_setting_is_torchs_error(steps: int, kind: Any, name: str) -> None:
    pair = Pair(layers(), kind)
    pair.run(steps)
    for o in pair.optimizers:
        del o.param_groups[0][name]
    _both_raise(pair, KeyError)
    for o in pair.optimizers:
        o.param_groups[0][name] = False
    pair.both()
    pair.compare()


@BEFORE
def test_a_batch_of_inference_mode_is_torchs_error(steps: int) -> None:
    pair = Pair(layers())
    pair.run(steps)
    with torch.inference_mode():
        x, y = torch.randn(5, 8), torch.arange(5) % 3
    _both_raise(pair, RuntimeError, (x, y))
    pair.both()
    pair.compare()


@pytest.mark.parametrize("steps", [1, 2, 9])
@pytest.mark.parametrize("bytes_left", [0, 16])
def test_a_storage_that_was_freed_or_cut_is_torchs_error(steps: int, bytes_left: int) -> None:
    pair = Pair(layers(), torch.optim.Adam)
    pair.run(steps)
    weights = [m[0].weight for m in pair.models]  # type: ignore[index]
    kept = [w.detach().clone() for w in weights]
    for w in weights:
        w.untyped_storage().resize_(bytes_left)
    x, y = pair.batch()
    for step in (pair.step, pair.eager):
        with pytest.raises(RuntimeError, match="storage"):
            step(x, y)
    for w, before, o in zip(weights, kept, pair.optimizers, strict=True):
        w.untyped_storage().resize_(before.nbytes)
        w.detach().copy_(before)
        o.zero_grad()
    pair.compare()
    for _ in range(3):
        pair.both()
    pair.compare()


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_parameters_can_be_swapped(steps: int, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("RM_CACHE_DIR", str(tmp_path))  # so that a capture runs
    pair = Pair(layers())
    pair.run(steps)
    for m in pair.models:
        torch.utils.swap_tensors(m[0].weight, nn.Parameter(torch.ones(8, 8)))  # type: ignore[index]
    for _ in range(4):
        pair.both()
    pair.compare()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_an_error_that_says_what_to_do(copied: Callable[[Any], Any]) -> None:
    pair = Pair(layers())
    pair.run(3)
    with pytest.raises(rm.Error, match="copy or save model and optimizer"):
        copied(pair.step)
    loss = rm.compile_loss(pair.models[0], nn.functional.cross_entropy)
    with pytest.raises(rm.Error, match="compile_loss with the copies"):
        copied(loss)
    pair.both()
