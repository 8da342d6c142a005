"""The slot seen without importing torch: copies of a module must leave without our router."""

from __future__ import annotations

from typing import Any

from rm_abstract.hooks.host import SLOT


class Ours:
    """The base of what we put into slots: routers and probes."""

    __slots__ = ()


def is_ours(slot: Any) -> bool:
    """Whether what sits in a slot is a router or a probe of ours."""
    return isinstance(slot, Ours)


def drop_slot(module: Any) -> Any:
    """Removes what is ours (and only that) from a copied ``__dict__``; returns the module."""
    if is_ours(vars(module).get(SLOT)):
        del vars(module)[SLOT]
    return module
