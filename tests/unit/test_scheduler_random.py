"""Random sequences of submit, cancel, priorities and deadlines against one scheduler.

Every job that was taken gets its tokens in order and one end, and nothing after it; the tokens are
those of a lone run in fp32, with prompts that begin alike and conversations that go on. RM_HEAVY=1
runs many sequences.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from rm_abstract.generation.jobs import Closed, End, Job, QueueFull, Sampling, Token
from rm_abstract.generation.scheduler import Limits, Scheduler

HEAVY = os.environ.get("RM_HEAVY") == "1"
EOS = frozenset([2, 9])
ROUNDING = 1e-4  # of logits in fp32, between products of other shapes


def made(kind: str) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 120,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.3,  # logits far enough from each other
    }
    if kind == "window":
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=24)).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


class Listener:
    """All that was delivered of one job."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.ids, self.over = given, [], threading.Event()
        self.ends: list[End] = []
        self.job = Job(deliver=self.hear, **given)

    ids: list[int]

    def hear(self, event: Token | End) -> None:
        if isinstance(event, End):
            self.ends.append(event)
            self.over.set()
        else:
            assert not self.ends, "a token after the end"
            self.ids.append(event.id)


def greedy_of(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> bool:
    """Each token has the largest logit after those before it, within rounding."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(-1, torch.tensor(ids)[:, None])[:, 0]
    return bool((logits.max(-1).values - chosen < ROUNDING).all())


def lone(model: Any, given: dict[str, Any]) -> list[int]:
    scheduler = Scheduler.of(model, Limits(rows=1, prefix_bytes=0))
    found = Listener({**given, "deadline": None})
    scheduler.submit(found.job)
    assert found.over.wait(60)
    scheduler.close()
    return found.ids


def check(model: Any, found: Listener) -> None:
    (end,) = found.ends
    ids, given = found.ids, found.given
    assert not set(ids[:-1]) & EOS and len(ids) <= given["limit"], "it went on after its end"
    if end.reason == "stop":
        assert ids[-1] in EOS
    elif end.reason == "length":
        assert len(ids) == given["limit"]
    else:
        assert end.reason in ("cancelled", "deadline", "error")
    if end.reason == "deadline":
        assert given["deadline"] is not None and time.monotonic() >= given["deadline"]
    assert end.cached_tokens <= len(given["prompt"])
    if not ids:
        return
    if given["sampling"].temperature == 0:
        assert greedy_of(model, given["prompt"], ids), (given, ids)
    else:
        assert ids == lone(model, given)[: len(ids)], given


def drawn(draw: random.Random, texts: list[list[int]]) -> dict[str, Any]:
    """Mostly a prompt that begins as another text did."""
    text = draw.choice(texts)
    prompt = text[: draw.randrange(len(text) + 1)][:300]
    prompt = prompt + [draw.randrange(10, 120) for _ in range(draw.choice([1, 3, 20, 90]))]
    if draw.random() < 0.2:
        prompt = text[:300] or prompt
    sampling = Sampling(temperature=0)
    if draw.random() < 0.25:
        sampling = Sampling(temperature=draw.choice([0.7, 1.0]), seed=draw.randrange(99), top_k=9)
    soon = time.monotonic() + draw.random() * 0.3
    return {
        "prompt": prompt,
        "limit": draw.choice([1, 2, 8, 30]),
        "sampling": sampling,
        "stop_tokens": EOS,
        "priority": draw.choice([0, 0, -1, 5]),
        "deadline": soon if draw.random() < 0.1 else None,
    }


def sequence(model: Any, draw: random.Random, fails: bool) -> None:
    limits = Limits(
        rows=draw.choice([1, 3, 8]),
        waiting=draw.choice([4, 30]),
        prompt_chunk=draw.choice([16, 64]),
        prefix_bytes=draw.choice([0, 60_000, 256 << 20]),
    )
    scheduler, taken, texts = Scheduler.of(model, limits), [], [[5]]
    real, broken = model.forward, threading.Event()

    def forward(*args: Any, **kwargs: Any) -> Any:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("broken on purpose")
        return real(*args, **kwargs)

    model.forward = forward
    try:
        for _ in range(60):
            act = draw.random()
            if act < 0.6:
                given = drawn(draw, texts)
                group = [Listener(given) for _ in range(draw.choice([1, 1, 1, 3]))]
                try:
                    scheduler.submit(*(one.job for one in group))
                except QueueFull:
                    assert not any(one.ids or one.ends for one in group)
                    time.sleep(0.05)
                else:
                    taken += group
            elif act < 0.8 and taken:
                scheduler.cancel(draw.choice(taken).job)
            elif act < 0.83 and fails:
                broken.set()
            else:
                time.sleep(draw.random() * 0.02)
            over = [one for one in taken if one.ends and one.ends[0].reason in ("stop", "length")]
            texts = [[5], *([*one.given["prompt"], *one.ids] for one in over[-8:])]
        if draw.random() < 0.3:
            scheduler.close()
        for one in taken:
            assert one.over.wait(60), "stuck"
        scheduler.close()
    finally:
        del model.forward
        scheduler.close()
    counts = scheduler.counts
    assert counts.generated_tokens == sum(len(one.ids) for one in taken)
    for one in taken:
        check(model, one)
        assert fails or one.ends[0].reason != "error", one.ends
    with pytest.raises(Closed):
        scheduler.submit(Listener(drawn(draw, [[5]])).job)


@pytest.mark.parametrize("kind", ["plain", "window"])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_lost_doubled_or_stuck(kind: str, fails: bool, seed: int) -> None:
    model = made(kind)
    for number in range(60 if HEAVY else 2):
        sequence(model, random.Random(f"{seed} {number}"), fails)


def test_submitters_cancellers_and_a_close_in_threads(seed: int) -> None:
    """Whatever was taken before the scheduler closed ends; what was not is refused."""
    model = made("plain")
    for number in range(30 if HEAVY else 3):
        scheduler, taken = Scheduler.of(model, Limits(rows=4, waiting=50)), []

        def work(
            number: int, scheduler: Scheduler = scheduler, taken: list[Listener] = taken
        ) -> None:
            draw = random.Random(f"{seed} {number}")
            while True:
                one = Listener(drawn(draw, [[5] * 40]))
                try:
                    scheduler.submit(one.job)
                except QueueFull:
                    continue
                except Closed:
                    assert not one.ids and not one.ends
                    return
                taken.append(one)
                if draw.random() < 0.5:
                    scheduler.cancel(one.job)

        threads = [threading.Thread(target=work, args=(10 * number + n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        scheduler.close()
        for thread in threads:
            thread.join()
        assert taken
        for one in taken:
            assert one.over.wait(60), "stuck"
            check(model, one)
