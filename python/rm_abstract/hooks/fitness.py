"""Which modules can have a router at all, as their class and their slot tell."""

from __future__ import annotations

import sys
from typing import Any

from rm_abstract.hooks.host import SLOT
from rm_abstract.hooks.slot import is_ours


def why_unfit(module: Any) -> tuple[str, str] | None:
    """(code, why) where a router must not or cannot sit in the module's slot."""
    from torch import nn  # the session imports this file, and init() imports no torch

    if type(module).__hash__ is None:
        why = "the class compares by value and has no hash: torch cannot list its parts; "
        return "RM113", why + "with @dataclass(eq=False) it is compiled"
    slot = vars(module).get(SLOT)
    if slot is not None and not is_ours(slot):
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
