"""Is a program faster than the original, call for call? Measured once, on the user's own calls.

Short calls are repeated; long ones are served in turn by the program and the original, so that
nothing is run twice. Invariant: what is measured is what a user waits for; a program is left only
for shapes at which it lost by more than a tenth (decision 0011).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rm_abstract.base.profilers import profiling

CALLS = 24  # a program serves this many before it is measured: by then its weights are packed
SAME_SHAPE = 3  # and this many of the shape
LOSES = 1.1  # times the original's
_LONGEST_S = 5e-3  # longer calls are not repeated
TURNS = 4  # of each, for longer ones
LONG_CALLS = 6  # a program serves this many before
# A long call that lost is looked at again after so many calls, then after four times as many and
# so on: weights were still being packed, or the machine was busy with something else.
AGAIN = 24
_TOGETHER_S = 8e-3  # for the runs of each side
_MOST, _FEWEST = 40, 4
_SHAPES = 32  # measured at most

Shapes = tuple[torch.Size, ...]


class Trial:
    """Of one program. `verdict` is asked before each of its calls until it won one."""

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        """`wait` returns when the device has done what calls gave it; None: calls do it at once."""
        self._wait = wait
        self._calls = 0
        self._seen: dict[Shapes, int] = {}
        self._slower: dict[Shapes, str] = {}
        self._turns: dict[Shapes, tuple[list[float], list[float]]] = {}  # ours, the original's
        self._decided: set[Shapes] = set()
        self._waits: dict[Shapes, list[int]] = {}  # calls until it is looked at again, and in all
        self._running = threading.Lock()
        self.won = False
        self.eager_s = 0.0  # of the last measurement
        self.best: tuple[float, float] | None = None  # of it, seconds: ours, the original's

    def verdict(
        self,
        tensors: Sequence[torch.Tensor],
        calls: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]],
    ) -> str:
        """Why the original should serve this call; empty: the program should.

        `calls` gives the call as the program serves it and as the original does.
        """
        self._calls += 1
        if self.won:
            return ""
        shapes = tuple([t.shape for t in tensors])
        if shapes in self._slower:
            return "" if self._due(shapes) else self._slower[shapes]
        if self._calls < CALLS:
            return ""
        if shapes in self._decided or (len(self._seen) >= _SHAPES and shapes not in self._seen):
            return ""
        self._seen[shapes] = self._seen.get(shapes, 0) + 1
        watched = profiling() or torch._C._autograd._profiler_enabled()
        if self._seen[shapes] != SAME_SHAPE or watched or not self._running.acquire(False):
            return ""
        try:
            compiled, eager = calls()
            times = _measure(self._to_its_end(compiled), self._to_its_end(eager))
        finally:
            self._running.release()
        return "" if times is None else self._decide(shapes, *times)

    def in_turn(
        self,
        tensors: Sequence[torch.Tensor],
        compiled: Callable[[], Any],
        eager: Callable[[], Any],
        by_original: Callable[[], None],
    ) -> Any:
        """The output of a call that is not repeated, of whoever's turn it is; by_original() says
        that the original served it."""
        shapes = tuple([t.shape for t in tensors])
        turns = self._turns.get(shapes)
        ours, theirs = turns or ([], [])
        mine = len(ours) <= len(theirs)
        call = compiled if mine else eager
        if turns is not None:
            call = self._to_its_end(call)
        start = time.perf_counter()
        output = call()
        took = time.perf_counter() - start
        if turns is not None:
            (ours if mine else theirs).append(took)
            if not mine:
                by_original()
            if len(theirs) >= TURNS:
                self._turns.pop(shapes, None)
                if self._decide(shapes, min(ours), min(theirs)):
                    self._waits.setdefault(shapes, [AGAIN, AGAIN])
        elif took > _LONGEST_S and self._calls >= LONG_CALLS and self._may_decide(shapes):
            self._turns[shapes] = ours, theirs
        return output

    def _to_its_end(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call and what the device does for it."""
        wait = self._wait
        if wait is None:
            return call

        def waited() -> Any:
            output = call()
            wait()
            return output

        return waited

    def _due(self, shapes: Shapes) -> bool:
        """Whether a long call that lost is to be looked at again; counts its calls."""
        wait = self._waits.get(shapes)
        if wait is None:
            return False
        wait[0] -= 1
        if wait[0] > 0:
            return False
        wait[0] = wait[1] = 4 * wait[1]
        self._slower.pop(shapes, None)
        self._turns[shapes] = [], []
        return True

    def _may_decide(self, shapes: Shapes) -> bool:
        return len(self._decided) < _SHAPES and shapes not in self._decided

    def _decide(self, shapes: Shapes, ours: float, theirs: float) -> str:
        self._decided.add(shapes)
        self.best = ours, theirs
        if ours <= LOSES * theirs:
            self.won = not self._slower  # this shape, and others as long as none lost
            return ""
        self.eager_s = theirs
        self._slower[shapes] = f"{ours * 1e6:.1f} µs compiled, {theirs * 1e6:.1f} µs eager"
        return self._slower[shapes]

    @property
    def running(self) -> bool:
        """While it measures, calls go to the program."""
        return self._running.locked()


def _measure(compiled: Callable[[], Any], eager: Callable[[], Any]) -> tuple[float, float] | None:
    """The best times of both, taken by turns; None for calls too long to repeat."""
    first = _timed(eager)
    if first > _LONGEST_S:
        return None
    rounds = max(_FEWEST, min(_MOST, int(_TOGETHER_S / max(first, 1e-7))))
    ours, theirs = _timed(compiled), first
    for _ in range(rounds):
        ours = min(ours, _timed(compiled))
        theirs = min(theirs, _timed(eager))
    return ours, theirs


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
