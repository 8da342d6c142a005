"""Generations of several threads on one model share their steps, on the scheduler's thread.

A scheduler is there as long as more than one thread generates: what a lone one asks for is made
faster without. Rows of another kind than the scheduler's go on alone.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import ExecutionError
from rm_abstract.generation.greedy_step import Refused
from rm_abstract.generation.thread_sequence import OWN, ThreadSequence

if TYPE_CHECKING:
    from rm_abstract.generation.greedy_step import GreedyStep
    from rm_abstract.generation.scheduler import Scheduler

_MISSES = 4


@functools.cache
def _pause() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)


def release_workers() -> None:
    """Ends this thread's idle OpenMP workers; its next parallel kernel makes new ones.

    With more of them alive than processors, libgomp puts workers to sleep between any two kernels,
    of the scheduler's thread too: its steps take nearly twice as long then.
    """
    pause = _pause()
    if pause is not None:
        pause(1)  # omp_pause_soft: settings stay


class Host(Protocol):
    """The model, as a scheduler needs it."""

    model: Any

    def program(self, inputs: dict[str, Any]) -> GreedyStep | None:
        """The program that serves a call with these arguments; None when there is none."""

    def waits(self) -> int:
        """Calls so far whose program was being made elsewhere."""

    def failed(self, error: Exception) -> None:
        """Hears of an error in a common step."""


class Sharing:
    """The generations of one model. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generating: Counter[int] = Counter()  # generations that could share, by thread
        self._scheduler: Scheduler | None = None
        self._kind: tuple[Any, ...] = ()
        self._off = False  # after an error that would come again
        self.tokens = 0  # that were made in common steps
        self._misses = 0  # common steps in a row that no program served
        self._waits = 0
        self._refused = 0  # common steps that a program refused
        _all.add(self)

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Around a generation that could share its steps."""
        me = threading.get_ident()
        with self._lock:
            self._generating[me] += 1
        try:
            yield
        finally:
            with self._lock:
                self._generating[me] -= 1
                if not self._generating[me]:
                    del self._generating[me]
                if not self._generating:
                    self._scheduler = None  # it ends, and holds the model no longer than that

    def concurrent(self) -> bool:
        """More than one thread is generating."""
        return len(self._generating) > 1 and not self._off

    def decode(
        self, sequence: ThreadSequence, host: Host, choose: Callable[[torch.Tensor], int | None]
    ) -> None:
        """Steps for `sequence`, made with others, until it ended or has to go on alone.

        `choose` gets the logits ``[vocabulary]`` of a sequence whose thread chooses; None ends it.
        Raises what `choose` raises; ExecutionError in a child made by fork within it. After an
        error in a common step all go on alone, this time and later.
        """
        scheduler = self._joined(sequence, host)
        if scheduler is None:
            return
        release_workers()
        try:
            while (logits := sequence.wait()) is not None:
                token = choose(logits)
                if sequence.lost:
                    raise ExecutionError(
                        "[generate] expected to go on in the process that started, found a fork: "
                        "threads that shared this generation's steps are not in it; call generate "
                        "again"
                    )
                if token is None:
                    break
                scheduler.answer(sequence, token)
        finally:
            sequence.leave()
            with self._lock:
                self.tokens += sequence.steps

    def close(self) -> None:
        """Who shares steps goes on alone."""
        with self._lock:
            self._off, scheduler = True, self._scheduler
        if scheduler is not None:
            scheduler.close()

    def forked(self) -> None:
        """In a child made by fork."""
        scheduler, self._scheduler = self._scheduler, None
        me = threading.get_ident()
        self._lock = threading.Lock()
        self._generating = Counter({me: self._generating[me]} if me in self._generating else {})
        if scheduler is not None:
            scheduler.forked()

    # ---- the scheduler ---------------------------------------------------------------------------

    def _joined(self, sequence: ThreadSequence, host: Host) -> Scheduler | None:
        with self._lock:
            if self._off:
                return None
            for _ in range(2):
                if self._scheduler is None:
                    self._scheduler, self._kind = self._made(sequence, host), sequence.kind
                if self._kind != sequence.kind:
                    return None
                if self._scheduler.join(sequence):
                    return self._scheduler
                self._scheduler = None  # it ended with its last sequence
        return None

    def _made(self, sequence: ThreadSequence, host: Host) -> Scheduler:
        from rm_abstract.generation.model_calls import ModelCalls  # a lone thread needs none
        from rm_abstract.generation.scheduler import Scheduler

        def program(inputs: dict[str, Any]) -> GreedyStep | None:
            step, waits = host.program(inputs), host.waits()
            missing = step is None and waits == self._waits  # else it may come any moment
            self._misses, self._waits = self._misses + 1 if missing else 0, waits
            if self._misses > _MISSES:
                raise Decline("RM105", "no program for several rows")
            return step

        def failed(error: Exception) -> None:
            if isinstance(error, Refused):  # by one of them: each goes on alone, some may come back
                self._refused += 1
                self._off = self._refused > _MISSES
                return
            self._off = True
            host.failed(error)

        calls = ModelCalls.of_step(host.model, OWN, sequence.inputs, program)
        return Scheduler(calls, company=lambda: len(self._generating), failed=failed)


_all: weakref.WeakSet[Sharing] = weakref.WeakSet()


def _forked() -> None:
    for sharing in list(_all):
        sharing.forked()


os.register_at_fork(after_in_child=_forked)
