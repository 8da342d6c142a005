"""Requests in one batch get what they would get alone (fp32); each gets its end, come what may."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from rm_abstract.base.errors import Error
from rm_abstract.generation.jobs import Closed, End, Job, QueueFull, Sampling, Token
from rm_abstract.generation.scheduler import Limits, Scheduler

EOS = frozenset([2])
WITHOUT_END = 10**6  # tokens: such a job goes on until it is cancelled


class Heard:
    """What was delivered of one job."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.ends: list[End] = []
        self.over = threading.Event()
        self.first = threading.Event()

    def __call__(self, event: Token | End) -> None:
        assert not self.ends, "nothing follows an end"
        if isinstance(event, End):
            self.ends.append(event)
            self.over.set()
        else:
            self.tokens.append(event)
            self.first.set()

    def ids(self) -> list[int]:
        assert self.over.wait(60)
        return [token.id for token in self.tokens]


@contextmanager
def held(scheduler: Scheduler) -> Iterator[None]:
    """Jobs submitted inside wait until its end, however slow this thread is."""
    begun, go_on = threading.Event(), threading.Event()

    def hold(event: Token | End) -> None:
        begun.set()
        assert go_on.wait(60)

    scheduler.submit(Job([5], 1, hold, Sampling(temperature=0)))
    assert begun.wait(60)
    yield
    go_on.set()


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=200, n_embd=32, n_layer=2, n_head=4, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def drawn(number: int, draw: random.Random) -> dict[str, Any]:
    choices = [
        Sampling(temperature=0),
        Sampling(seed=number),
        Sampling(temperature=0.7, top_p=0.9, seed=number),
        Sampling(temperature=1.2, top_k=5, seed=number, logprobs=3),
        Sampling(temperature=0, presence_penalty=1, frequency_penalty=0.5),
    ]
    length = draw.choice([1, 2, 7, 33, 120])
    return {
        "prompt": [draw.randrange(3, 200) for _ in range(length)],
        "limit": draw.randrange(1, 60),
        "sampling": choices[number % len(choices)],
        "stop_tokens": EOS,
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("made", [llama, gpt2])
def test_tokens_do_not_depend_on_neighbours(made: Any, seed: int) -> None:
    draw = random.Random(seed)
    wanted = [drawn(number, draw) for number in range(40)]
    wanted += [{**wanted[0], "prompt": wanted[number]["prompt"] + [5]} for number in range(8)]
    scheduler = Scheduler.of(made(), Limits(rows=8, waiting=100, prompt_chunk=16))
    lone = []
    for one in wanted:
        heard = Heard()
        scheduler.submit(Job(deliver=heard, **one))
        lone.append(heard.ids())
    together = [Heard() for _ in wanted]
    for heard, one in zip(together, wanted, strict=True):  # they join and leave at any time
        scheduler.submit(Job(deliver=heard, **one))
        time.sleep(draw.random() * 0.005)
    assert [heard.ids() for heard in together] == lone
    before, together = scheduler.counts.steps, [Heard() for _ in wanted]
    with held(scheduler):
        for heard, one in zip(together, wanted, strict=True):
            scheduler.submit(Job(deliver=heard, **one))
    assert [heard.ids() for heard in together] == lone
    rows = sum(len(ids) - 1 for ids in lone)
    assert scheduler.counts.steps - before < rows * 0.7, "rows shared no steps"
    scheduler.close()


def with_rope(kind: str) -> Any:
    """A Llama whose frequencies change for the whole batch once one row passes position 40."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 8.0}
    if kind == "longrope":
        rope["original_max_position_embeddings"] = 40
        rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 9.0, 16.0]}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=40 if kind == "dynamic" else 320,
        rope_parameters=rope,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,  # logits far enough from each other
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_long_row_does_not_change_the_frequencies_of_others(kind: str, seed: int) -> None:
    draw, greedy = random.Random(seed), Sampling(temperature=0)
    model = with_rope(kind)
    assert model.model.rotary_emb.rope_type == kind
    lengths = [(5, 20), (7, 30), (70, 30), (12, 8), (9, 60), (30, 9), (3, 25)]  # prompt, to make
    begin = [draw.randrange(3, 200) for _ in range(70)]  # of all: prefixes are shared where right
    wanted = [(begin[:length], limit) for length, limit in lengths]
    want = []
    for prompt, limit in wanted:
        ids = torch.tensor([prompt])
        model.model.rotary_emb(torch.zeros(1), torch.zeros(1, 1, dtype=torch.long))  # as when new
        made = model.generate(ids, max_new_tokens=limit, do_sample=False)
        want.append(made[0, len(prompt) :].tolist())
    scheduler = Scheduler.of(model, Limits(rows=8, waiting=100, prompt_chunk=16))
    heard = [Heard() for _ in wanted]
    with held(scheduler):
        for one, (prompt, limit) in zip(heard, wanted, strict=True):
            scheduler.submit(Job(prompt, limit, one, greedy, EOS))
    assert [one.ids() for one in heard] == want
    scheduler.close()


def test_greedy_tokens_are_those_of_generate(model: Any, seed: int) -> None:
    draw = random.Random(seed)
    scheduler = Scheduler.of(model, Limits(rows=8, waiting=100, prompt_chunk=16))
    prompts = [[draw.randrange(3, 200) for _ in range(draw.randrange(1, 90))] for _ in range(12)]
    heard = [Heard() for _ in prompts]
    for prompt, one in zip(prompts, heard, strict=True):
        scheduler.submit(Job(prompt, 30, one, Sampling(temperature=0), EOS))
    for prompt, one in zip(prompts, heard, strict=True):
        ids = torch.tensor([prompt])
        made = model.generate(ids, max_new_tokens=30, do_sample=False)
        assert one.ids() == made[0, len(prompt) :].tolist()
    scheduler.close()


def test_prompts_that_begin_alike_are_computed_once(model: Any) -> None:
    scheduler = Scheduler.of(model)
    prompt = list(range(3, 103))
    found = []
    for last in (7, 8, 7):
        heard = Heard()
        scheduler.submit(Job([*prompt, last], 5, heard, Sampling(temperature=0)))
        found.append((heard.ids(), heard.ends[0].cached_tokens))
    assert [cached for _, cached in found] == [0, 100, 100]
    assert found[0][0] == found[2][0]
    assert scheduler.counts.prompt_tokens == 101 + 1 + 1
    scheduler.close()


def test_a_conversation_goes_on_from_its_answer(model: Any) -> None:
    scheduler = Scheduler.of(model)
    first, second = Heard(), Heard()
    prompt = list(range(3, 43))
    scheduler.submit(Job(prompt, 40, first, Sampling(temperature=0)))
    text = [*prompt, *first.ids()]
    scheduler.submit(Job([*text, 7, 8], 5, second, Sampling(temperature=0)))
    made = model.generate(torch.tensor([[*text, 7, 8]]), max_new_tokens=5, do_sample=False)
    assert second.ids() == made[0, -5:].tolist()
    assert second.ends[0].cached_tokens == len(text) - 1  # nothing was made after the last token
    scheduler.close()


def test_equal_prompts_are_computed_once(model: Any) -> None:
    scheduler = Scheduler.of(model, Limits(prompt_chunk=16))
    prompt, heard = list(range(3, 103)), [Heard() for _ in range(4)]
    with held(scheduler):
        jobs = [Job(prompt, 9, one, Sampling(seed=n)) for n, one in enumerate(heard)]
        scheduler.submit(*jobs)
    together = [one.ids() for one in heard]
    assert scheduler.counts.prompt_tokens == 1 + len(prompt)
    assert sorted(one.ends[0].cached_tokens for one in heard)[1:] == [100, 100, 100]
    for number, ids in enumerate(together):
        alone = Heard()
        scheduler.submit(Job(prompt, 9, alone, Sampling(seed=number)))
        assert alone.ids() == ids
    scheduler.close()


def test_prompts_under_way_share_what_they_begin_with() -> None:
    """A shorter one comes in the middle of a long one: each goes on from what the other has."""
    model, heard = llama(), [Heard(), Heard()]
    scheduler, real, calls = Scheduler.of(model), model.forward, []
    common = [3 + n % 190 for n in range(320)]
    prompts = [[*common, *[5] * 300], [*common, *[6] * 40]]
    jobs = [Job(p, 5, h, Sampling(temperature=0)) for p, h in zip(prompts, heard, strict=True)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["input_ids"].shape[1])
        if len(calls) == 5:
            scheduler.submit(jobs[1])
        return real(*args, **kwargs)

    model.forward = forward
    scheduler.submit(jobs[0])
    found = [one.ids() for one in heard]
    assert scheduler.counts.prompt_tokens == 320 + 300 + 40
    model.forward = real
    for prompt, ids in zip(prompts, found, strict=True):
        made = model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)
        assert ids == made[0, -5:].tolist()
    scheduler.close()


def test_the_memory_of_prompts_is_bounded(model: Any) -> None:
    scheduler = Scheduler.of(model, Limits(prefix_bytes=100_000))
    for number in range(20):
        heard = Heard()
        scheduler.submit(Job([3 + number] * 60, 1, heard, Sampling(temperature=0)))
        heard.ids()
    assert 0 < scheduler._prefixes.held_bytes <= 100_000
    scheduler.close()


def test_a_short_prompt_does_not_wait_for_a_long_one(model: Any) -> None:
    scheduler = Scheduler.of(model, Limits(prompt_chunk=16))
    order: list[str] = []

    def note(name: str) -> Any:
        return lambda event: order.append(name) if isinstance(event, Token) else done.release()

    done = threading.Semaphore(0)
    long = Job(list(range(3, 190)) * 5, 1, note("long"), Sampling(temperature=0))
    with held(scheduler):
        scheduler.submit(long)
        scheduler.submit(Job([5, 6, 7], 1, note("short"), Sampling(temperature=0)))
    assert done.acquire(timeout=60) and done.acquire(timeout=60)
    assert order == ["short", "long"]
    scheduler.close()


def test_a_short_prompt_goes_between_the_pieces_of_a_long_one() -> None:
    """It comes while the first piece is computed, and waits for that piece alone."""
    model, widths = llama(), []
    scheduler = Scheduler.of(model)
    real, short = model.forward, Heard()

    def forward(*args: Any, **kwargs: Any) -> Any:
        widths.append(kwargs["input_ids"].shape[1])
        if len(widths) == 1:
            scheduler.submit(Job([5, 6, 7], 1, short, Sampling(temperature=0)))
        return real(*args, **kwargs)

    model.forward = forward
    long = Heard()
    scheduler.submit(Job(list(range(3, 153)), 1, long, Sampling(temperature=0)))
    assert long.ids() and short.ids()
    assert widths == [32, 3, 32, 32, 54]
    scheduler.close()


def test_prompts_that_wait_together_begin_before_many_steps_are_made(model: Any) -> None:
    """A step costs as much for one row as for all: rows that begin together share theirs."""
    scheduler = Scheduler.of(model, Limits(rows=8))
    heard = [Heard() for _ in range(8)]
    with held(scheduler):
        for number, one in enumerate(heard):
            prompt = [3 + number, *range(10, 49)]
            scheduler.submit(Job(prompt, 10, one, Sampling(temperature=0)))
    for one in heard:
        assert len(one.ids()) == 10
    scheduler.close()
    # Nine steps make ten tokens; seven prompts of forty tokens go before the first, one behind it.
    assert scheduler.counts.steps == 10


def test_cancelled_late_and_closed_jobs_get_their_end(model: Any) -> None:
    scheduler = Scheduler.of(model, Limits(rows=2, waiting=4))
    heard = [Heard() for _ in range(4)]
    jobs = [Job([5], WITHOUT_END, one, Sampling(seed=1)) for one in heard]
    jobs[1].deadline = time.monotonic() + 0.2
    for job in jobs:
        scheduler.submit(job)
    assert heard[0].first.wait(60)
    scheduler.cancel(jobs[0])
    scheduler.cancel(jobs[3])  # one that waits
    assert heard[0].over.wait(60) and heard[1].over.wait(60) and heard[3].over.wait(60)
    scheduler.close()
    reasons = [one.ends[0].reason for one in heard]
    assert reasons == ["cancelled", "deadline", "cancelled", "cancelled"]
    with pytest.raises(Closed):
        scheduler.submit(Job([5], 1, Heard()))


def test_a_full_queue_refuses_all_jobs_of_a_request(model: Any) -> None:
    scheduler = Scheduler.of(model, Limits(rows=1, waiting=2))
    heard = Heard()
    first = Job([5], WITHOUT_END, heard, Sampling(seed=1))
    scheduler.submit(first)
    assert heard.first.wait(60)
    with pytest.raises(QueueFull):
        scheduler.submit(*[Job([5], 1, Heard()) for _ in range(3)])
    waiting = [Heard(), Heard()]
    scheduler.submit(*[Job([5], 1, one) for one in waiting])
    with pytest.raises(QueueFull):
        scheduler.submit(Job([5], 1, Heard()))
    scheduler.cancel(first)
    assert all(len(one.ids()) == 1 for one in waiting)
    scheduler.close()


def test_a_place_is_free_once_its_end_was_heard(model: Any) -> None:
    """Also when a prompt ended with its first token, and nothing comes after it."""
    scheduler = Scheduler.of(model, Limits(rows=2, waiting=0))
    for _ in range(20):
        heard = [Heard(), Heard()]
        scheduler.submit(*[Job([5, 6], 1, one, Sampling(temperature=0)) for one in heard])
        assert [len(one.ids()) for one in heard] == [1, 1]
    end = time.monotonic() + 60
    while scheduler.counts.running:
        assert time.monotonic() < end, "nothing is there, and it counts as running"
        time.sleep(0.01)
    scheduler.close()


def test_a_smaller_priority_goes_first(model: Any) -> None:
    scheduler = Scheduler.of(model, Limits(rows=1, waiting=8))
    first, order, done = Heard(), [], threading.Semaphore(0)

    def note(name: int) -> Any:
        return lambda event: (order.append(name), done.release()) if type(event) is End else None

    running = Job([5], WITHOUT_END, first, Sampling(seed=1))
    scheduler.submit(running)
    assert first.first.wait(60)
    for priority in (3, 1, 2):
        scheduler.submit(Job([5], 1, note(priority), priority=priority))
    scheduler.cancel(running)
    assert all(done.acquire(timeout=60) for _ in range(3))
    assert order == [1, 2, 3]
    scheduler.close()


def test_an_error_of_the_model_ends_its_rows_and_the_next_request_is_served() -> None:
    model = llama()
    scheduler = Scheduler.of(model)
    real, broken = model.forward, threading.Event()

    def forward(*args: Any, **kwargs: Any) -> Any:
        if broken.is_set():
            raise RuntimeError("broken on purpose")
        return real(*args, **kwargs)

    model.forward = forward
    heard = Heard()
    scheduler.submit(Job([5], WITHOUT_END, heard, Sampling(seed=1)))
    assert heard.first.wait(60)
    broken.set()
    heard.ids()
    assert heard.ends[0].reason == "error" and "broken on purpose" in heard.ends[0].message
    broken.clear()
    again = Heard()
    scheduler.submit(Job([5], 3, again, Sampling(temperature=0)))
    assert len(again.ids()) == 3
    scheduler.close()


def test_a_request_that_gets_no_buffers_has_its_end_and_the_next_is_served(model: Any) -> None:
    scheduler, heard = Scheduler.of(model), [Heard(), Heard()]
    calls = scheduler._calls
    real, broken = calls.new_cache, [MemoryError("broken on purpose")]

    def new_cache() -> Any:
        if broken:
            raise broken.pop()
        return real()

    calls.new_cache = new_cache  # type: ignore[method-assign]
    for one in heard:
        scheduler.submit(Job([5], 3, one, Sampling(temperature=0)))
        one.ids()
    assert [one.ends[0].reason for one in heard] == ["error", "length"]
    assert "broken on purpose" in heard[0].ends[0].message
    scheduler.close()


def test_a_model_whose_programs_were_refused_is_served_by_pytorch(model: Any) -> None:
    scheduler, heard = Scheduler.of(model), Heard()
    scheduler._calls.new_cache().refuse()  # as a router does whose capture gave up
    scheduler.submit(Job([5, 6], 9, heard, Sampling(temperature=0)))
    made = model.generate(torch.tensor([[5, 6]]), max_new_tokens=9, do_sample=False)
    assert heard.ids() == made[0, 2:].tolist()
    scheduler.close()


def test_logits_that_are_no_numbers_end_one_request() -> None:
    model = llama()
    scheduler = Scheduler.of(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[150] = torch.nan
    good, bad = Heard(), Heard()
    scheduler.submit(Job([5, 6], 50, good, Sampling(seed=1)))
    scheduler.submit(Job([5, 150], 50, bad, Sampling(seed=1)))
    assert good.over.wait(60) and bad.over.wait(60)
    assert bad.ends[0].reason == "error"
    scheduler.close()


def test_a_model_without_keys_and_values_is_refused() -> None:
    config = MambaConfig(vocab_size=50, hidden_size=16, state_size=4, num_hidden_layers=1)
    with pytest.raises(Error, match="keys and values"):
        Scheduler.of(MambaForCausalLM(config).eval())


def test_tokens_are_delivered_before_the_next_call_of_the_model() -> None:
    model, order = llama(), []
    forward = model.forward

    def called(*args: Any, **given: Any) -> Any:
        order.append(len(given["input_ids"]))
        return forward(*args, **given)

    scheduler = Scheduler.of(model, Limits(rows=3))
    model.forward = called
    heard = [Heard() for _ in range(3)]

    def tell(one: Heard) -> Any:
        return lambda event: (order.append(event), one(event))

    with held(scheduler):
        order.clear()
        for number, one in enumerate(heard):
            prompt = [7 + number] * 32  # a whole width: its call gives the first token
            scheduler.submit(Job(prompt, 4, tell(one), Sampling(temperature=0)))
    ids = [one.ids() for one in heard]
    scheduler.close()
    calls = [at for at, what in enumerate(order) if isinstance(what, int)]
    steps = [at for at in calls if order[at] == 4]  # three rows have four slots
    assert len(steps) == 3, order
    for begin, end in zip(steps, [*steps[1:], len(order)], strict=True):
        told = [event for event in order[begin + 1 : end] if isinstance(event, Token)]
        assert len(told) == 3, "a token waited for another call"
    assert all(len(tokens) == 4 for tokens in ids)
