"""Dictionaries of functions and classes that a package's forward looks things up in, such as
transformers' ACT2FN: a replaced entry is noticed, in this process and by another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from soundness import quiet, routed, same_as_eager
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification
from transformers.activations import ACT2FN

import rm_abstract as rm
from rm_abstract.guards import registered, sources

IDS = torch.tensor([[3, 4, 5, 6]])


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    before = dict(dict.items(ACT2FN))
    torch.manual_seed(0)
    rm.init("cpu", fallback="allow")
    yield
    rm.shutdown()
    ACT2FN.clear()
    ACT2FN.update(before)


def pooled() -> Any:
    """Looks its pooler's activation up at every call."""
    config = DebertaV2Config(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        pooler_hidden_act="gelu",
        pooler_dropout=0.0,
    )
    torch.manual_seed(1)
    return DebertaV2ForSequenceClassification(config).eval()


def test_a_replaced_entry_is_noticed() -> None:
    model = pooled()
    for _ in range(3):
        same_as_eager(model, IDS)
    ACT2FN["gelu"] = torch.nn.Tanh
    for _ in range(3):
        same_as_eager(model, IDS)
    del ACT2FN["gelu"]
    with pytest.raises(KeyError):
        quiet(lambda: model(IDS))


def test_a_program_of_the_cache_is_for_the_entries_of_its_process() -> None:
    model = pooled()
    for _ in range(3):
        same_as_eager(model, IDS)
    rm.shutdown()
    ACT2FN["gelu"] = torch.nn.Tanh
    rm.init("cpu", fallback="allow")
    model = pooled()
    for _ in range(3):
        same_as_eager(model, IDS)
    before = routed(model)
    same_as_eager(model, IDS)
    assert routed(model) == before + 1


def test_what_a_package_remembers_is_no_table() -> None:
    assert registered.is_table_of_code(ACT2FN)
    for kept in ({}, {"a": 1}, {"a": torch.nn.Tanh, "b": torch.zeros(1)}, {"a": {}}, {"a": ()}):
        assert not registered.is_table_of_code(kept)
    watched = [space for space, names, _ in sources.of_module(pooled()).dicts if names is None]
    assert any(space is ACT2FN for space in watched)
