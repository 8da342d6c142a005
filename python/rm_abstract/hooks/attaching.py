"""Which modules are routed, and how. Never inside or around a root that is routed already.

The exceptions: a transformers model or an explicit ``accelerate`` takes over from routed modules
below it, because the larger program is the one the user calls; a root that cannot be captured has
routers of its parts (parts.py), which this file does not make; and models inside a transformers
model have routers for calls that its methods make of them alone (inner.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rm_abstract.hooks.fitness import why_unfit
from rm_abstract.hooks.host import RouterHost
from rm_abstract.hooks.inner import is_transformers_model

if TYPE_CHECKING:
    from rm_abstract.hooks.router import Router

_LOADED = ("from_pretrained", "_from_config")
_TAKES_OVER = (*_LOADED, "accelerate")


def router_of(module: Any) -> Router | None:
    """The router in this module's own slot, if it is ours and meant for it."""
    from rm_abstract.hooks.host import SLOT
    from rm_abstract.hooks.router import Router

    slot = vars(module).get(SLOT)
    if isinstance(slot, Router) and slot.module_ref() is module:
        return slot
    return None


def attach(host: RouterHost, module: Any, source: str) -> Router | None:
    """See Session.attach."""
    from torch import nn

    from rm_abstract.hooks.host import SLOT
    from rm_abstract.hooks.router import Router

    if host.settings.flag("disable"):
        return None
    if host.blind:
        blind = "this torch does not let writes to weights be noticed"
        host.skipped[type(module).__qualname__] = ("RM403", blind)
        return None
    if not isinstance(module, nn.Module):
        host.skipped[type(module).__qualname__] = ("RM113", "not an nn.Module")
        return None
    existing = router_of(module)
    takes_over = source in _TAKES_OVER
    if existing is not None and existing.session is host and not (existing.name and takes_over):
        return existing
    left: Router | None = host.detached.get(id(module))
    if left is not None and left.module_ref() is module and not (left.name and takes_over):
        return left
    why = why_unfit(module)
    if why is not None:
        host.skipped[type(module).__qualname__] = why
        return None
    below = [found for part in module.modules() if (found := router_of(part)) is not None]
    # CLIPModel(config) makes its towers by _from_config, and each of them was caught.
    if is_transformers_model(module) and not _inside_routed(host, module):
        takes_over |= all(found.name or found.source in _LOADED for found in below)
    if not takes_over and any(not found.name for found in below):
        return None
    if not takes_over and _inside_routed(host, module):
        return None
    if not takes_over:
        below = []  # parts of a root elsewhere, which shares modules with this one
    for part in below:
        part.remove()
    router = Router(module, host, source)
    vars(module)[SLOT] = router
    host.adopt(router)
    router.place_inner()
    return router


def _inside_routed(host: RouterHost, module: Any) -> bool:
    for router in host.routers():
        root = router.module_ref()
        if root is not None and any(part is module for part in root.modules()):
            return True
    return False
