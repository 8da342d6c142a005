"""Runs unmodified PyTorch and Transformers scripts compiled, cached and checked on the best device.

    import rm_abstract
    rm_abstract.init()

Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rm_abstract._version import __version__
from rm_abstract.api import (
    accelerate,
    backends,
    compile,
    compile_loss,
    compile_parallel_step,
    compile_step,
    compile_trainer,
    current_device,
    devices,
    disabled,
    explain,
    get_device_info,
    init,
    is_initialized,
    patches,
    profile,
    shutdown,
    switch_device,
)
from rm_abstract.base.errors import (
    CacheError,
    CompileError,
    ConfigError,
    DeviceUnavailableError,
    Error,
    ExecutionError,
    ParityError,
    PluginError,
    RoutingWarning,
)
from rm_abstract.base.headers import include_dir

if TYPE_CHECKING:
    import rm_abstract.cache as cache
    import rm_abstract.functional as functional
    import rm_abstract.memory as memory
    import rm_abstract.nn as nn
    import rm_abstract.onnx as onnx
    import rm_abstract.optim as optim
    from rm_abstract.executable import Executable
    from rm_abstract.framework.random import manual_seed
    from rm_abstract.framework.recording import record
    from rm_abstract.framework.tensor import Tensor, no_grad, use_backend
    from rm_abstract.report import Report
    from rm_abstract.session import Session

__all__ = [
    "CacheError",
    "CompileError",
    "ConfigError",
    "DeviceUnavailableError",
    "Error",
    "Executable",
    "ExecutionError",
    "ParityError",
    "PluginError",
    "Report",
    "RoutingWarning",
    "Session",
    "Tensor",
    "__version__",
    "accelerate",
    "backends",
    "cache",
    "compile",
    "compile_loss",
    "compile_parallel_step",
    "compile_step",
    "compile_trainer",
    "current_device",
    "devices",
    "disabled",
    "explain",
    "functional",
    "get_device_info",
    "include_dir",
    "init",
    "is_initialized",
    "manual_seed",
    "memory",
    "nn",
    "no_grad",
    "onnx",
    "optim",
    "patches",
    "profile",
    "record",
    "shutdown",
    "switch_device",
    "use_backend",
]

_LAZY = {
    "cache": ("rm_abstract.cache", None),
    "memory": ("rm_abstract.memory", None),
    "Profile": ("rm_abstract.profiling", "Profile"),
    "Executable": ("rm_abstract.executable", "Executable"),
    "Report": ("rm_abstract.report", "Report"),
    "Session": ("rm_abstract.session", "Session"),
    "Tensor": ("rm_abstract.framework.tensor", "Tensor"),
    "functional": ("rm_abstract.functional", None),
    "manual_seed": ("rm_abstract.framework.random", "manual_seed"),
    "nn": ("rm_abstract.nn", None),
    "no_grad": ("rm_abstract.framework.tensor", "no_grad"),
    "onnx": ("rm_abstract.onnx", None),
    "optim": ("rm_abstract.optim", None),
    "record": ("rm_abstract.framework.recording", "record"),
    "use_backend": ("rm_abstract.framework.tensor", "use_backend"),
    "load_ipython_extension": ("rm_abstract.doors.ipython", "load_ipython_extension"),
    "unload_ipython_extension": ("rm_abstract.doors.ipython", "unload_ipython_extension"),
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    loaded = import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def __dir__() -> list[str]:
    return sorted(__all__)
