"""A refused model is freed by `del`, as under plain PyTorch, without a garbage collection."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import rm_abstract as rm


class Branches(nn.Module):
    """Its path depends on its data: dynamo and torch.export both refuse it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x + 1 if float(x.sum()) > 0 else x)


class Raises(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the user's")


@pytest.fixture
def collector_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RM_CACHE_DIR", str(tmp_path))
    rm.init("cpu")
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        rm.shutdown()


@pytest.mark.parametrize("kind", [Branches, Raises])
def test_a_refused_model_is_freed_by_del(kind: type[Branches], collector_off: None) -> None:
    model = kind().eval()
    alive = [weakref.ref(module) for module in model.modules()]
    with torch.no_grad():
        for _ in range(2):
            try:
                model(torch.randn(2, 8))
            except ValueError:
                assert kind is Raises
    assert rm.explain(model).routed == 0
    del model
    assert [ref() for ref in alive if ref() is not None] == []
