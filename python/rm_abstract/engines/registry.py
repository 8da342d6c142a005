"""Which engine serves a name. ``auto`` is ``native`` for a device with kernels of ours and
``whole_program`` for one with a compiler of its own; ``torch`` is pass-through (never routed)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rm_abstract.engines.base import Engine, EngineFactory
from rm_abstract.errors import ConfigError

if TYPE_CHECKING:
    from rm_abstract.session import Session

_MODULES = {
    "native": "rm_abstract.engines.native",
    "whole_program": "rm_abstract.engines.whole_program",
}
_ANNOUNCED = frozenset({"onnxruntime", "vllm"})  # accepted by the options table, not built yet
_registered: dict[str, EngineFactory] = {}


def register(name: str, factory: EngineFactory) -> None:
    """Adds or replaces an engine; ``factory(module, session)`` makes one for a module."""
    _registered[name] = factory


def unregister(name: str) -> None:
    _registered.pop(name, None)


def names() -> list[str]:
    return sorted({"auto", "torch", *_MODULES, *_registered})


def create(name: str, module: Any, session: Session) -> Engine | None:
    """An engine for ``module``; None for ``torch``, which leaves every call to eager."""
    if name in _ANNOUNCED and name not in _registered:
        name = "auto"  # as init() warned
    if name in ("auto", "native"):
        name = "native" if has_kernels(session) else "whole_program"
    if name == "torch":
        return None
    factory = _registered.get(name)
    if factory is None and name in _MODULES:
        factory = import_module(_MODULES[name]).create_engine
    if factory is None:
        raise ConfigError(
            f"[inference_engine] expected one of {', '.join(names())}, got {name!r}; "
            f"try inference_engine='auto'"
        )
    return factory(module, session)


def has_kernels(session: Session) -> bool:
    """True when our compiler plans with the device's kernels."""
    from rm_abstract import _core

    name = session.resolved.backend
    return any(row["name"] == name and row["kernels"] for row in _core.backend.backends())


def keeps_states(session: Session) -> bool:
    """True for a device that compiles whole programs and keeps tensors between their runs."""
    from rm_abstract import _core

    resolved = session.resolved
    for row in _core.backend.backends():
        if row["name"] == resolved.backend and row["devices"] and not row["kernels"]:
            properties = dict(row["devices"][resolved.index]["properties"])
            return properties.get("states") == "1"
    return False
