"""Tokens to text as they come, and stop strings. Plain computation, no threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoders give for a part of a character
_MOST_NEIGHBOURS = 8  # decoded with a token; then the text of those that stay is made anew


class Detokenizer:
    """The text of a growing row. Invariant: what was given out never changes.

    A token is decoded behind some that came before it, since spaces depend on neighbours; those
    are few, and their text is kept.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # decoded together
        self._given = 0  # of them, tokens whose text was given out
        self._text_given = ""

    def add(self, token: int) -> str:
        """The text that this token completes; empty inside of a character."""
        self._ids.append(token)
        now = self._text(self._ids)
        if len(now) <= len(self._text_given) or now.endswith(_UNFINISHED):
            return ""
        new = now[len(self._text_given) :]
        if len(self._ids) >= _MOST_NEIGHBOURS:
            del self._ids[: self._given]
            now = self._text(self._ids)
        self._given, self._text_given = len(self._ids), now
        return new

    def rest(self) -> str:
        """What is left at the end, unfinished characters included."""
        now = self._text(self._ids)
        new = now[len(self._text_given) :]
        self._given, self._text_given = len(self._ids), now
        return new

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
