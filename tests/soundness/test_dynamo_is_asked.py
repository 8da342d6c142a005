"""Dynamo's list of guards is compared with what the search for sources found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from soundness import Base, X, quiet, routed

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
