"""Dynamo's list of guards is compared with what the search for sources found."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from soundness import Base, X, quiet, routed
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    LlamaConfig,
    LlamaModel,
    PretrainedConfig,
)

from rm_abstract.guards import oracle, sources
from rm_abstract.guards.found import Sources

FACTOR = 2.0


class Reads(Base):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.table = {"gain": 2.0}
        self.shift = 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale * self.table["gain"] * FACTOR + self.shift


def without(found: Sources, name: str) -> Sources:
    return dataclasses.replace(found, names=found.names - {name})


def test_dynamo_names_nothing_that_the_search_did_not_find() -> None:
    model = Reads().eval()
    assert oracle.uncovered(model, (X,), {}, sources.of_module(model)) == ""


@pytest.mark.parametrize("name", ["scale", "table", "shift", "FACTOR"])
def test_a_name_that_the_search_missed_is_named(name: str) -> None:
    model = Reads().eval()
    found = without(sources.of_module(model), name)
    assert name in oracle.uncovered(model, (X,), {}, found)


class Configured(Base):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.config.factor


class OwnConfig(PretrainedConfig):
    attribute_map: ClassVar[dict[str, str]] = {"factor": "initial_factor"}


def test_what_a_class_of_an_installed_package_holds_is_its_code() -> None:
    """transformers' configurations look each name up in a table of their class: a user's module
    around a model of theirs was refused (RM210)."""
    model = Configured(BertConfig(factor=2.0)).eval()
    assert oracle.uncovered(model, (X,), {}, sources.of_module(model)) == ""


SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


class Around(torch.nn.Module):
    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = torch.nn.Linear(16, 3)
        self.temperature = 2.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(ids)[0][:, 0]) / self.temperature


@pytest.mark.parametrize(
    "encoder",
    [
        lambda: BertModel(BertConfig(**SMALL, intermediate_size=32)),
        lambda: LlamaModel(LlamaConfig(**SMALL, intermediate_size=32, pad_token_id=0)),
        lambda: DistilBertModel(DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2)),
    ],
)
def test_a_users_module_around_one_of_transformers_is_served(encoder: Any) -> None:
    """What transformers reads of its own was taken for holes in the search (RM210)."""
    model, ids = Around(encoder()).eval(), torch.tensor([[3, 4, 5]])
    found = sources.of_module(model)
    assert oracle.uncovered(model, (ids,), {}, found) == ""
    assert "temperature" in oracle.uncovered(model, (ids,), {}, without(found, "temperature"))


def test_what_a_class_of_the_user_holds_is_not() -> None:
    model = Configured(OwnConfig(initial_factor=2.0)).eval()
    found = without(sources.of_module(model), "attribute_map")
    assert "attribute_map" in oracle.uncovered(model, (X,), {}, found)


def test_a_forward_with_a_hole_in_its_sources_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complete = sources.of_module

    def with_a_hole(module: Any) -> Sources:
        return without(complete(module), "shift")

    monkeypatch.setattr(sources, "of_module", with_a_hole)
    model = Reads().eval()
    with pytest.warns(Warning, match=r"RM210.*shift.*dynamo"), torch.no_grad():
        model(X)
    for shift in (1.5, 2.5):
        model.shift = shift
        with torch.no_grad():
            expected = model.forward(X)
        torch.testing.assert_close(quiet(lambda: model(X)), expected)
    assert routed(model) == 0


def test_the_question_leaves_no_trace_in_the_users_code() -> None:
    model = Reads().eval()
    runs: list[int] = []

    def counting(module: Any, args: Any, output: Any) -> None:
        runs.append(1)

    handle = model.inner.register_forward_hook(counting)
    handle.remove()
    oracle.uncovered(model, (X,), {}, sources.of_module(model))
    assert not runs
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(Reads.forward.__code__)
    assert entries == []
