"""Which engine serves a name. ``auto`` is ``native`` for a device with kernels of ours and
``whole_program`` for one with a compiler of its own; ``torch`` is pass-through (never routed)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rm_abstract.base.errors import ConfigError
from rm_abstract.device import Resolved
from rm_abstract.engines.base import Engine, EngineFactory
from rm_abstract.engines.context import EngineContext

_MODULES = {
    "native": "rm_abstract.engines.native",
    "whole_program": "rm_abstract.engines.whole_program",
    "onnxruntime": "rm_abstract.engines.onnxruntime",
}
_registered: dict[str, EngineFactory] = {}


def register(name: str, factory: EngineFactory) -> None:
    """Adds or replaces an engine; ``factory(module, context)`` makes one for a module."""
    _registered[name] = factory


def unregister(name: str) -> None:
    _registered.pop(name, None)


def names() -> list[str]:
    return sorted({"auto", "torch", "vllm", *_MODULES, *_registered})


def create(name: str, module: Any, context: EngineContext) -> Engine | None:
    """An engine for ``module``; None for ``torch``, which leaves every call to eager."""
    if name in ("auto", "native", "vllm"):  # what vLLM does not do is native's
        name = "native" if has_kernels(context.device) else "whole_program"
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
    return factory(module, context)


def load(name: str) -> None:
    """Imports an engine of ours; for ``auto`` the native one, which most devices are served by."""
    module = _MODULES.get("native" if name in ("auto", "vllm") else name)
    if module is not None and name not in _registered:
        import_module(module)


def has_kernels(device: Resolved) -> bool:
    """True when our compiler plans with the device's kernels."""
    from rm_abstract import _core

    rows = _core.backend.backends()
    return any(row["name"] == device.backend and row["kernels"] for row in rows)


def keeps_states(device: Resolved) -> bool:
    """True for a device that compiles whole programs and keeps tensors between their runs."""
    from rm_abstract import _core

    for row in _core.backend.backends():
        if row["name"] == device.backend and row["devices"] and not row["kernels"]:
            properties = dict(row["devices"][device.index]["properties"])
            return properties.get("states") == "1"
    return False
