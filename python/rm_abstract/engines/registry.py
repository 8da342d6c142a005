"""Which engine serves a name. ``auto`` is ``native`` for a device with kernels of ours and
``whole_program`` for one with a compiler of its own; ``torch`` is pass-through (never routed)."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

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


class _Facts(NamedTuple):
    """What a device is, as long as the process lives."""

    kernels: bool
    states: bool


_facts: dict[tuple[str, int], _Facts] = {}


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
    facts = _facts_of(device)
    return facts is not None and facts.kernels


def keeps_states(device: Resolved) -> bool:
    """True for a device that compiles whole programs and keeps tensors between their runs."""
    facts = _facts_of(device)
    return facts is not None and facts.states


def _facts_of(device: Resolved) -> _Facts | None:
    """None for a device whose backend is not loaded. Asked once a device: the list looks for the
    devices of every backend, milliseconds a call of ``generate``; backends are never unloaded."""
    from rm_abstract import _core

    key = (device.backend, device.index)
    if key not in _facts:
        rows = _core.backend.backends()
        row = next((row for row in rows if row["name"] == device.backend), None)
        if row is None or device.index >= len(row["devices"]):
            return None
        properties = dict(row["devices"][device.index]["properties"])
        kernels = bool(row["kernels"])
        _facts[key] = _Facts(kernels, not kernels and properties.get("states") == "1")
    return _facts[key]
