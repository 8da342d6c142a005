"""Keeps quiet what torch says while it traces for us, in this thread only.

Warning filters, levels of loggers and ``print`` are the whole process's. Nothing here changes
them for another thread: what it warns, logs or prints meanwhile comes through, and filters that it
saves before and puts back after one of our blocks (``warnings.catch_warnings``) are its own.
"""

from __future__ import annotations

import builtins
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Thread(threading.local):
    depth = 0  # of quietly() blocks
    below = logging.NOTSET  # records under this level are dropped


_thread = _Thread()


def quiet() -> bool:
    """Whether this thread is inside of ``quietly``."""
    return _thread.depth > 0


class _ByThread(type):
    def __subclasscheck__(cls, kind: type) -> bool:
        return quiet()


class _Unwanted(Warning, metaclass=_ByThread):
    """A category that every warning of a quiet thread falls under, and no other one."""


class _Dropped(logging.Filter):
    """Lets pass what other threads log, what is serious, and logs that the user turned up."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not quiet() or record.levelno >= _thread.below:
            return True
        return logging.getLogger(record.name).isEnabledFor(logging.INFO)


_FILTER = _Dropped()


def print_unless_quiet(*args: Any, **kwargs: Any) -> None:
    if not quiet():
        builtins.print(*args, **kwargs)


@contextmanager
def quietly(loggers: str, below: int = logging.ERROR) -> Iterator[None]:
    """No warnings from this thread, and of a logger and those under it nothing ``below`` a level.

    What is installed for it stays: it says nothing about other threads, and taking it out again
    could make a thread that looks through the filters just then miss one.
    """
    if not warnings.filters or warnings.filters[0][2] is not _Unwanted:  # the first one decides
        warnings.simplefilter("ignore", _Unwanted)
    known = list(logging.root.manager.loggerDict)
    for name in [loggers, *(name for name in known if name.startswith(f"{loggers}."))]:
        logging.getLogger(name).addFilter(_FILTER)  # kept once, however often it is added
    outer = _thread.below
    _thread.depth, _thread.below = _thread.depth + 1, below
    try:
        yield
    finally:
        _thread.depth, _thread.below = _thread.depth - 1, outer
