"""How a value can be watched: what it shows of its inside."""

from __future__ import annotations

import array
import collections
import functools
import types
from typing import Any

from rm_abstract.base.kinds import kind_of

_DESCRIPTORS = (
    *(types.WrapperDescriptorType, types.MethodWrapperType, types.MethodDescriptorType),
    *(types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
    type(collections.namedtuple("_", "field").field),  # type: ignore[attr-defined]
)
# Objects that decide nothing a forward computes: who logs or locks computes the same.
_HARMLESS_PACKAGES = frozenset({"logging", "threading", "_thread"})
_COMPILED_FUNCTIONS = frozenset({"cython_function_or_method", "fused_cython_function"})
_HARMLESS_MODULES = frozenset({"torch._ops", "typing", "_abc"})


# Members of classes made in C that the interpreter fills in as it likes.
_OF_THE_INTERPRETER = frozenset(
    {"__vectorcalloffset__", "__dictoffset__", "__weaklistoffset__", "__weakrefoffset__"}
)
# Type codes of ctypes' numbers. Others are pointers: their bytes say nothing of what they point to.
_CTYPES_NUMBERS = frozenset("bBhHiIlLqQfdg?c")


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """isinstance() by the type alone: where that says no, isinstance() asks the value for its
    __class__, which a proxy computes (torch.distributed.reduce_op warns then)."""
    return issubclass(type(value), kinds)


def is_leaf(value: Any) -> bool:
    """A value without an inside that could change."""
    if is_a(value, types.BuiltinFunctionType):
        owner = value.__self__
        return owner is None or isinstance(owner, (types.ModuleType, type))
    if type(value).__name__ in _COMPILED_FUNCTIONS and hasattr(value, "__code__"):
        return True  # Cython's functions, as those of numpy.random: code without an inside
    return kind_of(value) in ("plain", "fixed", "scalar") or is_a(value, _DESCRIPTORS)


def is_harmless(kind: type) -> bool:
    """Whether what objects of a class hold says nothing about a forward's results."""
    module = kind.__module__ or ""
    if kind.__qualname__ == "_local":  # threading.local
        return False
    return module.split(".")[0] in _HARMLESS_PACKAGES or module in _HARMLESS_MODULES


def is_buffer(kind: Any) -> bool:
    """Whether the objects of a class are bytes and nothing else: these can be compared."""
    if kind in (bytearray, array.array):
        return True
    return kind.__module__ == "ctypes" and getattr(kind, "_type_", None) in _CTYPES_NUMBERS


def members_of(kind: Any) -> tuple[str, ...]:
    """Names of the slots of a class and of its bases, those of bases in C included."""
    return tuple(name for name in _members(kind) if name not in _OF_THE_INTERPRETER)


def _members(kind: Any) -> list[str]:
    return [
        name
        for base in kind.__mro__
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType)
    ]


@functools.lru_cache(maxsize=4096)
def slots_of(kind: Any) -> tuple[str, ...] | None:
    """Names of the slots of a class; None when its objects hold more than slots and a dictionary.

    C code may keep state that no attribute shows. It takes room in the object: what is neither a
    slot, nor the dictionary, nor the list of weak references is such state.
    """
    slots = _members(kind)
    pointer = object.__basicsize__ // 2
    offsets = [kind.__dictoffset__, kind.__weakrefoffset__]
    shown = object.__basicsize__ + pointer * (len(slots) + sum(offset > 0 for offset in offsets))
    return members_of(kind) if kind.__basicsize__ <= shown and not kind.__itemsize__ else None


def container_base(kind: type) -> type | None:
    """The builtin container a class is made from, when nothing else is hidden in its objects."""
    for base in (dict, list, set, frozenset):
        if issubclass(kind, base):
            return base
    return None
