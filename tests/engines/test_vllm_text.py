"""server/vllm.py: jobs of the server in the engine's process, by eager_worker.py."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch

from rm_abstract.base.errors import ExecutionError
from rm_abstract.generation.jobs import Closed, End, Job, QueueFull, Sampling, Token
from rm_abstract.generation.remote import worker_side
from rm_abstract.generation.vllm import engine as vllm_engine
from rm_abstract.generation.vllm import options as vllm_options
from rm_abstract.server.vllm import VllmText

PROGRAM = Path(__file__).parent / "eager_worker.py"
GREEDY = Sampling(temperature=0.0)
PATIENCE = 240.0  # seconds: a process has to start on a busy machine
PROMPT = [5, 9, 40, 77, 3]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmText]:
    folder = models.saved("llama", tmp_path_factory.mktemp("models") / "llama", 11)
    with pytest.MonkeyPatch.context() as patch:
        command = [sys.executable, str(PROGRAM), worker_side.__file__]
        patch.setattr(vllm_engine.Vllm, "command", lambda self: command)
        patch.setattr(vllm_options, "names", lambda _: ["max_model_len", *vllm_options.OURS])
        kind = vllm_engine.Vllm('{"max_model_len": 250}', "cpu")
        made = VllmText(folder, kind, 128, "auto", 4)
        yield made
        made.close()
    with pytest.raises(Closed):
        made.submit([])


@pytest.fixture(scope="module")
def expected(text: VllmText) -> list[int]:
    """PyTorch's own twenty greedy tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(text._folder)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(20):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(PROMPT) :].tolist()


def job(limit: int = 20, **given: Any) -> tuple[Job, queue.Queue[Any]]:
    events: queue.Queue[Any] = queue.Queue()
    given = {"sampling": GREEDY, **given}
    return Job(list(PROMPT), limit, events.put, **given), events


def ended(events: queue.Queue[Any]) -> tuple[list[Token], End]:
    tokens = []
    while not isinstance(event := events.get(timeout=PATIENCE), End):
        tokens.append(event)
    return tokens, event


def test_jobs_stream_their_tokens_and_say_why_they_end(text: VllmText, expected: list[int]) -> None:
    assert text.context_length == 250 and text.vocabulary == 128
    stop = expected[6]
    jobs = [job(), job(stop_tokens=frozenset({stop})), job(sampling=Sampling(0.0, logprobs=3))]
    text.submit([one for one, _ in jobs])
    found = [ended(events) for _, events in jobs]
    assert [token.id for token in found[0][0]] == expected and found[0][1].reason == "length"
    cut = expected.index(stop) + 1
    assert [token.id for token in found[1][0]] == expected[:cut] and found[1][1].reason == "stop"
    for token in found[2][0]:
        assert token.logprob is not None and len(token.top) == 3
        assert token.top[0] == (token.id, token.logprob)  # greedy: the most likely
    facts = text.facts()
    assert facts["running"] == 0 and facts["generated_tokens"] == 40 + cut


def test_jobs_are_cancelled_and_come_too_late(text: VllmText, expected: list[int]) -> None:
    gone, gone_events = job(200)
    late, late_events = job(200, deadline=time.monotonic() + 0.3)
    text.submit([gone, late])
    assert isinstance(gone_events.get(timeout=PATIENCE), Token)
    text.cancel(gone)
    assert ended(gone_events)[1].reason == "cancelled"
    assert ended(late_events)[1].reason == "deadline"
    time.sleep(0.1)
    assert gone_events.empty() and late_events.empty() and text.facts()["running"] == 0


def test_too_many_jobs_are_refused_as_a_whole(text: VllmText) -> None:
    jobs = [job(2) for _ in range(5)]
    with pytest.raises(QueueFull):
        text.submit([one for one, _ in jobs])
    assert all(events.empty() for _, events in jobs)


@pytest.mark.sampled(2, of="vllm's process")
def test_a_killed_process_fails_its_jobs_and_the_next_one_works(
    text: VllmText, expected: list[int]
) -> None:
    lost, events = job(200)
    text.submit([lost])
    assert isinstance(events.get(timeout=PATIENCE), Token)
    os.kill(text._process.pid, signal.SIGKILL)
    begun = time.monotonic()
    end = ended(events)[1]
    assert end.reason == "error" and time.monotonic() - begun < 15
    again, events = job()
    text.submit([again])
    assert [token.id for token in ended(events)[0]] == expected


def ended_process(text: VllmText) -> None:
    with contextlib.suppress(ProcessLookupError):  # one that did not start in another test
        os.kill(text._process.pid, signal.SIGKILL)
    while text._process.alive:
        time.sleep(0.01)


@pytest.mark.sampled(2, of="vllm's process")
def test_nobody_waits_for_a_process_that_starts_but_its_jobs(
    text: VllmText, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, started = threading.Event(), threading.Event(), text._started

    def slow() -> Any:
        begun.set()
        assert go_on.wait(PATIENCE)
        return started()

    ended_process(text)
    monkeypatch.setattr(text, "_started", slow)
    first, first_events = job()
    gone, gone_events = job()
    late, late_events = job(deadline=time.monotonic() + 0.3)
    text.submit([first])
    assert begun.wait(PATIENCE)
    text.submit([gone, late])
    text.cancel(gone)
    assert ended(gone_events)[1].reason == "cancelled"
    assert ended(late_events)[1].reason == "deadline"
    assert text.facts()["running"] == 1 and text.fault() == ""
    go_on.set()
    assert [token.id for token in ended(first_events)[0]] == expected


@pytest.mark.sampled(2, of="vllm's process")
def test_a_process_that_does_not_start_again_is_a_fault_until_one_does(
    text: VllmText, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Any:
        raise ExecutionError("[vllm] no memory for it\nand a log", code="RM303")

    ended_process(text)
    with monkeypatch.context() as patch:
        patch.setattr(text, "_started", fails)
        lost, events = job()
        text.submit([lost])
        assert ended(events)[1].message == text.fault() == "[vllm] no memory for it"
    again, events = job()
    text.submit([again])
    assert [token.id for token in ended(events)[0]] == expected and text.fault() == ""


@pytest.mark.sampled(2, of="vllm's process")
def test_what_an_ended_process_owed_takes_nothing_from_the_next(
    text: VllmText, expected: list[int]
) -> None:
    """Requests are numbered anew in every process."""
    ended_process(text)
    warm, events = job(2)
    text.submit([warm])
    ended(events)
    ended_process(text)
    for number in range(2):
        lost, events = job(200)
        text.submit([lost])
        assert isinstance(events.get(timeout=PATIENCE), Token)
        with text._lock:  # the end of the first process is not told before the second one serves
            ended_process(text)
            again, again_events = job()
            text.submit([again])
        assert ended(events)[1].reason == "error", number
        assert [token.id for token in ended(again_events)[0]] == expected
