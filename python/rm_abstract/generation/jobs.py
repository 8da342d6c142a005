"""Requests for text as the scheduler takes them, and what it answers. Imports no torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Reason = Literal["stop", "length", "cancelled", "deadline", "error"]


class QueueFull(Exception):
    """As many requests as allowed wait already."""


class Closed(Exception):
    """The scheduler takes no requests any more."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits. The defaults change nothing."""

    temperature: float = 1.0  # 0: the most likely token
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    presence_penalty: float = 0.0  # subtracted once for a token this request generated already
    frequency_penalty: float = 0.0  # subtracted for every time
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: other tokens each time
    logprobs: int | None = None  # alternatives to report a token; None: no probabilities


@dataclass(frozen=True)
class Token:
    id: int
    logprob: float | None = None  # by the model's own logits, before temperature and penalties
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class End:
    """The last event of a job."""

    reason: Reason
    message: str = ""
    cached_tokens: int = 0  # of the prompt, that were computed for an earlier request


class Outbox:
    """Events on their way to those who listen. The scheduler delivers them when it is about to
    compute or to wait: listeners in Python that wake earlier take Python's lock from it, between
    two steps. What a listener raises is no fault of the row that is computed then: it waits in
    `fault`, the first one, for the scheduler to raise it between two steps."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self._events: deque[tuple[Callable[[Token | End], None], Token | End]] = deque()

    def put(self, deliver: Callable[[Token | End], None], event: Token | End) -> None:
        self._events.append((deliver, event))

    def deliver(self) -> None:
        while self._events:
            deliver, event = self._events.popleft()
            try:
                deliver(event)
            except Exception as error:
                self.fault = self.fault or error


@dataclass(eq=False)
class Job:
    """One row of text to be made. `deliver` is called by the scheduler's thread and must not block.

    `prompt` holds at least one token. A token of `stop_tokens` ends the row and is delivered. With
    an `outbox` events are put there.
    """

    prompt: list[int]
    limit: int  # tokens to make at most, at least one
    deliver: Callable[[Token | End], None]
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()
    priority: int = 0  # smaller ones go first
    deadline: float | None = None  # time.monotonic()
    made: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    cancelled: bool = False
    turns_waited: int = 0  # prompts of others that went before its own
    outbox: Outbox | None = None
    _ended: bool = False

    @property
    def ended(self) -> bool:
        return self._ended

    def add(self, token: Token) -> None:
        """Delivers a token, and the end if it is the last one."""
        self.made.append(token.id)
        self._tell(token)
        if token.id in self.stop_tokens:
            self.end("stop")
        elif len(self.made) >= self.limit:
            self.end("length")

    def end(self, reason: Reason, message: str = "") -> None:
        if not self._ended:
            self._ended = True
            self._tell(End(reason, message, self.cached_tokens))

    def _tell(self, event: Token | End) -> None:
        if self.outbox is None:
            self.deliver(event)
        else:
            self.outbox.put(self.deliver, event)

    def expired(self) -> Reason | None:
        if self.cancelled:
            return "cancelled"
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return "deadline"
        return None
