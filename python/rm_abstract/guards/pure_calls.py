"""Which C functions have no effect but their result.

User code may call these while a forward is watched; any other C function counts as an effect. Code
of libraries may call everything except what writes outside of the process.
"""

from __future__ import annotations

import functools
import re
import types
from typing import Any

import torch

# Builtins that are seen or heard elsewhere, or that run code nobody looked at.
_OUTSIDE = {
    "print": "prints",
    "open": "opens a file",
    "input": "asks for input",
    "exec": "runs generated code",
    "eval": "runs generated code",
    "compile": "compiles code",
    "breakpoint": "stops in a debugger",
}
_CLOCKS = frozenset({"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic"})
_PURE_MODULES = frozenset(
    {"builtins", "math", "cmath", "_operator", "itertools", "_functools", "_collections"}
    | {"_bisect", "_heapq", "_struct", "_abc", "_weakref", "_typing", "_statistics", "_sre"}
    | {"_stat", "_string", "collections", "functools", "operator"}
)
# Methods of these change nothing but the object, which is local, an argument or watched.
_PURE_OWNERS: tuple[type, ...] = (
    *(str, bytes, bytearray, int, float, complex, bool, list, tuple, dict, set, frozenset),
    *(range, slice, type(None), re.Pattern, re.Match, types.MappingProxyType),
)
_PURE_OWNER_MODULES = frozenset({"collections", "decimal", "datetime", "_thread"})
_WRITING_MODULES = frozenset(
    {"posix", "nt", "_socket", "_posixsubprocess", "_queue", "fcntl", "mmap", "signal", "_ssl"}
    | {"_sqlite3", "select", "_multiprocessing", "_ctypes"}
)
_ASKS_THE_SYSTEM = frozenset(
    {"fspath", "stat", "lstat", "getpid", "getcwd", "cpu_count", "listdir", "scandir", "access"}
    | {"get_terminal_size", "sched_getaffinity", "getppid", "isatty", "fstat", "readlink"}
)
_NUMPY_WRITES = frozenset({"tofile", "dump", "seterr"})


def effect_of(function: Any) -> str:
    """What a C function that user code calls may do besides giving its result; empty: nothing."""
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None) or ""
    if known := _known_effect(name, module):
        return known
    if module in _PURE_MODULES or _is_torch(function, module):
        return ""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, (type, types.ModuleType)) or owner is None:
        owner_kind = owner if isinstance(owner, type) else getattr(function, "__objclass__", None)
    else:
        owner_kind = type(owner)
    if isinstance(owner_kind, type):
        if issubclass(owner_kind, _PURE_OWNERS):
            return ""
        package = owner_kind.__module__ or ""
        if package.split(".")[0] == "numpy" and "random" not in package:
            return "" if name not in _NUMPY_WRITES else f"calls {name} of a NumPy array"
        if package in _PURE_OWNER_MODULES or package == "builtins":
            return ""
    if module.split(".")[0] == "numpy" and "random" not in module and name not in _NUMPY_WRITES:
        return ""
    return f"calls {_full_name(function, module)}, which may have effects"


def effect_of_library(function: Any) -> str:
    """The same for a C function that a library calls on the user's behalf."""
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None) or ""
    owner = type(getattr(function, "__self__", None)).__module__
    if module in _WRITING_MODULES and name not in _ASKS_THE_SYSTEM:
        return f"calls {module}.{name}"
    if owner in ("_io", "_queue", "_socket", "_random") and name not in ("getstate", "tell"):
        return f"calls {name} of a {type(function.__self__).__name__}"
    if module in ("_io", "io") and name == "open":
        return "opens a file"
    if isinstance(getattr(function, "__self__", None), torch.Generator):
        return f"calls {name} of a random generator"
    return "warns" if module == "_warnings" and name == "warn" else ""


def _known_effect(name: str, module: str) -> str:
    if module in ("builtins", "io", "_io") and name in _OUTSIDE:
        return _OUTSIDE[name]
    if module == "_warnings" and name == "warn":
        return "warns"
    if module == "time" and name in _CLOCKS:
        return "reads the clock"
    return "sleeps" if module == "time" and name == "sleep" else ""


def _is_torch(function: Any, module: str) -> bool:
    if module.split(".")[0] == "torch":
        return True
    owner = getattr(function, "__self__", None)
    if owner is None:
        owner = getattr(function, "__objclass__", None)
    if isinstance(owner, torch.Generator):
        return False
    kind: Any = owner if isinstance(owner, type) else type(owner)
    if isinstance(owner, types.ModuleType):
        return owner.__name__.split(".")[0] == "torch"
    return issubclass(kind, torch.Tensor) or _torch_class(kind)


@functools.lru_cache(maxsize=1024)
def _torch_class(kind: Any) -> bool:
    return any((base.__module__ or "").split(".")[0] == "torch" for base in kind.__mro__)


def _full_name(function: Any, module: str) -> str:
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", "a C function")
    return f"{module}.{name}" if module else str(name)
