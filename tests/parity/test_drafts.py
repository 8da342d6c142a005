"""Tokens drafted from the text and checked together are the tokens of plain steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from families import build

import rm_abstract as rm
from rm_abstract.generation.drafts import Drafts, can_widen, widened

PLAIN = {"max_new_tokens": 90, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """A toy Llama; greedy, its text soon repeats. Every draft is checked."""
    with torch.no_grad():
        rm.init(
            "cpu",
            fallback="error:capture,compile,correctness",
            compile_options={"prompt_lookup": "always"},
        )
        made = build("llama", 0)
        rm.accelerate(made)
        for _ in range(2):
            made.generate(**prompt(), **PLAIN)
        yield made
    rm.shutdown()


def prompt() -> dict[str, torch.Tensor]:
    ids = torch.randint(4, 99, (1, 11), generator=torch.Generator().manual_seed(5))
    ids = torch.cat([ids, ids], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def both(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> tuple[Any, Any]:
    with rm.disabled():
        expected = model.generate(**inputs, **{**PLAIN, **options})
    return expected, model.generate(**inputs, **{**PLAIN, **options})


def drafts(model: Any) -> dict[str, Any]:
    (found,) = rm.explain(model).to_dict()["models"]
    return dict(found["drafts"])


def test_drafts_hold_and_give_the_same_tokens_while_buffers_grow(model: Any) -> None:
    before = drafts(model)
    expected, got = both(model, prompt(), max_new_tokens=150)
    assert torch.equal(got, expected)
    after = drafts(model)
    accepted = after["accepted"] - before["accepted"]
    checks = after["checks"] - before["checks"]
    assert accepted > 30 and 0 < checks < 100
    assert "tokens drafted from the text held" in str(rm.explain(model))


def test_ends_and_limits_inside_a_draft_count(model: Any) -> None:
    inputs = prompt()
    free, _ = both(model, inputs)
    for at in (40, 61, 77):
        expected, got = both(model, inputs, eos_token_id=int(free[0, at]))
        assert torch.equal(got, expected), at
    for limit in (41, 42, 43, 44, 45):
        expected, got = both(model, inputs, max_new_tokens=limit, return_dict_in_generate=True)
        assert torch.equal(got.sequences, expected.sequences), limit
        cache, other = got.past_key_values, expected.past_key_values
        assert cache.get_seq_length() == other.get_seq_length() == 22 + limit - 1
        for mine, theirs in zip(cache, other, strict=True):
            torch.testing.assert_close(mine[0], theirs[0], rtol=1e-4, atol=1e-5)


class Counter(hf.generation.streamers.BaseStreamer):
    def __init__(self, limit: int) -> None:
        self.seen: list[int] = []
        self.limit = limit

    def put(self, value: torch.Tensor) -> None:
        self.seen += value.reshape(-1).tolist()
        if len(self.seen) > self.limit:
            raise RuntimeError("enough")

    def end(self) -> None:
        self.seen.append(-1)


class Asked(hf.StoppingCriteria):
    """Ends after `limit` tokens; notes every length it was asked at."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= self.limit])


def test_streamers_and_criteria_see_every_drafted_token_in_order(model: Any) -> None:
    inputs = prompt()
    free, _ = both(model, inputs)
    checks = drafts(model)["checks"]
    stream = Counter(10**6)
    model.generate(**inputs, **PLAIN, streamer=stream)
    assert stream.seen == [*free[0].tolist(), -1]
    for limit in (60, 61, 62, 63):
        asked = Asked(limit)
        got = model.generate(
            **inputs, **PLAIN, stopping_criteria=[asked], return_dict_in_generate=True
        )
        assert torch.equal(got.sequences, free[:, :limit])
        assert asked.lengths == [*range(23, limit + 1)]
        assert got.past_key_values.get_seq_length() == limit - 1
    with pytest.raises(RuntimeError, match="enough"):
        model.generate(**inputs, **PLAIN, streamer=Counter(70))
    assert drafts(model)["checks"] > checks + 20
    expected, got = both(model, inputs)
    assert torch.equal(got, expected)


def test_what_asks_for_more_than_tokens_goes_without_drafts(model: Any) -> None:
    inputs = prompt()
    checks = drafts(model)["checks"]
    for options in (
        {"do_sample": True},
        {"repetition_penalty": 1.2},
        {"return_dict_in_generate": True, "output_logits": True},
    ):
        both(model, inputs, **{**options, "max_new_tokens": 30})
    assert drafts(model)["checks"] == checks


def test_lower_precision_is_left_alone_unless_asked(model: Any) -> None:
    gate = rm.hooks.attaching.router_of(model).engine.gate
    step = type("Step", (), {})()
    step.tensors = []
    step.variant = type("Variant", (), {"quantised": (), "record": None})()
    fake = type("Gate", (), {"working_precision": lambda *_: torch.bfloat16})()
    assert Drafts("auto").margin(fake, step) is None
    assert Drafts("off").margin(gate, step) is None
    assert (Drafts("on").margin(fake, step) or 0) > 0.01
    step.variant.quantised = ("some",)
    exact = type("Gate", (), {"working_precision": lambda *_: torch.float32})()
    assert Drafts("auto").margin(exact, step) is None


def test_a_step_is_widened_by_positions_and_mask() -> None:
    step = {
        "input_ids": torch.tensor([[7]]),
        "position_ids": torch.tensor([[5]]),
        "attention_mask": torch.tensor([[0, 1, 1]]),
        "logits_to_keep": 1,
    }
    wide = widened(step, 3)
    assert wide["position_ids"].tolist() == [[5, 6, 7]] and "logits_to_keep" not in wide
    assert wide["attention_mask"].tolist() == [[0, 1, 1, 1, 1]] and wide["input_ids"].shape[1] == 3
    assert can_widen(step) and not can_widen({**step, "input_ids": torch.ones(2, 1)})
