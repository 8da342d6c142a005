"""Which modules are armed, and how. Never inside or around a root that is armed already.

The exception: a transformers model or an explicit ``accelerate`` takes over from armed parts below
it, because the larger program is the one the user calls.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rm_abstract.hooks.router import ArmedModel
    from rm_abstract.session import Session

_TAKES_OVER = ("from_pretrained", "_from_config", "accelerate")


def armed_of(module: Any) -> ArmedModel | None:
    """The router in this module's own slot, if it is ours and meant for it."""
    from rm_abstract.hooks.router import SLOT, ArmedModel

    slot = vars(module).get(SLOT)
    if isinstance(slot, ArmedModel) and slot.module_ref() is module:
        return slot
    return None


def arm(session: Session, module: Any, source: str) -> ArmedModel | None:
    """See Session.arm."""
    from torch import nn

    from rm_abstract.hooks.router import SLOT, ArmedModel

    if session.settings.flag("disable"):
        return None
    if not isinstance(module, nn.Module):
        session.skipped[type(module).__qualname__] = ("RM104", "not an nn.Module")
        return None
    existing = armed_of(module)
    if existing is not None and existing.session is session:
        return existing
    if module in session.aside:
        return session.aside[module]
    why = _unfit(module, nn)
    if why is not None:
        session.skipped[type(module).__qualname__] = why
        return None
    below = [found for part in module.modules() if (found := armed_of(part)) is not None]
    if below and source not in _TAKES_OVER:
        return None
    if source not in _TAKES_OVER and _inside_armed(session, module):
        return None
    for part in below:
        part.disarm()
    armed = ArmedModel(module, session, source)
    vars(module)[SLOT] = armed
    session.adopt(armed)
    return armed


def _unfit(module: Any, nn: Any) -> tuple[str, str] | None:
    from rm_abstract.hooks.router import SLOT, ArmedModel

    slot = vars(module).get(SLOT)
    if slot is not None and not isinstance(slot, ArmedModel):
        return "RM109", "the module was compiled by the user"
    script = sys.modules.get("torch.jit")
    if script is not None and isinstance(module, script.ScriptModule):
        return "RM109", "a TorchScript module: it was compiled by the user"
    if type(module).__call__ is not nn.Module.__call__:
        return "RM109", "the class has a __call__ of its own: calls are not intercepted"
    if next(module.parameters(), None) is None:
        return "RM104", "no parameters"
    return None


def _inside_armed(session: Session, module: Any) -> bool:
    for armed in session.armed():
        root = armed.module_ref()
        if root is not None and any(part is module for part in root.modules()):
            return True
    return False
