"""Which code belongs to an installed package, whose version stands for it, and which to the user.

Only the place of a file decides: the standard library, a site-packages or dist-packages folder, or
this package. A project below `sys.prefix` (a virtual environment made inside it) is the user's.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
from typing import Any

_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})


@functools.lru_cache(maxsize=1)
def _roots() -> tuple[str, ...]:
    library = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = {os.path.abspath(path) for path in (*library, own) if path}
    return tuple(path + os.sep for path in sorted(paths | {os.path.realpath(p) for p in paths}))


@functools.lru_cache(maxsize=8192)
def installed(file: str) -> bool:
    """Whether a source file belongs to an installed package."""
    if file.startswith("<frozen"):
        return True
    path = os.path.abspath(file)
    return not _PACKAGE_FOLDERS.isdisjoint(path.split(os.sep)) or path.startswith(_roots())


def is_user_file(file: str | None) -> bool:
    """Code of the user: a script, a notebook's cell (no file), a module beside the script."""
    return file is None or not installed(file)


def is_user_code(function: types.FunctionType) -> bool:
    """Whether the user wrote a function. Generated code counts as its module's."""
    file = function.__code__.co_filename
    if file.startswith("<") and not file.startswith("<frozen"):
        return is_user_file(function.__globals__.get("__file__"))
    return is_user_file(file)


def namespace_of(kind: type) -> dict[str, Any]:
    """The namespace in which a class was made; empty when its module is gone."""
    module = sys.modules.get(kind.__module__)
    if kind.__module__ == "__main__":
        # Who runs a script (`python -m cProfile`) may do it beside the module of that name.
        for value in vars(kind).values():
            if isinstance(value, types.FunctionType):
                inside = value.__globals__
                if inside.get("__name__") == "__main__":
                    return inside
    return {} if module is None else vars(module)


def is_user_class(kind: type) -> bool:
    """Whether the user wrote a class."""
    if kind.__module__ == "builtins" or not _is_heap_type(kind):
        return False
    if kind.__module__ == "__main__" and (inside := namespace_of(kind)):
        return is_user_file(inside.get("__file__"))
    module = sys.modules.get(kind.__module__)
    if module is None:  # a type of generated C code, or a class made by hand
        methods = [v for v in vars(kind).values() if isinstance(v, types.FunctionType)]
        return any(map(is_user_code, methods))
    file = getattr(module, "__file__", None)
    if file is None and _is_builtin(module):
        return False
    return is_user_file(file)


def _is_builtin(module: types.ModuleType) -> bool:
    """Compiled into the interpreter or made by an extension module: no file of the user's."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    top = module.__name__.split(".")[0]
    parent = getattr(sys.modules.get(top), "__file__", None)
    return origin in ("built-in", "frozen") or (parent is not None and installed(parent))


def _is_heap_type(kind: type) -> bool:
    return bool(kind.__flags__ & (1 << 9))
