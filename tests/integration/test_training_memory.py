"""Steps under a memory budget: the numbers of the step without one, in less memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm

STRICT = {"fallback": "error"}
_WIDTH = 48


# So many that what is kept outweighs the workspaces of kernels on a machine of many threads.
_ROWS = 32


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(self.first(x)).split(_WIDTH, dim=2)
        q, k, v = (p.view(rows, length, 4, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, _WIDTH))
        return x + self.down(F.dropout(F.gelu(self.up(self.second(x))), 0.1, self.training))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [_Block() for _ in range(4)]
    return nn.Sequential(nn.Embedding(32, _WIDTH), *blocks, nn.Linear(_WIDTH, 32))


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _kept_by_eager(model: nn.Module, ids: torch.Tensor) -> int:
    """Bytes that eager saves for its backward, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = (t.untyped_storage().nbytes(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _loss(model(ids), ids)
    return sum(size for size, _ in kept.values())


def _train(model: nn.Module, budget: int | None) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(5)  # dropout follows it
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = rm.compile_step(model, _loss, optimizer, memory_budget=budget, options=STRICT)
    step._random.copy_(torch.tensor([7, 0]))
    g = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(6):
        ids = torch.randint(0, 32, (_ROWS, 33), generator=g)
        losses.append(float(step(ids[:, :-1], ids[:, 1:])))
    assert step.report()["compiled"] == 4
    return losses, step.memory_report()[0]


def test_half_of_what_eager_keeps_is_enough_and_changes_no_number() -> None:
    model = _model()
    half = _kept_by_eager(model, torch.zeros(_ROWS, 32, dtype=torch.long)) // 2
    whole_model, half_model = copy.deepcopy(model), copy.deepcopy(model)
    wanted, whole = _train(whole_model, None)
    losses, row = _train(half_model, half)
    assert losses == wanted
    for p, q in zip(half_model.parameters(), whole_model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert row["arena"] <= half < whole["arena"] and row["budget"] == half
    assert whole["budget"] is None and whole["recomputed"] == []
    assert {r["operator"] for r in row["recomputed"]} >= {"layer_norm"}
    for r in row["recomputed"]:
        assert r["values"] > 0 and r["bytes"] > 0 and r["operators"] > 0
    assert sum(r["share"] for r in row["recomputed"]) < 0.35


def test_a_budget_that_cannot_be_met_says_so() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = rm.compile_step(model, _loss, optimizer, memory_budget=1000)
    ids = torch.randint(0, 32, (8, 32))
    with pytest.warns(rm.RoutingWarning, match="RM711"):
        for _ in range(4):
            step(ids, ids)
    assert step.report()["compiled"] == 2
    row = step.memory_report()[0]
    assert row["arena"] > row["budget"] == 1000 and row["recomputed"]
    strict = rm.compile_step(model, _loss, optimizer, memory_budget=1000, options=STRICT)
    strict(ids, ids)  # the first one is watched
    with pytest.raises(rm.Error, match="RM711"):
        strict(ids, ids)
    with pytest.raises(ValueError, match="budget"):
        rm.compile_step(model, _loss, optimizer, memory_budget=-1)


def test_the_arena_is_near_what_is_alive_at_once() -> None:
    _, row = _train(_model(), None)
    assert 0 < row["lower_bound"] <= row["arena"] <= 1.01 * row["lower_bound"]
