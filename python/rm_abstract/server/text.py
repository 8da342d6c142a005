"""Tokens to text as they come, and stop strings. Plain computation, no threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoders give for a part of a character


class Detokenizer:
    """The text of a growing row. Invariant: what was given out never changes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # decoded together with what follows: spaces depend on neighbours
        self._given = 0  # tokens whose text was given out

    def add(self, token: int) -> str:
        """The text that this token completes; empty inside of a character."""
        self._ids.append(token)
        before = self._text(self._ids[self._start : self._given])
        now = self._text(self._ids[self._start :])
        if len(now) <= len(before) or now.endswith(_UNFINISHED):
            return ""
        self._start, self._given = self._given, len(self._ids)
        return now[len(before) :]

    def rest(self) -> str:
        """What is left at the end, unfinished characters included."""
        before = self._text(self._ids[self._start : self._given])
        now = self._text(self._ids[self._start :])
        self._start = self._given = len(self._ids)
        return now[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class StopStrings:
    """Ends a text at the first stop string. Holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """What may be given out now, without the stop string; sets `stopped`."""
        if not self._stops:
            return text
        held = self._held + text
        found = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return held[: min(found)]
        keep = max((self._beginning(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """The longest end of `text` that `stop` begins with, shorter than all of it."""
        for count in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:count]):
                return count
        return 0
