"""A request fails by its own fault only: what the model refuses of one row ends no other row of its
batch, whose tokens stay those of a lone run."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rm_abstract as rm
from rm_abstract.generation.jobs import End, Job, Sampling, Token
from rm_abstract.generation.scheduler import Limits, Scheduler
from rm_abstract.server.native import NativeText

VOCABULARY = 60
Found = tuple[list[int], str, str]  # tokens, and reason and message of the end


class Refusing(LlamaForCausalLM):
    """A Llama that refuses some tokens: in Python, or by a check of values inside of its graph."""

    def __init__(self, config: Any, refused: list[int], by_value: bool) -> None:
        super().__init__(config)
        self.by_value = by_value
        self.register_buffer("refused", torch.tensor(refused), persistent=False)

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        found = (input_ids[..., None] == self.refused).any()
        if self.by_value:
            torch._assert_async(~found, "a token that this model refuses")
        elif bool(found):
            raise ValueError("a token that this model refuses")
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


def refusing(refused: list[int], by_value: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,  # logits far enough from each other
    )
    return Refusing(config, refused, by_value).eval()


class Heard:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ends: list[End] = []
        self.over = threading.Event()

    def __call__(self, event: Token | End) -> None:
        if isinstance(event, Token):
            self.ids.append(event.id)
        else:
            self.ends.append(event)
            self.over.set()

    def found(self) -> Found:
        assert self.over.wait(60)
        (end,) = self.ends
        return self.ids, end.reason, end.message


Submit = Callable[[list[Job]], None]


def alone_and_together(submit: Submit, given: list[dict[str, Any]]) -> None:
    lone = []
    for one in given:
        heard = Heard()
        submit([Job(deliver=heard, **one)])
        lone.append(heard.found())
    together = [Heard() for _ in given]
    submit([Job(deliver=heard, **one) for heard, one in zip(together, given, strict=True)])
    assert [heard.found() for heard in together] == lone
    reasons = {reason for _, reason, _ in lone}
    assert reasons == {"error", "length"}, "some are refused, and some are not"


def drawn(draw: random.Random, number: int) -> dict[str, Any]:
    return {
        "prompt": [draw.randrange(1, VOCABULARY) for _ in range(draw.choice([1, 4, 20]))],
        "limit": draw.randrange(1, 30),
        "sampling": Sampling(temperature=1.5, seed=number),
    }


def jobs(draw: random.Random, refused: int) -> list[dict[str, Any]]:
    """Twelve drawn ones, one that never meets the token, and one that makes it at once."""
    never = Sampling(seed=1, logit_bias={refused: -100.0})
    soon = Sampling(seed=1, logit_bias={refused: 100.0})
    return [
        *(drawn(draw, number) for number in range(12)),
        {"prompt": [refused % 5 + 6, 5], "limit": 9, "sampling": never},
        {"prompt": [refused % 5 + 6, 5], "limit": 9, "sampling": soon},
    ]


@pytest.mark.parametrize("token", [0, 17])  # 0: of slots that nobody has, otherwise
def test_a_row_that_is_refused_ends_no_other(token: int, seed: int) -> None:
    scheduler = Scheduler.of(refusing([token]), Limits(rows=8, waiting=100))
    alone_and_together(lambda made: scheduler.submit(*made), jobs(random.Random(seed), token))
    scheduler.close()


@pytest.fixture
def session() -> Iterator[None]:
    rm.init("cpu")
    yield
    rm.shutdown()


def test_a_value_that_a_program_refuses_ends_no_other_row(session: None, seed: int) -> None:
    model = rm.accelerate(refusing([17], by_value=True))
    text = NativeText(model, Limits(rows=8, waiting=100), None)
    alone_and_together(text.submit, jobs(random.Random(seed), 17))
    text.close()


def test_a_step_that_fails_for_all_rows_ends_all_of_them_and_the_next_is_served() -> None:
    model = refusing([])
    scheduler, real, broken = Scheduler.of(model), model.forward, threading.Event()

    def forward(*args: Any, **kwargs: Any) -> Any:
        if broken.is_set() and kwargs["input_ids"].shape[1] == 1:
            raise RuntimeError("broken on purpose")
        return real(*args, **kwargs)

    model.forward = forward
    broken.set()
    heard = [Heard() for _ in range(3)]
    scheduler.submit(*(Job([5 + n, 9], 5, one) for n, one in enumerate(heard)))
    assert {one.found()[1:] for one in heard} == {("error", "RuntimeError: broken on purpose")}
    assert scheduler.counts.steps_apart >= 1
    broken.clear()
    again = Heard()
    scheduler.submit(Job([5, 9], 5, again))
    assert again.found()[1] == "length"
    scheduler.close()


def test_what_cannot_be_remembered_of_a_text_ends_no_request() -> None:
    scheduler = Scheduler.of(refusing([]))

    def full(*_: Any) -> None:
        raise MemoryError("full on purpose")

    heard, after = Heard(), Heard()
    scheduler.submit(Job([5, 6, 7], 4, heard))
    assert heard.found()[1] == "length"
    ending = Heard()
    job = Job([5, 6, 8], 10**6, ending)
    scheduler.submit(job)
    while not ending.ids:
        pass
    scheduler._prefixes.insert = full  # type: ignore[method-assign]
    scheduler.cancel(job)
    assert ending.found()[1] == "cancelled"
    del scheduler._prefixes.insert
    scheduler.submit(Job([5, 6, 9], 4, after))
    assert after.found()[1] == "length"
    scheduler.close()


def test_settings_that_no_sampler_takes_end_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from rm_abstract.generation import scheduler as module

    class Sampler(module.Sampler):
        def __init__(self, sampling: Sampling) -> None:
            if sampling.seed == 13:
                raise ValueError("an unlucky seed")
            super().__init__(sampling)

    monkeypatch.setattr(module, "Sampler", Sampler)
    scheduler, heard = Scheduler.of(refusing([])), [Heard() for _ in range(3)]
    scheduler.submit(*(Job([5], 4, h, Sampling(seed=12 + n)) for n, h in enumerate(heard)))
    assert [one.found()[1] for one in heard] == ["length", "error", "length"]
    scheduler.close()
