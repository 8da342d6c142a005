"""The slot seen without importing torch: copies of a module must leave without our router."""

from __future__ import annotations

from typing import Any

from rm_abstract.hooks.host import SLOT


def drop_slot(module: Any) -> Any:
    """Removes a router (and only a router) from a copied ``__dict__``; returns the module."""
    slot = vars(module).get(SLOT)
    if type(slot).__module__ == "rm_abstract.hooks.router":
        del vars(module)[SLOT]
    return module
