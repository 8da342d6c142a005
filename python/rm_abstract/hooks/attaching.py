"""Which modules are routed, and how. Never inside or around a root that is routed already.

The exception: a transformers model or an explicit ``accelerate`` takes over from routed parts below
it, because the larger program is the one the user calls.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rm_abstract.hooks.host import RouterHost

if TYPE_CHECKING:
    from rm_abstract.hooks.router import Router

_TAKES_OVER = ("from_pretrained", "_from_config", "accelerate")


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
    if existing is not None and existing.session is host:
        return existing
    left: Router | None = host.detached.get(id(module))
    if left is not None and left.module_ref() is module:
        return left
    why = _unfit(module, nn)
    if why is not None:
        host.skipped[type(module).__qualname__] = why
        return None
    below = [found for part in module.modules() if (found := router_of(part)) is not None]
    if below and source not in _TAKES_OVER:
        return None
    if source not in _TAKES_OVER and _inside_routed(host, module):
        return None
    for part in below:
        part.remove()
    router = Router(module, host, source)
    vars(module)[SLOT] = router
    host.adopt(router)
    return router


def _unfit(module: Any, nn: Any) -> tuple[str, str] | None:
    from rm_abstract.hooks.host import SLOT
    from rm_abstract.hooks.router import Router

    if type(module).__hash__ is None:
        why = "the class compares by value and has no hash: torch cannot list its parts; "
        return "RM113", why + "with @dataclass(eq=False) it is compiled"
    slot = vars(module).get(SLOT)
    if slot is not None and not isinstance(slot, Router):
        return "RM109", "the module was compiled by the user"
    script = sys.modules.get("torch.jit")
    if script is not None and isinstance(module, script.ScriptModule):
        return "RM109", "a TorchScript module: it was compiled by the user"
    if type(module).__call__ is not nn.Module.__call__:
        return (
            "RM113",
            "the class has a __call__ of its own: calls do not reach the router",
        )
    if next(module.parameters(), None) is None:
        return "RM113", "no parameters"
    return None


def _inside_routed(host: RouterHost, module: Any) -> bool:
    for router in host.routers():
        root = router.module_ref()
        if root is not None and any(part is module for part in root.modules()):
            return True
    return False
