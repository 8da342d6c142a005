"""transformers' own generate loop, each forward routed: greedy tokens equal eager's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import make as make_model

import rm_abstract as rm


def make(name: str, seed: int) -> Any:
    """Random weights may choose the end token anywhere: these generations go to their length."""
    model = make_model(name, seed)
    model.generation_config.eos_token_id = None
    return model


def prompts(batch: int, length: int, left_padding: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 100, (batch, length))
    mask = torch.ones_like(ids)
    if left_padding:
        for row in range(batch):
            ids[row, :row] = 0
            mask[row, :row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model: Any, inputs: dict[str, torch.Tensor], new: int = 10) -> torch.Tensor:
    return model.generate(**inputs, max_new_tokens=new, do_sample=False, pad_token_id=0)


def calls(model: Any) -> int:
    (found,) = rm.explain(model).to_dict()["models"]
    return sum(entry["calls"] for entry in found["entries"])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_tokens_equal_eager(session: Any, name: str, batch: int, seed: int) -> None:
    model = make(name, seed)
    rm.accelerate(model)
    for length in (9, 13, 5):  # the position of a step must not be baked in
        inputs = prompts(batch, length, left_padding=batch > 1)
        with rm.disabled():
            expected = greedy(model, inputs)
        assert torch.equal(greedy(model, inputs), expected), (name, batch, length)
    assert calls(model) >= 3 * 10 - 4


def test_the_callers_cache_is_updated_and_returned(session: Any, seed: int) -> None:
    from transformers import DynamicCache

    model = make("llama", seed)
    rm.accelerate(model)
    ids = torch.randint(2, 100, (2, 12))
    caches = []
    for routed in (False, True, True):
        cache = DynamicCache(config=model.config)
        for start, stop in ((0, 6), (6, 9), (9, 12)):  # prefill, then three tokens at a time
            if routed:
                output = model(ids[:, start:stop], past_key_values=cache, use_cache=True)
            else:
                with rm.disabled():
                    output = model(ids[:, start:stop], past_key_values=cache, use_cache=True)
            assert output.past_key_values is cache
            assert cache.get_seq_length() == stop
        caches.append((output.logits, [(layer.keys, layer.values) for layer in cache.layers]))
    assert calls(model) >= 4
    for logits, layers in caches[1:]:
        torch.testing.assert_close(logits, caches[0][0], rtol=1e-4, atol=1e-5)
        for (k, v), (k0, v0) in zip(layers, caches[0][1], strict=True):
            torch.testing.assert_close(k, k0, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(v, v0, rtol=1e-4, atol=1e-5)


def test_a_cache_is_made_when_none_is_given(session: Any, seed: int) -> None:
    model = make("llama", seed)
    rm.accelerate(model)
    ids = torch.randint(2, 100, (2, 6))
    with rm.disabled():
        expected = model(ids, use_cache=True).past_key_values
    for _ in range(2):
        made = model(ids, use_cache=True).past_key_values
        assert type(made) is type(expected)
        assert made.get_seq_length() == 6
        torch.testing.assert_close(made.layers[1].values, expected.layers[1].values)
    assert calls(model) == 1


def test_a_rejected_call_leaves_the_cache_alone(session: Any, seed: int) -> None:
    from transformers import DynamicCache

    model = make("llama", seed)
    rm.accelerate(model)
    ids = torch.randint(2, 100, (2, 6))
    for _ in range(2):
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache, use_cache=True)
        with pytest.raises(IndexError):
            model(torch.full((2, 3), 100), past_key_values=cache, use_cache=True)
        assert cache.get_seq_length() == 6


def test_beam_search_works_on_routed_forwards(session: Any, seed: int) -> None:
    model = make("llama", seed)
    rm.accelerate(model)
    inputs = prompts(2, 6, left_padding=True)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    with rm.disabled():
        expected = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options), expected)


def test_the_trained_llama_writes_the_same_text(session: Any, tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = ["def read(path):\n", "import os\n\nclass Reader:\n", "for i in range(", "    return "]
    for batch in (texts[:1], texts):
        inputs = tokenizer(batch, return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
        with rm.disabled():
            expected = model.generate(**inputs, **options)
        assert torch.equal(model.generate(**inputs, **options), expected)
    assert calls(model) > 20
