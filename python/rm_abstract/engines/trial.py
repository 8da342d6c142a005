"""Is a program faster than the original, call for call? Measured once, on the user's own call.

Invariant: what is measured is what a user waits for, the router's share included; a program is
left only for shapes at which it lost by more than a tenth (decision 0011).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

CALLS = 24  # a program serves this many before it is measured: by then its weights are packed
SAME_SHAPE = 3  # and this many of the shape
LOSES = 1.1  # times the original's
_LONGEST_S = 5e-3  # longer calls are not repeated
_TOGETHER_S = 8e-3  # for the runs of each side
_MOST, _FEWEST = 40, 4
_SHAPES = 32  # measured at most

Shapes = tuple[torch.Size, ...]


class Trial:
    """Of one program. `verdict` is asked before each of its calls until it won one."""

    def __init__(self) -> None:
        self._calls = 0
        self._seen: dict[Shapes, int] = {}
        self._slower: dict[Shapes, str] = {}
        self._running = threading.Lock()
        self.won = False
        self.eager_s = 0.0  # of the last measurement

    def verdict(
        self,
        tensors: Sequence[torch.Tensor],
        calls: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]],
    ) -> str:
        """Why the original should serve this call; empty: the program should.

        `calls` gives the call as the program serves it and as the original does.
        """
        self._calls += 1
        if self._calls < CALLS or self.won:
            return ""
        shapes = tuple([t.shape for t in tensors])
        if shapes in self._slower:
            return self._slower[shapes]
        if len(self._seen) >= _SHAPES and shapes not in self._seen:
            return ""
        self._seen[shapes] = self._seen.get(shapes, 0) + 1
        watched = sys.getprofile() is not None or torch._C._autograd._profiler_enabled()
        if self._seen[shapes] != SAME_SHAPE or watched or not self._running.acquire(False):
            return ""
        try:
            times = _measure(*calls())
        finally:
            self._running.release()
        if times is None or times[0] <= LOSES * times[1]:
            self.won = not self._slower  # this shape, and others as long as none lost
            return ""
        self.eager_s = times[1]
        self._slower[shapes] = f"{times[0] * 1e6:.1f} µs compiled, {times[1] * 1e6:.1f} µs eager"
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
