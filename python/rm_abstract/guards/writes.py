"""The one registry of writes that leave no trace in a tensor (src/bindings/router_writes.hpp).

One a process: whoever reads weights for a program, and whoever hears of such writes, share it.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def registry() -> Any:
    """The process's _core.router.WriteTracker."""
    from rm_abstract import _core

    return _core.router.WriteTracker()
