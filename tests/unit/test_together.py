"""Requests of several threads in one batch: each gets what it would get alone, whatever happens."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rm_abstract.generation.together import Request, Together
from rm_abstract.kv.device_cache import DeviceCache, DeviceLayer

SHAPE = (1, 1, 1, torch.float32)


def following(attended: float, position: int) -> int:
    """The toy model: the next token depends on every attended token and on the position."""
    return int(attended + 3 * position) % 97


def alone(prompt: list[int], limit: int, eos: int) -> list[int]:
    held, made = list(prompt), []
    while len(made) < limit and (not made or made[-1] != eos):
        made.append(following(sum(held), len(held) - 1))
        held.append(made[-1])
    return made


class Step:
    """What GreedyStep is to a program: keys are the tokens themselves."""

    def __init__(self, inputs: dict[str, Any], before: Callable[[], None]) -> None:
        self.ids, self.positions = inputs["input_ids"].clone(), inputs["position_ids"].clone()
        self.cache, self.at, self.before = inputs["past_key_values"], 0, before
        self.at = self.cache.length
        self.mask = torch.zeros(len(self.ids), self.cache.capacity)
        self.mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]

    def length(self) -> int:
        return self.at

    def run(
        self,
        steps: int,
        capacity: int,
        eos: list[list[int]],
        pad: int,
        finished: list[bool],
        until_one_ends: bool,
        stop: Callable[[], bool],
    ) -> tuple[list[int], list[bool]]:
        made: list[int] = []
        for _ in range(min(steps, capacity - self.at)):
            self.before()
            keys = self.cache.layers[0].key_buffer
            keys[:, 0, self.at, 0] = self.ids[:, 0].float()
            self.mask[:, self.at] = 1
            sums = (keys[:, 0, :, 0] * self.mask).sum(1).tolist()
            places = self.positions[:, 0].tolist()
            tokens = [following(s, p) for s, p in zip(sums, places, strict=True)]
            made += tokens
            self.at += 1
            self.positions += 1
            self.ids = torch.tensor(tokens)[:, None]
            ended = any(t in e for t, e in zip(tokens, eos, strict=True))
            if ended or stop():
                break
        return made, finished


class Host:
    """Steps of the toy model; `before` is called in front of every one."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.before = before
        self.errors: list[Exception] = []
        self.widest = 0

    def step(self, inputs: dict[str, Any]) -> Any:
        self.widest = max(self.widest, len(inputs["input_ids"]))
        time.sleep(0.002)
        return Step(inputs, self.before)

    def call(self, inputs: dict[str, Any]) -> Any:
        raise AssertionError("there always is a step")

    def failed(self, error: Exception) -> None:
        self.errors.append(error)


def generation(
    together: Together,
    host: Any,
    prompt: list[int],
    pads: int,
    limit: int,
    eos: int,
    kind: int = 0,
) -> list[int]:
    """What a generating thread does, its own steps included."""
    made: list[int] = []
    held = prompt[:-1]
    cache = DeviceCache([DeviceLayer()], [SHAPE])
    keys = torch.tensor([0.0] * pads + [float(t) for t in held]).reshape(1, 1, -1, 1)
    cache.update(keys, keys, 0)
    with together.guest():
        while len(made) < limit and (not made or made[-1] != eos):
            every = prompt + made
            end = cache.length + 1
            mask = torch.ones(1, end, dtype=torch.long)
            mask[:, :pads] = 0
            inputs = {
                "input_ids": torch.tensor([every[-1:]]),
                "position_ids": torch.tensor([[len(every) - 1]]),
                "past_key_values": cache,
                "logits_to_keep": kind,
                **({"attention_mask": mask} if pads else {}),
            }
            assert Request.fits(inputs, cache)
            if together.crowded():
                got = together.decode(Request(inputs, cache, limit - len(made), [eos]), host)
                made += got
                if got:
                    continue
            last = torch.tensor([[[[float(every[-1])]]]])
            cache.update(last, last, 0)
            made.append(following(sum(every), len(every) - 1))
            time.sleep(0.001)
    return made


def cases(chance: random.Random, count: int) -> list[tuple[list[int], int, int, int]]:
    def one() -> tuple[list[int], int, int, int]:
        prompt = [chance.randrange(1, 97) for _ in range(chance.randrange(2, 90))]
        return prompt, chance.randrange(3), chance.randrange(1, 120), chance.randrange(97)

    return [one() for _ in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_every_thread_gets_the_tokens_it_would_get_alone(seed: int) -> None:
    asked = cases(random.Random(seed), 24)
    together, host = Together(), Host()
    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(lambda case: generation(together, host, *case), asked))
    for made, (prompt, _, limit, eos) in zip(got, asked, strict=True):
        assert made == alone(prompt, limit, eos)
    assert 2 <= host.widest <= 8 and not host.errors


def test_requests_of_another_kind_do_not_share_a_step() -> None:
    asked = [([5, 6, 7 + i], 0, 12, 98, i) for i in range(3)]
    together, host = Together(), Host()
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(lambda case: generation(together, host, *case), asked))
    assert got == [alone(prompt, limit, eos) for prompt, _, limit, eos, _ in asked]
    assert host.widest == 0


def test_after_an_error_everybody_goes_on_alone() -> None:
    calls = iter(range(10**6))

    def fails() -> None:
        if next(calls) == 20:
            raise RuntimeError("a step that fails")

    asked = [([5, 6, 7 + i], i % 2, 60, 98) for i in range(4)]
    together, host = Together(), Host(fails)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda case: generation(together, host, *case), asked))
    assert got == [alone(prompt, limit, eos) for prompt, _, limit, eos in asked]
    assert [str(e) for e in host.errors] == ["a step that fails"]
    assert not together.crowded()


def test_a_thread_that_is_interrupted_leaves_the_others_their_tokens() -> None:
    calls = iter(range(10**6))

    def interrupts() -> None:
        if next(calls) == 20:
            raise KeyboardInterrupt

    asked = [([5, 6, 7 + i], 0, 60, 98) for i in range(4)]
    together, host = Together(), Host(interrupts)
    start = threading.Barrier(4)

    def run(case: Any) -> list[int] | None:
        start.wait()
        try:
            return generation(together, host, *case)
        except KeyboardInterrupt:
            return None

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(run, asked))
    expected = [alone(prompt, limit, eos) for prompt, _, limit, eos in asked]
    assert got.count(None) == 1
    assert all(made in (None, right) for made, right in zip(got, expected, strict=True))
    assert not host.errors
