"""When a device that failed while it served is tried again.

A worker that crashed twice in one call, or a lost device, may be whole again after a reset; a
program that ends its worker every time must not cost every call two starts. So the pauses grow.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PASSING = ("RM303", "RM407")  # the device's state; others are the program's, or a time-out
FIRST_S, LONGEST_S = 5.0, 600.0


class Recovery:
    """The failures of one model's device. Not thread safe: a pause may come out longer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s = 0.0
        self._failed_at = 0.0

    def pause_s(self, code: str) -> float | None:
        """How long PyTorch serves now, in seconds; None: for good. Twice as long as the last time,
        unless the device has served for longer than that since."""
        if code not in PASSING:
            return None
        now = self._clock()
        soon = now - self._failed_at < 2 * self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_S) if soon else FIRST_S
        self._failed_at = now
        return self._pause_s
