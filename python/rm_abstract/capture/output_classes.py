"""Output classes that are neither built in nor ModelOutput: what torch's pytree knows (diffusers'
BaseOutput, classes the user registered) and plain dataclasses.

A value is taken apart into its children and a context of plain data, and put together again by the
class itself. A dataclass is made without its constructor: forward has run that, and what it did to
the fields is in the fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeAlias

from torch.utils import _pytree

from rm_abstract.capture.errors import capture_error

Maker: TypeAlias = "Callable[[Sequence[Any]], Any]"


@dataclasses.dataclass(frozen=True)
class Taken:
    form: str  # "pytree" or "dataclass"
    children: list[Any]
    context: Any  # data that survives JSON, by _encoded


def take(value: Any) -> Taken | None:
    """The parts of a value; None when it is of no such class, or holds more than its parts."""
    kind = type(value)
    node = _pytree.SUPPORTED_NODES.get(kind)
    try:
        if node is not None:
            children, context = node.flatten_fn(value)
            return Taken("pytree", list(children), _encoded(context))
        names = _own_fields(value)
    except TypeError:  # a context that is no data
        return None
    if names is None:
        return None
    return Taken("dataclass", [getattr(value, name) for name in names], names)


def path_of(kind: type) -> tuple[str, str]:
    """Module and name that `find` finds the class by. Raises CaptureError where it would not."""
    module, name = kind.__module__, kind.__qualname__
    if find(module, name) is not kind:
        raise capture_error(
            "RM204",
            f"expected an output class that can be imported, got {module}.{name}",
            "defining the class at the top level of its module",
        )
    return module, name


def find(module: str, name: str) -> Any:
    """What has this name now; None when nothing has."""
    try:
        found: Any = import_module(module)
    except ImportError:
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def maker(form: str, module: str, name: str, context: Any) -> Maker:
    """A function (children) -> value. Raises CaptureError for a class that is gone."""
    found = find(module, name)
    if isinstance(found, type) and form == "pytree" and found in _pytree.SUPPORTED_NODES:
        unflatten, given = _pytree.SUPPORTED_NODES[found].unflatten_fn, _decoded(context)
        return lambda children: unflatten(children, given)
    if isinstance(found, type) and form == "dataclass" and dataclasses.is_dataclass(found):
        return _dataclass_maker(found, context)
    raise capture_error(
        "RM204", f"expected an output class, got {module}.{name}", "clearing the compile cache"
    )


def _own_fields(value: Any) -> list[str] | None:
    """The fields of a dataclass instance that is made of nothing else."""
    kind = type(value)
    if not dataclasses.is_dataclass(kind):
        return None
    object.__new__(kind)  # TypeError: a dict, say, whose items are no fields
    names = [field.name for field in dataclasses.fields(kind)]
    held = getattr(value, "__dict__", {})
    if not set(held) <= set(names) or not all(hasattr(value, name) for name in names):
        return None
    return names


def _dataclass_maker(kind: Any, names: Sequence[str]) -> Maker:
    def make(children: Sequence[Any]) -> Any:
        value = object.__new__(kind)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(value, name, child)  # frozen classes too
        return value

    return make


def _encoded(context: Any) -> Any:
    """Plain data as JSON keeps it; a tuple, which it does not know, by its name."""
    if context is None or type(context) in (bool, int, str):
        return context
    if type(context) in (list, tuple):
        return {type(context).__name__: [_encoded(item) for item in context]}
    if type(context) is dict:
        return {"dict": [[_encoded(k), _encoded(v)] for k, v in context.items()]}
    raise TypeError(f"a {type(context).__name__}")


def _decoded(context: Any) -> Any:
    if not isinstance(context, dict):
        return context
    ((kind, items),) = context.items()
    if kind == "dict":
        return {_decoded(k): _decoded(v) for k, v in items}
    return (list if kind == "list" else tuple)(_decoded(item) for item in items)
