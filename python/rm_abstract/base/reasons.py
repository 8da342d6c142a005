"""Reason codes: group, text and remedy. The table itself is src/control/reasons.def."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

_GROUPS = {
    "1": "routing",
    "2": "capture",
    "3": "compile",
    "4": "device",
    "5": "correctness",
    "6": "cache",
    "7": "training",
}

# Tracing, disabled(), the user's own compilation: somebody asked for the original. While another
# thread compiles, the original serves in passing. None of these is a failure to accelerate.
ASKED_FOR = frozenset({"RM103", "RM108", "RM109", "RM112"})
# Most routing reasons are expected in ordinary use and only listed in the report. This one warns:
# the user chose a device, and PyTorch runs the model on another one.
UNEXPECTED = frozenset({"RM119"})


def group_of(code: str) -> str:
    """ "routing" for RM1xx, "capture" for RM2xx, …; unknown codes count as "compile"."""
    return _GROUPS.get(code[2:3], "compile")


@lru_cache(maxsize=1)
def table() -> dict[str, dict[str, Any]]:
    """code -> {code, text, remedy, anchor}."""
    from rm_abstract import _core

    return {row["code"]: dict(row) for row in _core.control.reasons()}


def text_of(code: str) -> str:
    return str(table().get(code, {}).get("text", code))


def remedy_of(code: str) -> str:
    return str(table().get(code, {}).get("remedy", ""))
