"""Greedy requests of several threads on one model, decoded as one batch.

Weights are read once for all rows. Rows join and leave between tokens and lie right-aligned in
common buffers, masked on the left: what transformers makes of a left-padded batch. One of the
waiting threads runs the steps for all; when its own row ends, another goes on. Invariant: what is
recorded of a request are whole steps, and common buffers are only appended to, so that after any
failure every request continues alone from its record.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.kv import kv_cache

if TYPE_CHECKING:
    from rm_abstract.generation.greedy_step import GreedyStep
    from rm_abstract.kv.device_cache import DeviceCache

MOST_ROWS = 8
_PATIENCE_S = 0.03  # how long the only request of a crowd waits for a second one
_MISSES = 4
_OWN = ("input_ids", "position_ids", "attention_mask", "past_key_values")
_ROOM = 256  # positions to make room for beyond the longest row


@dataclass(eq=False)
class Request:
    """One row of some thread. `inputs` are the arguments of its next step."""

    inputs: dict[str, Any]
    cache: DeviceCache
    limit: int  # tokens it still may get
    eos: list[int]
    tokens: list[int] = field(default_factory=list)  # what it got here
    ended: bool = False
    alone: bool = False  # to be continued by its own thread
    home: DeviceCache | None = None  # whose row `row` holds its keys and values
    row: int = 0
    length: int = 0

    def __post_init__(self) -> None:
        self.home, self.length = self.cache, self.cache.length

    @staticmethod
    def fits(inputs: dict[str, Any], cache: Any) -> bool:
        """One token of one row, its position given, and its mask unless all is attended to."""
        ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
        mask, held = inputs.get("attention_mask"), inputs.get("past_key_values")
        if ids is None or positions is None or not kv_cache.is_device(cache) or held is not cache:
            return False
        full = mask is None or tuple(mask.shape) == (1, held.length + 1)
        return ids.shape == (1, 1) and positions.shape == (1, 1) and full

    def kind(self) -> tuple[Any, ...]:
        """Requests of one kind may share a step."""
        named = sorted((k, v) for k, v in self.inputs.items() if k not in _OWN)
        return (*(f"{k}={v!r}" for k, v in named), self.cache.shapes())

    @property
    def out(self) -> bool:
        return self.ended or self.alone

    def add(self, tokens: list[int]) -> None:
        if not tokens:
            return
        self.tokens += tokens
        self.length += len(tokens)
        self.ended = self.tokens[-1] in self.eos or len(self.tokens) >= self.limit

    def held(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Its keys and values ``[heads, length, size]``."""
        assert self.home is not None
        found, end = self.home.layers[layer], self.home.length
        span = slice(end - self.length, end)
        return found.key_buffer[self.row, :, span], found.value_buffer[self.row, :, span]

    def go_home(self) -> None:
        """Its own cache gets what was appended elsewhere; it goes on alone."""
        self.alone = True
        before = self.cache.length
        if self.home is self.cache or self.length == before:
            return
        for number, layer in enumerate(self.cache.layers):
            keys, values = self.held(number)
            layer.grow(self.length)
            layer.key_buffer[0, :, before : self.length] = keys[:, before:]
            layer.value_buffer[0, :, before : self.length] = values[:, before:]
        self.cache.advance(self.length)
        self.home, self.row = self.cache, 0


@functools.cache
def _pause() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)


def release_workers() -> None:
    """Ends this thread's idle OpenMP workers; its next parallel kernel makes new ones.

    With more of them alive than processors, libgomp puts workers to sleep between any two kernels,
    of the leading thread too: its steps take nearly twice as long then.
    """
    pause = _pause()
    if pause is not None:
        pause(1)  # omp_pause_soft: settings stay


class Host(Protocol):
    """The model, as a leading thread needs it."""

    def step(self, inputs: dict[str, Any]) -> GreedyStep | None:
        """The program's step for these arguments; None when there is none."""

    def call(self, inputs: dict[str, Any]) -> Any:
        """An ordinary call of the model."""

    def failed(self, error: Exception) -> None:
        """Hears of an error in a common step."""


class Together:
    """The requests of one model. Any thread may call any method."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._guests = 0
        self._queue: list[Request] = []
        self._rows: list[Request] = []  # touched by the leading thread only, or when nobody leads
        self._led = False
        self._off = False  # after an error that would come again
        self._misses = 0  # common steps in a row that no program served

    @contextmanager
    def guest(self) -> Iterator[None]:
        """Around a generation that could share its steps."""
        with self._changed:
            self._guests += 1
        try:
            yield
        finally:
            with self._changed:
                self._guests -= 1
                self._changed.notify_all()

    def crowded(self) -> bool:
        """More than one generation is going on."""
        return self._guests > 1 and not self._off

    def decode(self, request: Request, host: Host) -> list[int]:
        """Tokens for `request`, made with others; when it ended, `request.ended` says so.

        After an error in a common step all of its rows go on alone, this time and later.
        """
        with self._changed:
            self._queue.append(request)
            self._changed.notify_all()
        release_workers()
        try:
            while True:
                with self._changed:
                    while self._led and not request.out:
                        self._changed.wait()
                    if request.out:
                        return request.tokens
                    self._led = True
                try:
                    self._lead(request, host)
                finally:
                    with self._changed:
                        self._led = False
                        self._changed.notify_all()
        except BaseException:  # this thread leaves; the others' records are whole
            request.alone = True
            with self._changed:
                self._queue = [r for r in self._queue if r is not request]
            raise

    # ---- the leading thread ------------------------------------------------------------------

    def _lead(self, mine: Request, host: Host) -> None:
        while not mine.out:
            self._admit(mine)
            if mine.out:
                return
            if len(self._rows) < 2:
                self._dissolve()
                return
            try:
                step, cache = self._join(host)
                while step is not None and not self._due(cache):
                    self._tokens(step, cache)
            except Exception as error:
                self._dissolve()
                self._off = True
                host.failed(error)

    def _admit(self, mine: Request) -> None:
        """Takes waiting requests into the rows; the rows are of one kind."""
        with self._changed:
            self._rows = [r for r in self._rows if not r.out]
            kind = (self._rows or [mine])[0].kind()
            if not self._rows and len(self._queue) < 2 and self.crowded():
                self._changed.wait(_PATIENCE_S)
            fits = [r for r in self._queue if r.kind() == kind and not r.out]
            fits = fits[: MOST_ROWS - len(self._rows)]
            self._rows += fits
            self._queue = [r for r in self._queue if r not in fits and not r.out]
            if mine not in self._rows:  # of another kind: it does not wait for these
                mine.alone = True
                self._queue = [r for r in self._queue if r is not mine]

    def _dissolve(self) -> None:
        with self._changed:
            for request in self._rows:
                if not request.out:
                    request.go_home()
            self._rows = []
            self._changed.notify_all()

    def _due(self, cache: DeviceCache) -> bool:
        """Something to be done before the next token of these rows."""
        waiting = bool(self._queue) and len(self._rows) < MOST_ROWS
        return waiting or any(r.out for r in self._rows) or cache.length >= cache.capacity

    def _join(self, host: Host) -> tuple[GreedyStep | None, DeviceCache]:
        """The rows in common buffers and their next step; None when eager had to make it."""
        rows = self._rows
        longest = max(r.length for r in rows)
        left = max(r.limit - len(r.tokens) for r in rows)
        cache = _common(rows, longest, longest + min(left, _ROOM))
        inputs = _merged(rows, longest, cache)
        step = host.step(inputs)
        self._misses = 0 if step is not None else self._misses + 1
        if self._misses > _MISSES:
            raise Decline("RM105", "no program for several rows")
        if step is None:  # the first batch ever: compiled while the original serves it
            logits = host.call(inputs).logits[:, -1].float()
            for request, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
                request.add([token])
        return step, cache

    def _tokens(self, step: GreedyStep, cache: DeviceCache) -> None:
        rows = self._rows
        tokens, _ = step.run(
            steps=min(r.limit - len(r.tokens) for r in rows),
            capacity=cache.capacity,
            eos=[r.eos for r in rows],
            pad=0,
            finished=[False] * len(rows),
            until_one_ends=True,
            stop=lambda: self._due(cache),
        )
        cache.advance(step.length())
        for number, request in enumerate(rows):
            request.add(tokens[number :: len(rows)])


def _merged(rows: list[Request], longest: int, cache: DeviceCache) -> dict[str, Any]:
    """The next step of all rows as one call; what is left of a row is masked."""
    ids, positions, masks = [], [], []
    for request in rows:
        last, made = request.inputs["input_ids"], request.tokens
        ids.append(last.new_tensor([made[-1:]]) if made else last)
        positions.append(request.inputs["position_ids"] + len(made))
        mask = torch.zeros(1, longest + 1, dtype=torch.long)
        mask[:, longest - request.length :] = 1
        given = request.inputs.get("attention_mask")
        if given is not None:
            mask[:, longest - request.length :][:, : given.shape[1]] = given
        masks.append(mask)
    return {
        **rows[0].inputs,
        "input_ids": torch.cat(ids),
        "position_ids": torch.cat(positions),
        "attention_mask": torch.cat(masks),
        "past_key_values": cache,
    }


def _common(rows: list[Request], longest: int, room: int) -> DeviceCache:
    """The rows' keys and values in buffers of a batch, right-aligned at `longest`."""
    from rm_abstract.kv.device_cache import DeviceCache, DeviceLayer

    first = rows[0].cache
    cache = DeviceCache([DeviceLayer(x.sliding_window) for x in first.layers], first.expected)
    shapes = first.shapes()
    for number, layer in enumerate(cache.layers):
        layer.make_room(len(rows), shapes[number], room)
        for row, request in enumerate(rows):
            keys, values = request.held(number)
            span = slice(longest - request.length, longest)
            layer.key_buffer[row, :, span] = keys
            layer.value_buffer[row, :, span] = values
    cache.advance(longest)
    for row, request in enumerate(rows):
        request.home, request.row = cache, row
    return cache
