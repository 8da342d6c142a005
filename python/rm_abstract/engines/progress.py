"""One line on stderr while a device's compiler works, and nothing when it is quick.

``Compiling BertModel for sim:0 [====>     ] 45 % · lowering``. On a terminal the line is rewritten;
elsewhere a line is printed every ten percent.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

QUIET_S = 2.0  # shorter compilations say nothing
_WIDTH = 20
_LONGEST_STAGE = 60


def bar(fraction: float, width: int = _WIDTH) -> str:
    """``[====>     ]``; unknown progress (< 0) is an empty bar."""
    done = int(max(0.0, min(1.0, fraction)) * width)
    return "[" + ("=" * max(0, done - 1) + ">" if done else "").ljust(width) + "]"


class Progress:
    """Called with (fraction, stage); use as a context manager so that the line is closed."""

    def __init__(self, what: str, verbose: int = 0, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = stream if stream is not None else sys.stderr
        self._start = time.monotonic()
        self._after = 0.0 if verbose > 0 else QUIET_S
        self._shown = -1
        self._open = False

    def __enter__(self) -> Progress:
        return self

    def __call__(self, fraction: float, stage: str) -> None:
        if time.monotonic() - self._start < self._after:
            return
        # A vendor's report: any number, NaN among them, and any text.
        percent = int(min(fraction, 1.0) * 100) if fraction >= 0 else 0
        stage = "".join(c if c.isprintable() else "?" for c in stage[:_LONGEST_STAGE])
        rewrites = self._stream.isatty()
        if percent == self._shown or (not rewrites and percent // 10 == self._shown // 10):
            return
        self._shown = percent
        tail = f" · {stage}" if stage else ""
        line = f"Compiling {self._what} {bar(fraction)} {percent} %{tail}"
        self._write(f"\r\x1b[K{line}" if rewrites else f"{line}\n")
        self._open = rewrites

    def say(self, what: str) -> None:
        """One line of its own."""
        self._write(f"{what} ({self._what})\n")

    def __exit__(self, *exception: object) -> None:
        if self._open:
            seconds = time.monotonic() - self._start
            end = f"stopped after {seconds:.1f} s" if exception[0] else f"done in {seconds:.1f} s"
            self._write(f"\r\x1b[KCompiling {self._what}: {end}\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            pass  # a closed stderr is no reason not to compile
