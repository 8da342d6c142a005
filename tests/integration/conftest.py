"""A session ends with its test: files run in one process in an order that their sizes decide."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def closed_session() -> Iterator[None]:
    """No test finds the session of one before it."""
    yield
    package = sys.modules.get("rm_abstract")
    if package is not None:
        package.shutdown()
