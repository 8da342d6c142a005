"""The compiled steps and losses that live in this process, for ``explain()``."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol


class Listed(Protocol):
    @property
    def name(self) -> str:
        """Of the function that made it."""

    @property
    def model(self) -> Any: ...

    def report(self) -> dict[str, Any]: ...


_numbers = itertools.count()
_living: weakref.WeakValueDictionary[int, Listed] = weakref.WeakValueDictionary()  # as made


def add(step: Listed) -> None:
    _living[next(_numbers)] = step


def leave_out(step: Listed) -> None:
    """Another one reports what this one does."""
    for number in [n for n, known in _living.items() if known is step]:
        del _living[number]


def records(model: Any = None) -> list[dict[str, Any]]:
    """What each has done, as its ``report()`` says, with its name and its model's; of one model
    those that train it."""
    return [
        {"name": step.name, "model": type(step.model).__name__, **step.report()}
        for _, step in sorted(_living.items())
        if model is None or step.model is model
    ]
