"""Hooks of ours run inside the user's lines. One that fails says so once and stays out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOG = logging.getLogger("rm_abstract")
_said: set[str] = set()


@contextmanager
def staying_out(what: str) -> Iterator[None]:
    """Turns an exception of the body into one log line: the user's line goes on without us."""
    try:
        yield
    except Exception as error:  # whatever a renamed private name raises
        if what not in _said:
            _said.add(what)
            _LOG.warning(
                "[hooks] expected %s to work, got %s: %s; rm_abstract stays out of it",
                *(what, type(error).__name__, error),
            )
