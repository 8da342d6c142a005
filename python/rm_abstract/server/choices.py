"""The choices of one request while they are made: jobs of an engine turned into pieces of text.

Invariant: whatever ends the iteration, no job of the request is left running.

A small model makes tokens faster than the event loop turns them into text. So what came meanwhile
is one piece, and after `_MOST_EVENTS` events the loop serves its other tasks: without that, one
stream that is behind keeps the loop from other requests, and from hearing that its client left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rm_abstract.generation.jobs import Closed, End, Job, QueueFull, Sampling, Token
from rm_abstract.server.engine import TextEngine
from rm_abstract.server.errors import ApiError
from rm_abstract.server.text import Detokenizer, StopStrings

_MOST_EVENTS = 32  # handled in one turn of the event loop: some milliseconds of decoding


@dataclass(frozen=True)
class Piece:
    """More of one choice. The last piece of a choice has a `finish`."""

    index: int
    text: str = ""
    tokens: tuple[Token, ...] = ()
    finish: str | None = None

    def after(self, before: Piece | None) -> Piece:
        """This piece with what the same choice had before it."""
        if before is None:
            return self
        text, tokens = before.text + self.text, before.tokens + self.tokens
        return Piece(self.index, text, tokens, self.finish)


@dataclass(frozen=True)
class Wanted:
    """What is asked of every prompt of a request."""

    limit: int
    sampling: Sampling
    n: int = 1
    stops: Sequence[str] = ()
    stop_tokens: frozenset[int] = frozenset()
    priority: int = 0
    seconds: float | None = None


@dataclass
class Usage:
    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass
class _Choice:
    index: int
    job: Job
    words: Detokenizer
    stops: StopStrings
    unsent: list[Token] = field(default_factory=list)
    over: bool = False


class Bell:
    """Tells an event loop which inboxes have news. It is woken once for all that have some by the
    time it looks: a wake-up is a system call, which costs an engine's thread Python's lock."""

    def __init__(self) -> None:
        self._news: deque[_Inbox] = deque()
        self._rung = False  # the loop will hear of the newest

    def ring(self, inbox: _Inbox) -> None:
        """Any thread may call it; it never blocks."""
        self._news.append(inbox)
        if not self._rung:
            self._rung = True
            try:
                inbox.loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed: nobody listens any more
                self._rung = False

    def _answer(self) -> None:
        self._rung = False  # before it looks: who comes later rings again
        while self._news:
            self._news.popleft().announce()


class _Inbox:
    """Events of engines' threads, read on the event loop in the order in which they came."""

    def __init__(self, bell: Bell) -> None:
        self.loop = asyncio.get_running_loop()
        self._bell = bell
        self._events: deque[tuple[int, Token | End]] = deque()
        self._arrived = asyncio.Event()
        self._announced = False  # the loop will hear of the newest event

    def writer(self, index: int) -> Callable[[Token | End], None]:
        """What puts an event of choice `index` in; any thread may call it, it never blocks."""

        def put(event: Token | End) -> None:
            self._events.append((index, event))
            if not self._announced:
                self._announced = True
                self._bell.ring(self)

        return put

    def announce(self) -> None:
        self._announced = False  # before the reader looks: what comes later is announced again
        self._arrived.set()

    async def some(self) -> list[tuple[int, Token | End]]:
        """One to `_MOST_EVENTS` events. Always lets the loop's other tasks run first."""
        if self._events:
            await asyncio.sleep(0)
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return [self._events.popleft() for _ in range(min(len(self._events), _MOST_EVENTS))]


class Choices:
    """One request's jobs. Made and iterated on the event loop; iterate once, then `close`."""

    def __init__(
        self,
        engine: TextEngine,
        tokenizer: Any,
        prompts: Sequence[list[int]],
        wanted: Wanted,
        bell: Bell | None = None,
    ) -> None:
        """Submits the jobs; `bell` is the loop's. Raises ApiError where there is no room."""
        self._engine, self._stop_tokens = engine, wanted.stop_tokens
        self._inbox = _Inbox(bell or Bell())
        self.usage = Usage(prompt=sum(len(p) for p in prompts))
        self.started, self.first_token_s = time.monotonic(), None
        deadline = None if wanted.seconds is None else self.started + wanted.seconds
        self._choices = []
        for number, prompt in enumerate(prompts):
            for copy in range(wanted.n):
                index, sampling = number * wanted.n + copy, wanted.sampling
                if sampling.seed is not None and copy:
                    sampling = dataclasses.replace(sampling, seed=sampling.seed + copy)
                job = Job(
                    prompt,
                    wanted.limit,
                    self._inbox.writer(index),
                    sampling,
                    wanted.stop_tokens,
                    wanted.priority,
                    deadline,
                )
                stops = StopStrings(wanted.stops)
                self._choices.append(_Choice(index, job, Detokenizer(tokenizer), stops))
        try:
            engine.submit([choice.job for choice in self._choices])
        except QueueFull as error:
            raise ApiError(429, f"The queue is full: {error}.", code="queue_full") from None
        except Closed as error:
            raise ApiError(503, f"Not serving: {error}.") from None

    first_token_s: float | None

    async def pieces(self) -> AsyncIterator[Piece]:
        """Raises ApiError for a job that failed or came too late."""
        try:
            while not all(choice.over for choice in self._choices):
                merged: dict[int, Piece] = {}
                failure: ApiError | None = None
                for index, event in await self._inbox.some():
                    try:
                        piece = self._handle(self._choices[index], event)
                    except ApiError as error:  # raised behind what was made before it
                        failure = error
                        break
                    if piece is not None:
                        merged[index] = piece.after(merged.get(index))
                for piece in merged.values():
                    yield piece
                if failure is not None:
                    raise failure
        finally:
            self.close()

    def _handle(self, choice: _Choice, event: Token | End) -> Piece | None:
        if choice.over:
            return None
        return self._end(choice, event) if isinstance(event, End) else self._token(choice, event)

    def close(self) -> None:
        for choice in self._choices:
            if not choice.over:
                choice.over = True
                self._engine.cancel(choice.job)

    def _token(self, choice: _Choice, token: Token) -> Piece | None:
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.started
        self.usage.completion += 1
        if token.id in self._stop_tokens:
            return None  # its End follows
        choice.unsent.append(token)
        text = choice.stops.add(choice.words.add(token.id))
        if choice.stops.stopped:
            choice.over = True
            self._engine.cancel(choice.job)
            self.usage.cached += choice.job.cached_tokens
            return self._piece(choice, text, "stop")
        return self._piece(choice, text, None) if text else None

    def _end(self, choice: _Choice, end: End) -> Piece | None:
        choice.over = True
        self.usage.cached += end.cached_tokens
        if end.reason == "deadline":
            raise ApiError(504, "The request took longer than the server allows.", code="timeout")
        if end.reason == "cancelled":
            raise ApiError(503, f"The request was cancelled: {end.message or 'by the server'}.")
        if end.reason == "error":
            raise ApiError(500, f"The model failed: {end.message}")
        text = choice.stops.add(choice.words.rest())
        stopped = choice.stops.stopped
        return self._piece(choice, text + choice.stops.rest(), "stop" if stopped else end.reason)

    def _piece(self, choice: _Choice, text: str, finish: str | None) -> Piece:
        tokens, choice.unsent = tuple(choice.unsent), []
        return Piece(choice.index, text, tokens, finish)
