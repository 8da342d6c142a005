"""A second opinion on what a user's forward reads: torch's own dynamo.

Dynamo traces the forward and names a source for everything it would have to guard. A source that
the search of guards/sources.py did not find is a hole in that search: such a forward is not
compiled. What dynamo cannot trace as a whole says nothing; the search alone decides then.

The question is about the user's code. What a module of an installed package reads of itself, and
what its classes hold, is that package's code, as it is where such a module is called alone.
"""

from __future__ import annotations

import ast
import builtins
import logging
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree

from rm_abstract.base.frames import release_frames
from rm_abstract.base.quiet import quietly
from rm_abstract.base.tracing import tracing
from rm_abstract.guards.code import reads_of
from rm_abstract.guards.found import BOOKKEEPING, Sources, functions_of
from rm_abstract.guards.packages import is_user_class, is_user_file
from rm_abstract.guards.traced_copy import alias, copied

# Tracing takes some milliseconds for each module: larger trees are left to the search alone.
MAX_MODULES = 64
_MODULE = "__import_"  # dynamo's name for a Python module: dots are written out
_TORCH = re.compile(r"_\d+_c")  # dynamo's name for torch where it asks for torch.Tensor itself
_OF_FUNCTIONS = frozenset({"fget", "fset", "fdel", "func", "cell_contents"})


class _Enough(Exception):
    """Stops dynamo once the guards are known: nothing is run."""


def uncovered(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], found: Sources
) -> str:
    """The first thing that forward reads, by dynamo's account, and `found` lacks; empty: none."""
    if sum(1 for _ in module.modules()) > MAX_MODULES:
        return ""
    traced = copied(module)
    for source in _sources_of(traced, args, kwargs):
        if any(
            _is_missing(name, found) and not (step and _is_of_a_package(name, step, traced))
            for name, step in _names(source)
        ):
            return _text(source)
    return ""


def _sources_of(
    traced: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """What dynamo would guard; empty when it cannot trace the call."""
    from torch._dynamo.eval_frame import optimize

    seen: list[Any] = []

    def take(guards: Any) -> None:
        seen.extend(guard.originating_source for guard in guards)
        raise _Enough

    # A function of its own: what dynamo remembers is attached to its code, not to the user's.
    probe = types.FunctionType(_probe.__code__.replace(), {"__builtins__": builtins})
    try:
        with tracing(), torch.no_grad(), quietly("torch._dynamo", logging.CRITICAL):
            ask = optimize(lambda graph, _: graph.forward, nopython=True, guard_export_fn=take)
            ask(probe)(traced, *_aliases((args, kwargs)))
    except Exception as error:  # of many types: _Enough comes wrapped in one of dynamo's own
        release_frames(error)
        return [source for source in seen if source is not None]
    return []


def _aliases(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, alias, value)


def _probe(module: Any, args: Any, kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def _of_the_user(module: Any, path: list[str]) -> Iterator[str]:
    """The names on a path from a module, up to the first installed package: what lies inside of one
    is not watched, whoever reads it."""
    value = module
    for name in path:
        yield name
        value = getattr(value, name, None)
        if isinstance(value, types.ModuleType) and not is_user_file(
            getattr(value, "__file__", None)
        ):
            return


def _text(source: Any) -> str:
    return str(source.name if isinstance(source.name, str) else source.name())


def _is_missing(name: str, found: Sources) -> bool:
    return not (name in BOOKKEEPING or name.startswith("__") or found.may_read(name))


def _is_of_a_package(name: str, source: Any, traced: torch.nn.Module) -> bool:
    """Whether a source is what an installed package reads of its own: an attribute of a module of
    its, one that another object's class names in its code, what a class holds.
    """
    text = _text(source.base)
    owner = _value(text, traced)
    if isinstance(owner, torch.nn.Module):
        return not is_user_class(type(owner))
    if owner is not None and _is_named_in(type(owner), name):
        return True
    while ".__dict__)" in text:
        text = text[: text.rindex(".__dict__)")]
        kind = _value(text.rpartition("dict(")[2], traced)
        if isinstance(kind, type) and not is_user_class(kind):
            return True
    return False


def _is_named_in(kind: type, name: str) -> bool:
    """Whether methods or properties that an installed package gave a class name an attribute."""
    return any(
        name in reads_of(function.__code__).names
        for base in kind.__mro__
        if not is_user_class(base)
        for held in vars(base).values()
        for function in functions_of(held)
    )


def _value(expression: str, traced: torch.nn.Module) -> Any:
    """What dynamo's text of a source means for the copy that it traced; None where it has no value,
    as an attribute that forward makes, or is more than attributes, items and types.
    """
    if not expression.startswith(("L['module']", "type(L['module']")):
        return None
    try:
        return _evaluated(ast.parse(expression, mode="eval").body, traced)
    except Exception:  # whatever an attribute of a user's module raises
        return None


def _evaluated(node: ast.expr, traced: torch.nn.Module) -> Any:
    match node:
        case ast.Name(id="L"):
            return {"module": traced}
        case ast.Attribute(value=of, attr=name):
            return getattr(_evaluated(of, traced), name)
        case ast.Subscript(value=of, slice=index):
            return _evaluated(of, traced)[ast.literal_eval(index)]
        case ast.Call(func=ast.Name(id="type"), args=[of], keywords=[]):
            return type(_evaluated(of, traced))
    raise ValueError(ast.dump(node))


def _names(source: Any) -> Iterator[tuple[str, Any]]:
    """Names on the path of a source that starts at the module or at the user's globals; with each
    of a module the source that it ends.
    """
    names: list[tuple[str, Any]] = []
    while getattr(source, "base", None) is not None:
        member = getattr(source, "member", None)
        if member is None and "__dict__" in _text(source.base):  # a class attribute
            member = getattr(source, "index", None)
        if isinstance(member, str) and member not in _OF_FUNCTIONS:
            names.append((member, source))
        source = source.base
    root = getattr(source, "local_name", None)
    variable = getattr(source, "global_name", None)
    if root == "module":
        yield from names
        return
    plain = [name for name, _ in names]
    if isinstance(variable, str) and variable.startswith(_MODULE):
        place = variable.removeprefix(_MODULE).replace("_dot_", ".")
        if is_user_file(getattr(sys.modules.get(place), "__file__", None)):
            yield from ((name, None) for name in _of_the_user(sys.modules[place], plain[::-1]))
    elif isinstance(variable, str) and not (variable.startswith("__") or _TORCH.match(variable)):
        yield from ((name, None) for name in (variable, *plain))
