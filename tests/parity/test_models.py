"""Compiled models give what eager gives, for shapes seen and not seen while compiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, make

import rm_abstract as rm
from rm_abstract.verification import parity

SHAPES = [(2, 7), (3, 13), (5, 5), (2, 7)]


def same(model: Any, inputs: dict[str, Any]) -> parity.Verdict:
    with rm.disabled():
        expected = model(**inputs)
    precision = parity.working_precision(model.parameters())
    return parity.compare(expected, model(**inputs), precision)


def entries(model: Any) -> list[dict[str, Any]]:
    (found,) = [m for m in rm.explain(model).to_dict()["models"]]
    return list(found["entries"])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_output_equals_eager_for_every_shape(session: Any, name: str, seed: int) -> None:
    model = make(name, seed)
    rm.accelerate(model)
    for batch, length in SHAPES:
        verdict = same(model, ARCHITECTURES[name].inputs(batch, length))
        assert verdict.passed, (name, batch, length, verdict.detail)
        assert verdict.tensors > 0
    (entry,) = entries(model)
    assert entry["calls"] == len(SHAPES) - 1, "every call but the first is served by the plan"
    assert entry["parity"] == "passed"
    if ARCHITECTURES[name].fully_native:
        assert entry["native_nodes"] == entry["nodes"] > 0
        assert not entry["kept"]
    else:
        assert 0 < entry["native_nodes"] < entry["nodes"]
        assert all(op.startswith("aten.") for op in entry["kept"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_half_precision_models_keep_their_dtype(
    session: Any, name: str, dtype: torch.dtype, seed: int
) -> None:
    model = make(name, seed, dtype)
    rm.accelerate(model)
    for batch, length in SHAPES[:2]:
        inputs = ARCHITECTURES[name].inputs(batch, length)
        assert same(model, inputs).passed
        assert model(**inputs)[0].dtype is dtype
    assert sum(e["calls"] for e in entries(model)) > 0


def test_sizes_of_one_are_another_variant_of_the_same_call(session: Any, seed: int) -> None:
    model = make("bert", seed)
    rm.accelerate(model)
    for batch, length in [(2, 7), (1, 7), (1, 1), (1, 9), (2, 1)]:
        for _ in range(2):
            verdict = same(model, ARCHITECTURES["bert"].inputs(batch, length))
            assert verdict.passed, (batch, length, verdict.detail)
    assert len(entries(model)) == 4


def test_tuple_outputs_keep_their_type(session: Any, seed: int) -> None:
    model = make("bert", seed)
    rm.accelerate(model)
    inputs = ARCHITECTURES["bert"].inputs(2, 6)
    for _ in range(3):
        assert type(model(**inputs, return_dict=False)) is tuple
    assert same(model, {**inputs, "return_dict": False}).passed


def test_new_weights_serve_after_an_edit_in_place(session: Any, seed: int) -> None:
    model = make("bert", seed)
    rm.accelerate(model)
    inputs = ARCHITECTURES["bert"].inputs(2, 6)
    model(**inputs)
    before = model(**inputs)[0].clone()
    with torch.no_grad():
        model.encoder.layer[0].intermediate.dense.weight.mul_(-1)
    for _ in range(3):
        assert same(model, inputs).passed
    assert not torch.allclose(before, model(**inputs)[0], atol=1e-3)
    assert sum(e["calls"] for e in entries(model)) >= 2, "the same program serves again"


def test_an_index_outside_the_table_raises_what_eager_raises(session: Any, seed: int) -> None:
    model = make("bert", seed)
    rm.accelerate(model)
    inputs = ARCHITECTURES["bert"].inputs(2, 6)
    model(**inputs)
    bad = {**inputs, "input_ids": torch.full((2, 6), 100)}
    with pytest.raises(IndexError):
        model(**bad)
    assert same(model, inputs).passed
    calls = sum(e["calls"] for e in entries(model))
    model(**inputs)
    assert sum(e["calls"] for e in entries(model)) == calls + 1, "good calls are still served"
