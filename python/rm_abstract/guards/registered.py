"""Functions that a script puts into tables of installed packages, which look them up by name: what
``transformers.AttentionInterface.register`` does. They are the user's code in a package's place.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from rm_abstract.guards.kinds import is_a
from rm_abstract.guards.packages import is_user_class, is_user_code

MAX_ENTRIES = 512


def interface_tables(value: Any) -> list[dict[str, Any]]:
    """The dictionaries behind one of transformers' interface tables, as they are stored: its own
    look-up may import or make things. Empty for anything else."""
    shared = getattr(type(value), "_global_mapping", None)
    if is_a(value, (dict, type)) or not isinstance(shared, dict):
        return []
    own = getattr(value, "__dict__", {}).get("_local_mapping")
    return [shared, own] if isinstance(own, dict) else [shared]


def table_of(value: Any) -> list[tuple[str, Any]]:
    """The named items of a dictionary or an interface table, sorted; empty for a large one."""
    if isinstance(value, dict):
        items = list(dict.items(value))
    else:
        items = [item for table in interface_tables(value) for item in table.items()]
    named = [(key, item) for key, item in items if isinstance(key, str) and key[:2] != "__"]
    return sorted(named, key=lambda pair: pair[0]) if len(named) <= MAX_ENTRIES else []


def put_there(value: Any) -> list[tuple[Any, Any]]:
    """The items that are code of the user's, or hold some."""
    return [(key, item) for key, item in table_of(value) if _is_the_users(item, set())]


def is_table_of_code(value: Any) -> bool:
    """A dictionary in which code looks functions and classes up, such as transformers' ``ACT2FN``:
    it holds nothing else, so what a package remembers from call to call is none."""
    if not isinstance(value, dict) or not 0 < len(value) <= MAX_ENTRIES:
        return False
    return all(_is_code(item) for item in list(dict.values(value)))


def _is_code(item: Any) -> bool:
    if isinstance(item, tuple):  # a class with arguments for it
        return bool(item) and isinstance(item[0], type)
    return isinstance(item, (type, types.FunctionType, types.BuiltinFunctionType))


def by_type(value: Any) -> list[Any]:
    """The functions of the user's in a dictionary from classes to functions, such as what
    ``functools.singledispatch`` keeps."""
    if not isinstance(value, dict) or len(value) > MAX_ENTRIES:
        return []
    items = list(dict.items(value))
    if not all(isinstance(key, type) for key, _ in items):
        return []
    return [item for _, item in items if _is_the_users(item, set())]


def wrapped_by(function: types.FunctionType) -> list[Any]:
    """What a decorator of a package left in the function that it made."""
    held = [function.__dict__[name] for name in ("__wrapped__",) if name in function.__dict__]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return held


def _is_the_users(item: Any, seen: set[int]) -> bool:
    if id(item) in seen:
        return False
    seen.add(id(item))
    if isinstance(item, types.FunctionType):
        inside = () if is_user_code(item) else wrapped_by(item)
        return is_user_code(item) or any(_is_the_users(held, seen) for held in inside)
    if isinstance(item, types.MethodType):
        return _is_the_users(item.__func__, seen) or _is_the_users(item.__self__, seen)
    if isinstance(item, functools.partial):
        held = (item.func, *item.args, *item.keywords.values())
        return any(_is_the_users(value, seen) for value in held)
    if isinstance(item, functools._lru_cache_wrapper):
        return _is_the_users(item.__wrapped__, seen)
    if isinstance(item, dict):
        return bool(by_type(item))
    return is_user_class(item if isinstance(item, type) else type(item))


def value_behind(space: Mapping[str, Any], chain: tuple[str, ...]) -> Any:
    """What code reads by a global's name and attributes of modules; None where that is nothing."""
    value = space.get(chain[0])
    for name in chain[1:]:
        if not isinstance(value, types.ModuleType):
            break
        value = vars(value).get(name)
    return value
