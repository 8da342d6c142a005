"""Code that a capture runs and that the files of its classes do not show: functions from elsewhere.

A script or a kernel library may put its own function into a class, a module or torch.nn.functional
(`BertLayer.forward = mine`). Every function found where its file is not the owner's is listed by
file and line, and its file joins the digested sources; what cannot be named that way is Unstable.
"""

from __future__ import annotations

import functools
import hashlib
import os
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from rm_abstract.guards.packages import namespace_of
from rm_abstract.guards.registered import table_of

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_TORCH_ROOT = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# What Python functions are found in.
_METHODS = (staticmethod, classmethod, types.MethodType)
_HOLDERS = (
    *(types.FunctionType, *_METHODS, property),
    *(functools.partial, functools.cached_property),
)

Installed = Callable[[str], bool]


class Unstable(Exception):
    """Something has no stable description; the message says what."""


def replaced_code(kinds: set[type], files: set[str], installed: Installed) -> list[Any]:
    """Rows that change whenever other code would run. Adds to `files`. Raises Unstable."""
    finder = _Finder(files, installed)
    owners: dict[str, Mapping[str, Any]] = {}
    for base in sorted({b for kind in kinds for b in kind.__mro__}, key=_name_of):
        inside = namespace_of(base)
        if base is object or not inside:
            continue
        name = str(inside.get("__name__", ""))
        finder.namespace(_name_of(base), vars(base), _home(name, inside))
        if not _is_torch(name):
            owners[name] = inside
    for name, values in sorted(owners.items()):
        finder.namespace(name, values, _home(name, values))
        finder.registries(name, values)
    for where in (torch.nn.functional, torch, torch.Tensor):
        finder.namespace(where.__name__, vars(where), _TORCH_ROOT)
    return finder.rows


class _Finder:
    def __init__(self, files: set[str], installed: Installed) -> None:
        self.rows: list[Any] = []
        self._files = files
        self._known: dict[int, list[Any]] = {}  # the functions live as long as what holds them
        self._seen_files: dict[str, tuple[bool, bool]] = {}
        self._installed = installed

    def namespace(self, owner: str, values: Mapping[str, Any], home: str) -> None:
        """Functions among `values` that do not lie in `home`, a file or (ending in /) a folder."""
        inside: dict[str, bool] = {}  # by file: a namespace has thousands of functions of a few
        found = []
        for name, value in values.items():
            for function in _functions(value) if isinstance(value, _HOLDERS) else ():
                file = function.__code__.co_filename
                if file not in inside:
                    inside[file] = _lies_in(file, home)
                if not inside[file]:
                    found.append((name, function))
        for name, function in sorted(found, key=lambda pair: pair[0]):
            self.rows.append([owner, name, self._describe(function)])

    def registries(self, owner: str, values: Mapping[str, Any]) -> None:
        """Tables of functions that modules look things up in, such as attention by name."""
        for name, value in sorted(values.items()):
            for key, item in table_of(value):
                for function in _functions(item):
                    self.rows.append([owner, name, key, self._describe(function)])

    def _describe(self, function: types.FunctionType) -> Any:
        if id(function) in self._known:  # it calls itself, or is found in several places
            return self._known[id(function)]
        code = function.__code__
        file = code.co_filename
        exists, trusted = self._facts(file)
        if exists:
            row: list[Any] = [os.path.basename(file), code.co_name, code.co_firstlineno]
        else:  # made by exec or typed in
            row = [file, code.co_name, code_digest(code)]
        self._known[id(function)] = row[:3]
        held = _cells(function)
        if trusted:  # a decorator of a library: what it wraps says more than what it remembers
            held = [value for value in held if isinstance(value, types.FunctionType)]
        else:
            held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return row + [self._captured(value, function) for value in held]

    def _facts(self, file: str) -> tuple[bool, bool]:
        """Whether it exists, and whether it is installed; one that no version names is digested."""
        found = self._seen_files.get(file)
        if found is None:
            exists = os.path.isfile(file)
            trusted = _lies_in(file, _TORCH_ROOT) or self._installed(file)
            if exists and not self._has_version(file):
                self._files.add(file)
            found = self._seen_files[file] = (exists, trusted)
        return found

    def _captured(self, value: Any, function: types.FunctionType) -> Any:
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, types.FunctionType):
            return self._describe(value)
        if isinstance(value, types.BuiltinFunctionType):
            return [str(value.__module__), value.__qualname__]
        if isinstance(value, type):
            return [value.__module__, value.__qualname__]
        raise Unstable(f"{function.__qualname__} was replaced and holds a {type(value).__name__}")

    def _has_version(self, file: str) -> bool:
        """Whether the versions in the identity stand for this file's content."""
        parts = os.path.abspath(file).split(os.sep)
        if "site-packages" not in parts:
            return self._installed(file) and "rm_abstract" not in parts  # Python's own library
        package = parts[len(parts) - parts[::-1].index("site-packages")]
        return package in ("torch", "transformers", "huggingface_hub")


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions an attribute consists of."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, _METHODS):
        yield from _functions(value.__func__)
    elif isinstance(value, property):
        yield from _functions(value.fget)
    elif isinstance(value, functools.partial):
        yield from _functions(value.func)
    elif isinstance(value, functools.cached_property):
        yield from _functions(value.func)


def _cells(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return found


def code_digest(code: types.CodeType) -> str:
    parts = [code.co_code.hex(), repr(code.co_names), repr(code.co_varnames)]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            parts.append(code_digest(constant))
        elif isinstance(constant, frozenset):
            parts.append(repr(sorted(map(repr, constant))))
        else:
            parts.append(repr(constant))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


def _home(module: str, inside: Mapping[str, Any]) -> str:
    return _TORCH_ROOT if _is_torch(module) else str(inside.get("__file__") or "")


def _lies_in(file: str, home: str) -> bool:
    return file == home or (home.endswith(os.sep) and file.startswith(home))
