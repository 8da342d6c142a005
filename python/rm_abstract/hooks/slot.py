"""The slot seen without importing torch: copies of a module must leave without our router."""

from __future__ import annotations

from typing import Any

from rm_abstract.hooks.host import SLOT

_OURS = frozenset({"rm_abstract.hooks.router", "rm_abstract.hooks.probe"})


def is_ours(slot: Any) -> bool:
    """Whether what sits in a slot is a router or a probe of ours."""
    return type(slot).__module__ in _OURS


def drop_slot(module: Any) -> Any:
    """Removes what is ours (and only that) from a copied ``__dict__``; returns the module."""
    if is_ours(vars(module).get(SLOT)):
        del vars(module)[SLOT]
    return module
