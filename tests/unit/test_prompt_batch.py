"""Prompts computed in one call are what each would be alone (fp32), and one's fault is its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_scheduler import Heard, held
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from rm_abstract.generation.jobs import Job, Sampling
from rm_abstract.generation.model_calls import ModelCalls
from rm_abstract.generation.prompt_batch import computed_together
from rm_abstract.generation.scheduler import Limits, Scheduler

POSITIONS = 128
SIZES: dict[str, Any] = {
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.3,
}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":  # has no positions beyond its table
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
        return GPT2LMHeadModel(GPT2Config(vocab_size=150, **sizes)).eval()
    if kind == "window":
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=20)).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def computed(calls: ModelCalls, cache: Any, ids: list[int]) -> torch.Tensor:
    at, end = cache.length, cache.length + len(ids)
    mask = torch.ones(1, end, dtype=torch.long)
    return calls.logits(torch.tensor([ids]), torch.arange(at, end)[None], mask, cache)[0, -1]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "window"])
@pytest.mark.parametrize("before", [0, 1, 33, 96])
def test_rows_are_those_of_calls_alone(kind: str, before: int, seed: int) -> None:
    draw, calls = random.Random(seed), ModelCalls.of_model(made(kind))

    def drawn(count: int) -> list[int]:
        return [draw.randrange(150) for _ in range(count)]

    lengths = [32, 1, draw.randrange(2, 32), 31] if before else [64, 2, draw.randrange(2, 64), 32]
    begins, pieces = [drawn(before) for _ in lengths], [drawn(count) for count in lengths]
    with torch.no_grad():
        caches, lone = [], []
        for begin in begins:
            caches.append(calls.new_cache())
            lone.append(calls.new_cache())
            for cache in (caches[-1], lone[-1]):
                if begin:
                    computed(calls, cache, begin)
        found = computed_together(calls, pieces, caches)
        assert all(cache.length == before for cache in caches)
        wide = max(lengths)
        for piece, (logits, cache), alone in zip(pieces, found, lone, strict=True):
            want = computed(calls, alone, piece)
            assert (logits is not None) == (len(piece) == wide)
            if logits is not None:
                torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
            assert cache.length == before + len(piece)
            for mine, theirs in zip(cache.layers, alone.layers, strict=True):
                torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(mine.values, theirs.values, atol=1e-4, rtol=1e-4)
            # Its last token again, as a row's first step, and one more.
            cache.advance(cache.length - 1)
            again = computed(calls, cache, piece[-1:])
            torch.testing.assert_close(again, want, atol=1e-4, rtol=1e-4)


def counted(model: Any) -> list[tuple[int, ...]]:
    """The sizes of ids of all calls from here on. A scheduler reads the signature before."""
    calls, real = [], model.forward

    def forward(*args: Any, **given: Any) -> Any:
        calls.append(tuple(given["input_ids"].shape))
        return real(*args, **given)

    model.forward = forward
    return calls


@pytest.mark.parametrize("kind", ["llama", "gpt2", "window"])
def test_prompts_that_wait_are_computed_in_one_call(kind: str, seed: int) -> None:
    draw, model = random.Random(seed), made(kind)
    prompts = [[draw.randrange(150) for _ in range(n)] for n in (9, 32, 20, 25)]
    model.generation_config.eos_token_id = None
    want = [
        model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        for prompt in prompts
    ]
    scheduler, calls = Scheduler.of(model, Limits(rows=4)), counted(model)
    heard = [Heard() for _ in prompts]
    with held(scheduler):
        calls.clear()
        for prompt, one in zip(prompts, heard, strict=True):
            scheduler.submit(Job(prompt, 6, one, Sampling(temperature=0)))
    for prompt, one, whole in zip(prompts, heard, want, strict=True):
        assert one.ids() == whole[0, len(prompt) :].tolist()
        assert one.ends[0].cached_tokens == 0
    scheduler.close()
    assert calls[0] == (4, 32) and scheduler.counts.prompt_tokens == 1 + 9 + 32 + 20 + 25
    assert calls[1:] == [(4, 1)] * 6  # a shorter one's last token, and five more


def test_prompts_that_begin_alike_wait_for_each_others_keys() -> None:
    model = made("llama")
    scheduler, calls, heard = Scheduler.of(model), counted(model), [Heard() for _ in range(3)]
    prompts = [[*range(40), 50 + n, 60] for n in range(3)]
    with held(scheduler):
        calls.clear()
        for prompt, one in zip(prompts, heard, strict=True):
            scheduler.submit(Job(prompt, 1, one, Sampling(temperature=0)))
    assert all(len(one.ids()) == 1 for one in heard)
    scheduler.close()
    assert calls[:2] == [(1, 42), (2, 32)]  # the first, then the rests of two behind its beginning
    assert sorted(one.ends[0].cached_tokens for one in heard) == [0, 40, 40]


def test_who_cannot_be_computed_fails_alone() -> None:
    model = made("llama")
    real = model.forward

    def forward(*args: Any, **given: Any) -> Any:
        if bool((given["input_ids"] == 77).any()):
            raise RuntimeError("no seventy-seven")
        return real(*args, **given)

    scheduler, heard = Scheduler.of(model), [Heard() for _ in range(3)]
    model.forward = forward
    with held(scheduler):
        for number, one in enumerate(heard):
            prompt = [10 + number, 77 if number == 1 else 5, 8]
            scheduler.submit(Job(prompt, 3, one, Sampling(temperature=0)))
    assert [len(one.ids()) for one in heard] == [3, 0, 3]
    assert "seventy-seven" in heard[1].ends[0].message
    assert [one.ends[0].reason for one in heard] == ["length", "error", "length"]
    scheduler.close()


def test_samples_and_choices_are_those_of_lone_requests(seed: int) -> None:
    draw, model = random.Random(seed), made("llama")
    asked = [
        {
            "prompt": [draw.randrange(150) for _ in range(draw.randrange(1, 60))],
            "limit": draw.randrange(1, 9),
            "sampling": Sampling(temperature=0.8, seed=number, logprobs=2),
        }
        for number in range(6)
    ]
    asked += [{**asked[0], "sampling": Sampling(seed=99)}]  # another choice of one request

    def run(rows: int, jobs: list[dict[str, Any]]) -> list[list[int]]:
        scheduler, heard = Scheduler.of(model, Limits(rows=rows)), [Heard() for _ in jobs]
        with held(scheduler):
            for job, one in zip(jobs, heard, strict=True):
                scheduler.submit(Job(deliver=one, **job))
        ids = [one.ids() for one in heard]
        scheduler.close()
        return ids

    assert run(8, asked) == [run(1, [job])[0] for job in asked]
