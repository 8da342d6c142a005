"""Whatever an engine's process sends, its user gets a typed error in bounded time."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rm_abstract as rm
from rm_abstract.generation.remote import process as processes
from rm_abstract.generation.remote.engine import RemoteEngine, _apart, _chances_of, _check_facts
from rm_abstract.generation.remote.stream import RemoteStream

# Sends its argument again and again, and beats, until it is ended.
PROGRAM = """
import socket, sys, time
one = socket.socket(fileno=int(sys.argv[2]))
data = bytes.fromhex(sys.argv[1])
while True:
    one.sendall(data)
    one.sendall(b'{"event": "beat"}\\n')
    time.sleep(0.05)
"""


@pytest.fixture
def sends(tmp_path: Path) -> Iterator[Any]:
    """Starts a process that sends these bytes."""
    program, made = tmp_path / "program.py", []
    program.write_text(PROGRAM)

    def start(data: bytes) -> processes.EngineProcess:
        command = [sys.executable, "-S", str(program), data.hex()]
        made.append(processes.EngineProcess("garbage", command, dict(os.environ)))
        return made[-1]

    yield start
    for one in made:
        one.close()


def line(**message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


GARBAGE = {
    "bytes": b"\xff\x00\x80\n",
    "a list": b"[1]\n",
    "deep": b"[" * 20_000 + b"\n",
    "no id": line(event="answer", facts={}),
    "facts of another kind": line(event="answer", id=1, facts="none"),
    "tokens of another kind": line(event="tokens", id=1, tokens="12", chances=[], done=False),
    "an event of its own": line(event="gone", id=1),
    "an error without a kind": line(event="error", id=1, message=7, fatal=False),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_what_is_no_message_ends_the_process_at_once(
    name: str, sends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", unseen.append)
    monkeypatch.setattr(processes, "SILENCE_S", 600.0)  # not what ends it
    one = sends(GARBAGE[name])
    with pytest.raises(rm.ExecutionError) as error:
        one.request("start", 60.0, model="", arguments={}, device="cpu")
    assert error.value.code == "RM303" and "no message" in str(error.value)
    assert not one.alive and not unseen


def test_a_process_that_reads_nothing_holds_nobody_up(
    sends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SILENCE_S", 1.0)
    one = sends(b"")  # beats, so that only the sending fails
    with pytest.raises(rm.ExecutionError) as error:
        one.request("start", 60.0, model="m" * (8 << 20), arguments={}, device="cpu")
    assert error.value.code == "RM303" and not one.alive


class Said:
    """A request under way whose messages are given: a Ticket, and the Source of one row."""

    step_timeout_s = 60.0

    def __init__(self, *messages: dict[str, Any]) -> None:
        self._messages = iter(messages)

    def within(self, limit_s: float) -> dict[str, Any]:
        return next(self._messages)

    def open(self) -> list[Any]:
        return [self]

    def cancel(self, tickets: Any) -> None: ...

    def close(self, *given: Any, **well: Any) -> None: ...


def stream(*messages: dict[str, Any]) -> list[int]:
    text = SimpleNamespace(vocab_size=50)
    config = SimpleNamespace(get_text_config=lambda: text, _pad_token_tensor=None)
    ends = type("MaxLengthCriteria", (), {"max_length": 6})()
    request = SimpleNamespace(
        model=SimpleNamespace(config=config),
        config=config,
        input_ids=torch.zeros((1, 3), dtype=torch.int64),
        criteria=[ends],
        streamer=None,
    )
    made = RemoteStream(request, Said(*messages))  # type: ignore[arg-type]
    return [int(step) for step in made]


@pytest.mark.parametrize("token", [50, -1, 2**70, 1.0, True, "7", None, [3]])
def test_a_token_the_model_does_not_have_is_an_error_of_the_engine(token: Any) -> None:
    good = {"tokens": [7], "done": False}
    assert stream(good, good, good) == [7, 7, 7]
    with pytest.raises(rm.ExecutionError) as error:
        stream(good, {"tokens": [token], "done": False}, good)
    assert error.value.code == "RM331" and "below 50" in str(error.value)


class Kind:
    """Of an engine whose probe is one prompt."""

    name, repeats, start_option = "said", True, "timeout_s in compile_options"

    def start_timeout_s(self) -> float:
        return 60.0

    def step_timeout_s(self) -> float:
        return 60.0


class Probed:
    """An engine's process that answers every request with the same message, for ever."""

    def __init__(self, message: dict[str, Any]) -> None:
        self._message = message

    def submit(self, op: str, **fields: Any) -> Probed:
        return self

    def next(self, deadline: float, option: str = "") -> dict[str, Any]:
        return self._message

    def forget(self, tickets: Any, cancel: bool = False) -> None: ...


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"tokens": [99], "chances": [], "done": True}, "below 50"),
        ({"tokens": [], "chances": [], "done": True}, "8 tokens"),
        ({"tokens": [1], "chances": [], "done": False}, "more"),  # it never ends
        ({"tokens": [1] * 8, "chances": [[]], "done": True}, "log probability"),
        ({"tokens": [1] * 8, "chances": [[[1, "x"]]], "done": True}, "log probability"),
    ],
)
def test_nonsense_while_it_is_compared_keeps_the_engine_out(
    message: dict[str, Any], word: str
) -> None:
    from rm_abstract.base.decline import Decline

    engine = RemoteEngine(Kind(), lambda: None, lambda *_: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(Decline) as caught:
        engine._probe(Probed(message), [[1, 2]], [{}], 50)  # type: ignore[arg-type]
    assert caught.value.code == "RM331" and word in caught.value.detail


def test_log_probabilities_of_some_tokens_only_are_none() -> None:
    assert _chances_of({"chances": [[[4, -0.5], [5, -1.0]]]}) == [-0.5]

    def model(input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=torch.zeros((*input_ids.shape, 50)))

    model.device = "cpu"  # type: ignore[attr-defined]
    assert _apart(model, [1, 2], [3, 4], [-0.5]) == 0.0


@pytest.mark.parametrize("longest", [None, "many", True, 0, float("nan")])
def test_facts_that_are_none_are_refused(longest: Any) -> None:
    with pytest.raises(rm.ExecutionError):
        _check_facts({"max_model_len": longest})
    _check_facts({"max_model_len": 256})


def test_a_token_that_does_not_come_is_given_up_and_the_process_ended(sends: Any) -> None:
    one = sends(b"")
    ticket = one.submit("generate", prompt=[1], sampling={})
    begun = time.monotonic()
    with pytest.raises(rm.ExecutionError, match="execute_timeout_s") as error:
        ticket.within(0.5)
    assert error.value.code == "RM308" and time.monotonic() - begun < 30
    assert not one.alive
