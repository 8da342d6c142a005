"""What a search for sources found: what the guard, the effect check and the identity read."""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]
import abc
import functools
import sys
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from rm_abstract.guards.kinds import is_a
from rm_abstract.guards.packages import is_user_class, is_user_file

# What every nn.Module has: the guard compares registries itself, and the rest is bookkeeping.
# `call_super_init` is read by the constructor of modules alone.
BOOKKEEPING = frozenset(vars(torch.nn.Module())) | {"_compiled_call_impl", "call_super_init"}

Place = str
_PARTIAL_CALLS = (functools.partial, functools.partialmethod)
# Of modules: `training`; of weights: `requires_grad`, `grad`.
Asked = tuple[bool, bool, bool]


@dataclass
class Sources:
    """Every source once. The first fields, in this order, are the guard's input (C++)."""

    names: frozenset[str] = frozenset()  # all that reached code may use as an attribute's name
    every: bool = False  # it may read any attribute
    # The dict is None where it is the root module's own __dict__ (holding it would be a cycle).
    # Names: some entries, those that are missing too; None: all; True: those among `names`.
    dicts: list[tuple[dict[Any, Any] | None, tuple[Any, ...] | bool | None, Place]] = field(
        default_factory=list
    )
    held: list[tuple[Any, Place]] = field(default_factory=list)  # lists, deques, sets, cells
    objects: list[tuple[Any, tuple[str, ...], Place]] = field(default_factory=list)  # their slots
    arrays: list[tuple[Any, Place]] = field(default_factory=list)  # NumPy's
    classes: list[type] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, Place]] = field(default_factory=list)
    asked: Asked = (False, False, False)
    abstract: list[type] = field(default_factory=list)  # classes that others register with
    # Not for the guard:
    unseen: list[str] = field(default_factory=list)  # what may be read and cannot be watched
    user_code: bool = False  # a reached function or class is no installed package's
    user_functions: list[types.FunctionType] = field(default_factory=list)

    def rows(self) -> tuple[Any, ...]:
        """For the guard of src/router."""
        return (
            *(self.names, self.every, self.dicts, self.held, self.objects, self.arrays),
            *(self.classes, self.functions, self.tensors),
            *(self.asked, (registered_with, tuple(self.abstract))),
        )

    def may_read(self, name: Any) -> bool:
        return self.every or name in self.names


def is_user_module(module: types.ModuleType) -> bool:
    if module.__name__ in sys.builtin_module_names:
        return False
    return is_user_file(getattr(module, "__file__", None))


def registered_with(kinds: tuple[type, ...]) -> dict[Any, Any]:
    """What `register` gave to abstract classes, to those made from them and to those given: whom
    isinstance() asks. By weak references: a guard that holds it keeps no class alive."""
    found: dict[Any, Any] = {}
    pending: list[type | None] = list(kinds)
    while pending:
        kind = pending.pop()
        if kind is None or (place := weakref.ref(kind)) in found:
            continue
        given = _abc._get_dump(kind)[0] if is_a(kind, abc.ABCMeta) else ()
        found[place] = frozenset(given)
        pending += [*type.__subclasses__(kind), *(held() for held in given)]
    return found


def functions_of(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions that an attribute of a class runs."""
    return (part for part in _code_of(value) if is_a(part, types.FunctionType))


def partials_of(value: Any) -> Iterator[Any]:
    """The partial calls that an attribute of a class consists of: their arguments are read, too."""
    return (part for part in _code_of(value) if is_a(part, _PARTIAL_CALLS))


def _code_of(value: Any) -> Iterator[Any]:
    if is_a(value, types.FunctionType):
        yield value
    elif is_a(value, (staticmethod, classmethod, types.MethodType)):
        yield from _code_of(value.__func__)
    elif is_a(value, property):
        for part in (value.fget, value.fset, value.fdel):
            yield from _code_of(part)
    elif is_a(value, functools.cached_property):
        yield from _code_of(value.func)
    elif is_a(value, _PARTIAL_CALLS):
        yield value
        yield from _code_of(value.func)


def contents(found: Sources) -> Iterator[tuple[Place, Any]]:
    """Every watched value beside the modules' own attributes, with its place."""
    for space, names, where in found.dicts:
        if space is None:
            continue
        if names is True:
            entries = [name for name in space if found.may_read(name)]
        else:
            entries = list(dict.keys(space) if names is None or names is False else names)
        # As stored: a look-up by a dictionary's own method may make something new each time.
        here = [name for name in entries if dict.__contains__(space, name)]
        yield from ((f"{where}.{name}", dict.__getitem__(space, name)) for name in here)
    for value, where in found.held:
        if isinstance(value, types.CellType):
            yield where, value.cell_contents
        elif isinstance(value, (set, frozenset)):
            yield where, value
        else:
            yield from ((f"{where}[{i}]", item) for i, item in enumerate(value))
    for value, slots, where in found.objects:
        for name in slots:
            try:
                yield f"{where}.{name}", object.__getattribute__(value, name)
            except AttributeError:
                continue
    yield from ((where, value) for value, where in found.arrays)
    for kind in found.classes:
        for base in kind.__mro__:
            for name, value in list(vars(base).items()) if is_user_class(base) else ():
                if found.may_read(name) and not name.startswith("__"):
                    yield f"{base.__qualname__}.{name}", value
