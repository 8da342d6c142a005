"""Libraries that call `model.forward` themselves, past `nn.Module.__call__` and so past our slot.

Invariant: such a call is offered to the router only where it would have been the same as a call of
the module; with any hook present, which `forward` alone would not have run, it stays direct.
"""

from __future__ import annotations

import functools
from typing import Any

from rm_abstract.hooks.attaching import router_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _View:
    """An object as another sees it: every attribute is the original's, but for a few names."""

    def __init__(self, original: Any, **instead: Any) -> None:
        vars(self).update(instead, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)


def routed_forward(model: Any) -> Any:
    """The router of a routed model, where calling it means what `forward` means; or None."""
    from torch.nn.modules.module import _has_any_global_hook

    router = router_of(model)
    if router is None or any(getattr(model, name) for name in _HOOKS):
        return None
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return None
    return router


def transformer_forward(original: Any) -> Any:
    """`Transformer.forward` of sentence-transformers >= 6, which looks up `self.model.forward`."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        routed = routed_forward(self.model)
        if routed is None:
            return original(self, *args, **kwargs)
        return original(_View(self, model=_View(self.model, forward=routed)), *args, **kwargs)

    return forward
