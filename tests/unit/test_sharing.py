"""Steps shared by threads: each gets the tokens it would get alone, whatever happens to others."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rm_abstract.base.errors import ExecutionError
from rm_abstract.generation.model_calls import ModelCalls
from rm_abstract.generation.sharing import Sharing
from rm_abstract.generation.thread_sequence import ThreadSequence
from rm_abstract.kv.names import cache_name

PATIENCE = 120.0


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


class Host:
    """Implements sharing.Host; `before` is called in front of every step."""

    def __init__(self, model: Any, before: Callable[[], None] = lambda: None) -> None:
        self.errors: list[Exception] = []
        self.widest = 0

        def called(**inputs: Any) -> Any:
            self.widest = max(self.widest, len(inputs["input_ids"]))
            before()
            return model(**inputs)

        self.model = called

    def program(self, inputs: dict[str, Any]) -> Any:
        return None

    def waits(self) -> int:
        return 0

    def failed(self, error: Exception) -> None:
        self.errors.append(error)


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sharing]:
    """In a crowd: this test's own thread counts as one that generates."""
    monkeypatch.setattr("rm_abstract.generation.sharing._MISSES", 10**9)
    sharing = Sharing()
    with sharing.registered():
        yield sharing
    sharing.close()


class Text:
    """One row as a thread of `generate` has it: prompt computed, then shared, then alone."""

    def __init__(self, model: Any, prompt: list[int], pads: int = 0, kind: int = 1) -> None:
        self.model, self.ids = model, [0] * pads + prompt
        self.pads, self.kind = pads, kind
        self.calls = ModelCalls.of_model(model)
        self.cache = self.calls.new_cache()
        self._call(self.ids[:-1])

    def _call(self, tokens: list[int]) -> torch.Tensor:
        at = self.cache.length
        places = torch.arange(at, at + len(tokens))[None] - self.pads
        with torch.no_grad():
            logits = self.calls.logits(
                torch.tensor([tokens]), places.clamp(min=0), self._mask(len(tokens)), self.cache
            )
        return logits[0, -1]

    def _mask(self, more: int) -> torch.Tensor:
        mask = torch.ones(1, self.cache.length + more, dtype=torch.long)
        mask[:, : self.pads] = 0
        return mask

    def sequence(self, limit: int, eos: list[int], chooses: bool) -> ThreadSequence:
        inputs = {
            "input_ids": torch.tensor([self.ids[-1:]]),
            "position_ids": torch.tensor([[len(self.ids) - 1 - self.pads]]),
            "attention_mask": self._mask(1),
            cache_name(): self.cache,
            "logits_to_keep": self.kind,
        }
        assert ThreadSequence.fits(inputs, self.cache)
        return ThreadSequence(inputs, limit, eos, chooses)

    def alone(self, limit: int, eos: list[int]) -> None:
        while limit and self.ids[-1] not in eos:
            self.ids.append(int(self._call(self.ids[-1:]).argmax()))
            limit -= 1

    def with_others(
        self,
        sharing: Sharing,
        host: Any,
        limit: int,
        eos: list[int],
        heard: Callable[[int], None] | None = None,
    ) -> int:
        """Steps that were shared; what is missing after them is made alone."""
        before = len(self.ids)

        def choose(logits: torch.Tensor) -> int | None:
            self.ids.append(int(logits.argmax()))
            if heard is not None:
                heard(len(self.ids) - before)
            over = self.ids[-1] in eos or len(self.ids) - before >= limit
            return None if over else self.ids[-1]

        with sharing.registered():
            sequence = self.sequence(limit, eos, heard is not None)
            sharing.decode(sequence, host, choose)
        self.ids += sequence.tokens
        steps = len(self.ids) - before
        assert steps == sequence.steps
        self.alone(limit - steps, eos)
        return steps


def wanted(model: Any, prompt: list[int], pads: int, limit: int, eos: list[int]) -> list[int]:
    text = Text(model, prompt, pads)
    text.alone(limit, eos)
    return text.ids


def run(*tasks: Callable[[], Any]) -> list[Any]:
    """What each returned or raised, each in a thread of its own."""
    out: list[Any] = [None] * len(tasks)

    def work(number: int) -> None:
        try:
            out[number] = tasks[number]()
        except BaseException as error:
            out[number] = error

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def drawn(draw: random.Random) -> tuple[list[int], int, int, list[int]]:
    prompt = [draw.randrange(3, 200) for _ in range(draw.randrange(2, 90))]
    pads, limit, eos = draw.randrange(3), draw.randrange(1, 90), draw.randrange(200)
    # A text that ends with its prompt is made alone only: a step is shared by those that go on.
    return prompt, pads, limit, [eos if eos != prompt[-1] else (eos + 1) % 200]


def test_every_thread_gets_the_tokens_it_would_get_alone(
    model: Any, sharing: Sharing, seed: int
) -> None:
    draw = random.Random(seed)
    asked = [drawn(draw) for _ in range(24)]
    host = Host(model)
    texts = [Text(model, prompt, pads) for prompt, pads, _, _ in asked]
    gate = threading.Barrier(len(asked))

    def task(number: int) -> Callable[[], int]:
        _, _, limit, eos = asked[number]
        heard = None if number % 3 else (lambda count: None)
        return lambda: (gate.wait(), texts[number].with_others(sharing, host, limit, eos, heard))[1]

    steps = run(*map(task, range(len(asked))))
    for text, one in zip(texts, asked, strict=True):
        assert text.ids == wanted(model, *one)
    assert sum(steps) > 0 and host.widest > 1 and not host.errors


def test_who_is_slow_misses_steps_and_goes_on_right(model: Any, sharing: Sharing) -> None:
    """One row chooses its token only after others made three steps more."""
    host, over = Host(model), threading.Event()
    slow, fast = Text(model, [5, 6, 7]), Text(model, [9, 8, 7, 6, 5, 4, 3])
    steps = threading.Semaphore(0)

    def waits(count: int) -> None:
        if count <= 12:
            for _ in range(3):
                assert steps.acquire(timeout=PATIENCE)
        else:
            over.set()

    def counts(count: int) -> None:
        steps.release()
        if over.is_set():
            raise StopIteration

    made, ended = run(
        lambda: slow.with_others(sharing, host, 20, [], waits),
        lambda: fast.with_others(sharing, host, 3000, [], counts),
    )
    assert made == 20 and isinstance(ended, StopIteration)
    assert slow.ids == wanted(model, [5, 6, 7], 0, 20, [])
    count = len(fast.ids) - 7
    assert count > 36 and fast.ids == wanted(model, [9, 8, 7, 6, 5, 4, 3], 0, count, [])


def test_the_last_one_goes_home_with_all_that_was_made_for_it(model: Any, sharing: Sharing) -> None:
    host, alone, first = Host(model), Sharing(), threading.Event()
    stays, leaves = Text(model, [5, 6, 7], pads=2), Text(model, [9, 8])
    run(
        lambda: stays.with_others(alone, host, 400, [], lambda count: first.set()),
        lambda: leaves.with_others(alone, host, 5, [], lambda count: first.wait(PATIENCE)),
    )
    assert stays.ids == wanted(model, [5, 6, 7], 2, 400, [])
    assert leaves.ids == wanted(model, [9, 8], 0, 5, [])


def test_requests_of_another_kind_go_on_alone(model: Any, sharing: Sharing) -> None:
    texts = [Text(model, [5, 6, 7 + kind], kind=kind) for kind in (1, 2)]
    first, gone = threading.Event(), threading.Event()

    def one(count: int) -> None:
        first.set()
        assert gone.wait(PATIENCE)

    def other() -> int:
        assert first.wait(PATIENCE)
        try:
            return texts[1].with_others(sharing, host, 12, [])
        finally:
            gone.set()

    host = Host(model)
    steps = run(lambda: texts[0].with_others(sharing, host, 12, [], one), other)
    assert steps == [12, 0]
    assert texts[1].ids == wanted(model, [5, 6, 9], 0, 12, [])


def test_after_an_error_in_a_step_everybody_goes_on_alone(model: Any, sharing: Sharing) -> None:
    calls = iter(range(10**6))

    def fails() -> None:
        if next(calls) == 20:
            raise RuntimeError("a step that fails")

    host = Host(model, fails)
    texts = [Text(model, [5, 6, 7 + number], number % 2) for number in range(4)]
    steps = run(*[lambda t=text: t.with_others(sharing, host, 60, []) for text in texts])
    for number, text in enumerate(texts):
        assert text.ids == wanted(model, [5, 6, 7 + number], number % 2, 60, [])
    assert all(count < 60 for count in steps)
    assert [str(error) for error in host.errors] == ["a step that fails"]
    assert not sharing.concurrent()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_in_one_threads_choice_is_its_own(
    model: Any, sharing: Sharing, kind: type[BaseException]
) -> None:
    host = Host(model)
    texts = [Text(model, [5, 6, 7 + number]) for number in range(3)]

    def raises(count: int) -> None:
        if count == 4:
            raise kind("of one row")

    ended = run(
        lambda: texts[0].with_others(sharing, host, 40, [], raises),
        lambda: texts[1].with_others(sharing, host, 40, []),
        lambda: texts[2].with_others(sharing, host, 40, [], lambda count: None),
    )
    assert type(ended[0]) is kind and ended[1:] == [40, 40]
    for number in (1, 2):
        assert texts[number].ids == wanted(model, [5, 6, 7 + number], 0, 40, [])
    assert not host.errors


def test_closing_sends_everybody_home(model: Any, sharing: Sharing) -> None:
    host = Host(model)
    texts = [Text(model, [5, 6, 7 + number]) for number in range(3)]
    ready = threading.Barrier(3)

    def heard(count: int) -> None:
        if count == 10 and ready.wait(PATIENCE) == 0:
            sharing.close()

    steps = run(*[lambda t=text: t.with_others(sharing, host, 60, [], heard) for text in texts])
    for number, text in enumerate(texts):
        assert text.ids == wanted(model, [5, 6, 7 + number], 0, 60, [])
    assert all(10 <= count < 60 for count in steps)


def test_a_fork_within_a_generation_is_an_error_in_the_child_alone(
    model: Any, sharing: Sharing
) -> None:
    host, children = Host(model), []
    texts = [Text(model, [5, 6, 7]), Text(model, [9, 8])]
    parent = os.getpid()

    def forks(count: int) -> None:
        if count == 3:
            children.append(os.fork())

    def task() -> int:
        try:
            return texts[0].with_others(sharing, host, 30, [], forks)
        except ExecutionError:
            os._exit(7 if os.getpid() != parent else 1)
        finally:
            if os.getpid() != parent:
                os._exit(3)

    steps = run(task, lambda: texts[1].with_others(sharing, host, 30, []))
    assert steps[0] == 30 and os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
    assert texts[0].ids == wanted(model, [5, 6, 7], 0, 30, [])
    assert texts[1].ids == wanted(model, [9, 8], 0, 30, [])


ENDS = """
import sys, threading
sys.path.insert(0, sys.argv[1])
import torch
import test_sharing
from rm_abstract.generation import sharing as sharings
sharings._MISSES = 10**9
model = test_sharing.model.__wrapped__()
sharing, host = sharings.Sharing(), test_sharing.Host(model)
started = [threading.Event() for _ in range(2)]
texts = [test_sharing.Text(model, [5, 6, 7 + n]) for n in range(2)]

def work(number):
    def heard(count):
        started[number].set()
        if daemon and number == 0:
            threading.Event().wait()
    texts[number].with_others(sharing, host, 2000 if daemon else 200, [], heard)
    sys.stdout.write(f"whole {number}\\n")  # at once: threads write beside each other

daemon = sys.argv[2] == "daemon"
with sharing.registered():
    for number in range(2):
        threading.Thread(target=work, args=(number,), daemon=daemon).start()
    for one in started:
        one.wait()
"""


@pytest.mark.parametrize("kind", ["daemon", "plain"])
def test_python_ends_while_threads_generate(kind: str) -> None:
    """It waits for plain threads, and not for daemons, one of which will never go on."""
    command = [sys.executable, "-c", ENDS, os.path.dirname(__file__), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert ("whole 0" in done.stdout) == (kind == "plain")


def test_rows_share_steps_only_where_their_other_arguments_are_the_same(model: Any) -> None:
    text = Text(model, [1, 2, 3])
    inputs = text.sequence(1, [], False).inputs
    bias = torch.zeros(5000)
    other = bias.clone()
    other[2500] = 1.0  # the texts of both tensors are the same
    assert repr(bias) == repr(other)

    def kind(**more: Any) -> Any:
        return ThreadSequence(inputs | more, 1, []).kind

    assert kind(bias=bias) == kind(bias=bias)
    assert kind(bias=bias) != kind(bias=other)
    assert kind(outputs=(bias,)) != kind(outputs=(other,))
    assert kind(use_cache=True, scale=0.5) == kind(scale=0.5, use_cache=True)
    for one, another in ((0.0, -0.0), (1, True), (1, 1.0), (None, "None")):
        assert kind(scale=one) != kind(scale=another)
