"""Threads that call `generate` on one model share steps, and each gets transformers' tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import build
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import rm_abstract as rm
from rm_abstract.generation.sharing import Sharing
from rm_abstract.hooks.attaching import router_of

GREEDY = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
SAMPLED = {**GREEDY, "do_sample": True, "top_k": 20, "temperature": 0.8}


@pytest.fixture(scope="module")
def llama() -> Iterator[Any]:
    with torch.no_grad():
        rm.init("cpu", fallback="error:capture,compile,correctness")
        model = build("llama", 5)
        rm.accelerate(model)
        yield model
    rm.shutdown()


@pytest.fixture(autouse=True)
def own_cache(shared_cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_CACHE_DIR", str(shared_cache))


@pytest.fixture
def crowd(llama: Any) -> Iterator[Sharing]:
    """This test's own thread counts as one that generates: every other one shares."""
    sharing = router_of(llama).generation.sharing  # type: ignore[union-attr]
    assert sharing is not None
    with sharing.registered():
        yield sharing


class Kept(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        self.tokens.append(-1)


class Seventh(StoppingCriteria):
    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([ids.shape[1] >= 18])


def prompt(number: int, length: int = 11) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(number)
    ids = torch.randint(4, 99, (1, length), generator=draws)
    mask = torch.ones_like(ids)
    mask[:, : number % 3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def together(*tasks: Callable[[], Any]) -> list[Any]:
    out: list[Any] = [None] * len(tasks)

    def work(number: int) -> None:
        try:
            with torch.no_grad():
                out[number] = tasks[number]()
        except BaseException as error:
            out[number] = error

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def eager(model: Any, number: int, **options: Any) -> torch.Tensor:
    with rm.disabled():
        return model.generate(**prompt(number), **options)


def warm(model: Any) -> None:
    """Captures are made one by one: `first` calls belong to whoever comes first."""
    for number in range(2):
        model.generate(**prompt(number), **GREEDY)


def test_all_kinds_of_requests_share_steps(llama: Any, crowd: Sharing) -> None:
    """Greedy, streamed, penalised, stopped by the user's criterion; one draws, as with eager."""
    warm(llama)
    for _ in range(2):
        kept = Kept()
        options: list[dict[str, Any]] = [
            GREEDY,
            {**GREEDY, "repetition_penalty": 1.5},
            {**GREEDY, "stopping_criteria": [Seventh()]},
            GREEDY,
            SAMPLED,
        ]
        torch.manual_seed(4)
        want = [eager(llama, number, **one) for number, one in enumerate(options)]
        options[3] = {**GREEDY, "streamer": kept}
        before = crowd.tokens
        torch.manual_seed(4)
        got = together(
            *[
                lambda n=number, o=one: llama.generate(**prompt(n), **o)
                for number, one in enumerate(options)
            ]
        )
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), got
        assert kept.tokens == [*want[3][0].tolist(), -1]
        assert crowd.tokens - before > 60


def test_new_weights_reach_the_next_generations(llama: Any, crowd: Sharing) -> None:
    warm(llama)
    weight = llama.lm_head.weight
    kept = weight.detach().clone()
    before = crowd.tokens
    for factor in (1.0, -1.0, 0.5):
        with torch.no_grad():
            weight.copy_(kept.roll(1, 0) * factor)
        want = [eager(llama, number, **GREEDY) for number in range(3)]
        for _ in range(2):
            got = together(*[lambda n=n: llama.generate(**prompt(n), **GREEDY) for n in range(3)])
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert crowd.tokens - before > 60
    with torch.no_grad():
        weight.copy_(kept)


def test_an_error_in_one_threads_streamer_is_its_own(llama: Any, crowd: Sharing) -> None:
    class Breaks(Kept):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.tokens) > 20:
                raise KeyboardInterrupt

    warm(llama)
    want = [eager(llama, number, **GREEDY) for number in range(3)]
    got = together(
        lambda: llama.generate(**prompt(0), **GREEDY),
        lambda: llama.generate(**prompt(1), **GREEDY, streamer=Breaks()),
        lambda: llama.generate(**prompt(2), **GREEDY),
    )
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    assert isinstance(got[1], KeyboardInterrupt)
    assert torch.equal(llama.generate(**prompt(1), **GREEDY), want[1])


def test_a_session_that_ends_lets_threads_go_on_alone() -> None:
    with torch.no_grad(), rm.init("cpu", fallback="allow"):
        model = build("llama", 6)
        rm.accelerate(model)
        warm(model)
        sharing = router_of(model).generation.sharing  # type: ignore[union-attr]
        assert sharing is not None
        want = [eager(model, number, **GREEDY) for number in range(2)]

        class Ends(Kept):
            def put(self, value: torch.Tensor) -> None:
                super().put(value)
                if len(self.tokens) == 25:
                    rm.shutdown()

        with sharing.registered():
            got = together(
                lambda: model.generate(**prompt(0), **GREEDY),
                lambda: model.generate(**prompt(1), **GREEDY, streamer=Ends()),
            )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), got
