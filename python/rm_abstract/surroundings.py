"""What a forward reads and writes besides its arguments, its tensors and its modules' plain
attributes: containers and objects held in attributes, class attributes, and the globals and
captured variables of the user's own code.

One walk serves three: the router's guard (has any of it changed since the capture?), the watch over
the first call (does forward change any of it?), and the identity of a cached capture. Installed
packages' code is not looked into, their instances' attributes are. Nothing here runs user code.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CODE = (types.FunctionType, types.BuiltinFunctionType, type)
# nn.Module's own dictionaries, which the guard watches itself, and what no forward computes from.
IGNORED = frozenset(
    {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
    | {"_non_persistent_buffers_set", "_compiled_call_impl", "_backward_hooks"}
    | {"_backward_pre_hooks", "_is_full_backward_hook", "_forward_hooks_with_kwargs"}
    | {"_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks"}
    | {"_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
    | {"generation_config", "training", "forward", "warnings_issued", "model_tags"}
    | {"hf_device_map", "all_tied_weights_keys", "_tp_plan", "_pp_plan", "_ep_plan"}
)
_LIBRARIES = frozenset({"torch", "transformers", "builtins", "typing", "abc", "collections"})
# Objects whose insides change by themselves and decide nothing.
_OPAQUE = frozenset(
    {"torch", "numpy", "logging", "threading", "_thread", "re", "tokenizers", "rm_abstract"}
    | {"sentencepiece", "asyncio", "queue", "multiprocessing", "concurrent", "io", "weakref"}
    | {"tqdm", "contextvars", "random", "inspect", "importlib", "pathlib", "_io"}
)
_MAX_HOLDERS = 4096


@dataclass
class Surroundings:
    """Every holder once. The dict of a row is None where it is the root module's own __dict__."""

    dicts: list[tuple[dict[Any, Any] | None, tuple[Any, ...] | None, str]] = field(
        default_factory=list
    )  # names None: every entry, and no others
    lists: list[tuple[Any, str]] = field(default_factory=list)
    cells: list[tuple[types.CellType, str]] = field(default_factory=list)
    classes: list[tuple[type, tuple[str, ...]]] = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, str]] = field(default_factory=list)

    def rows(self) -> tuple[Any, ...]:
        """For the guard of bindings/router_guard.cpp."""
        return (self.dicts, self.lists, self.cells, self.classes, self.tensors)


def of_module(module: torch.nn.Module, attributes: bool = True) -> Surroundings:
    """What lies around a module tree, with or without what its modules' attributes hold."""
    walk = _Walk(module)
    walk.run(attributes)
    return walk.found


def of_values(values: Iterable[tuple[str, Any]]) -> Surroundings:
    """The containers and objects among named values, an argument list for example."""
    walk = _Walk(None)
    for where, value in values:
        walk.visit(value, where)
    return walk.found


class _Walk:
    def __init__(self, root: torch.nn.Module | None) -> None:
        self.found = Surroundings()
        self._root = root
        self._seen: set[int] = set()
        self._functions: set[int] = set()
        self._classes: set[type] = set()
        self._named: dict[int, tuple[Any, list[Any], str]] = {}
        self._pending: list[tuple[Any, str]] = []

    def run(self, attributes: bool) -> None:
        root = self._root
        assert root is not None
        parts = list(root.named_modules())
        for _, part in parts:
            self._seen.add(id(part))
            for group in (part._parameters, part._buffers):
                self._seen.update(id(t) for t in group.values() if t is not None)
            self._seen.update(id(v) for v in vars(part).values() if isinstance(v, torch.Tensor))
        for path, part in parts:
            names = []
            for name, value in vars(part).items() if attributes else ():
                if name in IGNORED or isinstance(value, (SIMPLE, torch.Tensor, _CODE)):
                    continue  # the guard compares these itself
                if self.visit(value, f"{path}.{name}" if path else name):
                    names.append(name)
            if names:
                own = None if part is root else vars(part)
                self.found.dicts.append((own, tuple(names), path))
            self._class_of(type(part))
        self._drain()
        for owner, names, where in self._named.values():
            self.found.dicts.append((owner, tuple(names), where))

    def visit(self, value: Any, where: str) -> bool:
        """Adds what lies below; False where a change of this value says nothing."""
        self._drain()
        known = self._visit(value, where)
        self._drain()
        return known

    def _drain(self) -> None:
        while self._pending:
            self._visit(*self._pending.pop())

    def _visit(self, value: Any, where: str) -> bool:
        if isinstance(value, SIMPLE):
            return True
        if isinstance(value, types.FunctionType):
            self._function(value)
            return True
        if id(value) in self._seen:
            return True
        found = self.found
        if isinstance(value, torch.Tensor):
            self._seen.add(id(value))
            found.tensors.append((value, where))
            return True
        if len(found.dicts) + len(found.lists) >= _MAX_HOLDERS:
            return True
        if isinstance(value, (list, tuple, deque)):
            self._seen.add(id(value))
            if not isinstance(value, tuple):
                found.lists.append((value, where))
            self._pending += [(v, f"{where}[{i}]") for i, v in enumerate(value)]
            return True
        if isinstance(value, dict):
            self._seen.add(id(value))
            found.dicts.append((value, None, where))
            self._pending += [(v, f"{where}[{k!r}]") for k, v in value.items()]
            return True
        if isinstance(value, torch.nn.Module):
            self._foreign_module(value, where)
            return True
        if isinstance(value, types.MethodType):
            return self._visit(value.__func__, where)
        if isinstance(value, functools.partial):
            self._pending += [(value.func, where), (value.args, where), (value.keywords, where)]
            return True
        if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
            return True
        return self._object(value, where)

    def _object(self, value: Any, where: str) -> bool:
        kind = type(value)
        top = (kind.__module__ or "").split(".")[0]
        config = hasattr(kind, "to_diff_dict")
        if top in _OPAQUE or (top == "transformers" and not config):
            return False
        try:
            inside = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return False
        if type(inside) is not dict:
            return False
        self._seen.add(id(value))
        names = [k for k, v in inside.items() if v is not self._root]
        whole = None if len(names) == len(inside) and not config else tuple(names)
        self.found.dicts.append((inside, whole, where))
        self._pending += [(inside[k], f"{where}.{k}") for k in names]
        if top not in _LIBRARIES:
            self._class_of(kind)
        return True

    def _foreign_module(self, module: torch.nn.Module, where: str) -> None:
        """A module that is no part of the tree: its weights are constants of the capture."""
        for path, part in module.named_modules():
            if id(part) in self._seen:
                continue
            self._seen.add(id(part))
            place = f"{where}.{path}" if path else where
            for group in (part._parameters, part._buffers, part._modules):
                self.found.dicts.append((group, None, place))
            for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
                if tensor is not None:
                    self._pending.append((tensor, f"{place}.{name}"))
            own = [n for n in vars(part) if n not in IGNORED]
            self.found.dicts.append((vars(part), (*own, "training"), place))
            self._pending += [(vars(part)[n], f"{place}.{n}") for n in own]
            self._class_of(type(part))

    def _class_of(self, kind: type) -> None:
        """Class attributes, and what the methods of the user's own classes read."""
        for base in kind.__mro__:
            if base in self._classes or (base.__module__ or "").split(".")[0] in _LIBRARIES:
                continue
            self._classes.add(base)
            own = is_own(getattr(sys.modules.get(base.__module__), "__file__", None))
            names = []
            for name, value in list(vars(base).items()):
                function = _function_of(value)
                if name.startswith("__") and function is None:
                    continue
                if function is not None:
                    if own:
                        self._function(function)
                elif isinstance(value, (*SIMPLE, torch.Tensor, list, tuple, dict)):
                    names.append(name)
                    self._pending.append((value, f"{base.__qualname__}.{name}"))
            if names:
                self.found.classes.append((base, tuple(names)))

    def _function(self, function: types.FunctionType) -> None:
        """Globals, captured variables and defaults of the user's own functions."""
        if id(function) in self._functions:
            return
        self._functions.add(id(function))
        code = function.__code__
        if not is_own(code.co_filename):
            return
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if name == "__class__" or id(cell) in self._seen:
                continue
            self._seen.add(id(cell))
            try:
                held = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self.found.cells.append((cell, name))
            self._value(held, name)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value(value, f"{function.__qualname__}'s default")
        space = function.__globals__
        for name, attribute in reads_of(code):
            if name not in space:
                continue
            value = space[name]
            if not isinstance(value, types.ModuleType):
                self._remember(space, name, function.__module__ or "")
                self._value(value, name)
            elif (
                attribute
                and value.__name__ not in sys.builtin_module_names
                and is_own(getattr(value, "__file__", None))
            ):
                inside = vars(value)
                if attribute in inside:
                    self._remember(inside, attribute, name)
                    self._value(inside[attribute], f"{name}.{attribute}")

    def _value(self, value: Any, where: str) -> None:
        if isinstance(value, type):
            if is_own(getattr(sys.modules.get(value.__module__), "__file__", None)):
                self._class_of(value)
        elif value is not self._root:
            self._pending.append((value, where))

    def _remember(self, space: dict[str, Any], name: str, where: str) -> None:
        """A name of a namespace: watched where its value decides something."""
        value = space[name]
        if isinstance(value, torch.nn.Module) and id(value) in self._seen:
            return
        row = self._named.setdefault(id(space), (space, [], where))
        if name not in row[1]:
            row[1].append(name)


def _function_of(value: Any) -> types.FunctionType | None:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    return value if isinstance(value, types.FunctionType) else None


@functools.lru_cache(maxsize=4096)
def reads_of(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    """The globals a function reads: (name, the attribute read of it or empty), in order."""
    found: dict[tuple[str, str], None] = {}
    last = ""
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            last = str(instruction.argval)
            found[(last, "")] = None
            continue
        if last and name in ("LOAD_ATTR", "LOAD_METHOD"):
            found[(last, str(instruction.argval))] = None
        last = last if name in ("CACHE", "EXTENDED_ARG", "PRECALL", "NOP") else ""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(reads_of(constant)))
    return tuple(found)


def installed(file: str) -> bool:
    """Whether a source file belongs to an installed package, whose version stands for it."""
    path = os.path.abspath(file)
    roots = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(__file__))]
    parts = path.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    return any(path.startswith(os.path.abspath(root) + os.sep) for root in roots)


@functools.lru_cache(maxsize=4096)
def is_own(file: str | None) -> bool:
    """Code of the user: a script, a notebook's cell, a module beside it. None: a notebook."""
    return file is None or not (file.startswith("<frozen") or installed(file))


def contents(found: Surroundings) -> Iterator[tuple[str, Any]]:
    """Every watched value with its place."""
    for space, names, where in found.dicts:
        if space is not None:
            for name in space if names is None else names:
                if name in space:
                    yield f"{where}.{name}", space[name]
    for values, where in found.lists:
        yield from ((f"{where}[{i}]", value) for i, value in enumerate(values))
    for cell, where in found.cells:
        try:
            yield where, cell.cell_contents
        except ValueError:
            continue
    for kind, names in found.classes:
        yield from ((f"{kind.__qualname__}.{n}", vars(kind).get(n)) for n in names)
