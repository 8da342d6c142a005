"""A call of a module taken apart: tensors and caches in a flat list, everything else by value.

The order is the contract with the router (engines/base.py): arguments bound to the parameters of
forward in signature order, keywords that fall into **kwargs after them, *args last; containers
depth first. Two calls with equal `CallSpec` differ only in the contents of tensors and caches and
in sizes.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.base.kinds import kind_of
from rm_abstract.kv.bundle import is_bundle
from rm_abstract.kv.kv_cache import is_cache

Spec: TypeAlias = tuple[Any, ...]
PLAIN = (bool, int, str)


@dataclass(frozen=True)
class CallSpec:
    """The structure of a call: hashable, printable as JSON, no tensors in it."""

    names: tuple[str, ...]
    specs: tuple[Spec, ...]
    positional: int  # how many trailing entries came through *args

    def spec_of(self, name: str) -> Spec:
        return self.specs[self.names.index(name)]

    def json(self) -> Any:
        """Plain lists for a record on disk."""
        specs = [_plain_lists(spec) for spec in self.specs]
        return {"names": self.names, "specs": specs, "positional": self.positional}


@dataclass
class FlatCall:
    """A call as `spec` plus its tensors and caches, in the router's order."""

    spec: CallSpec
    leaves: list[Any]
    torch_state: dict[str, Any] = field(default_factory=dict)  # what forward read of it
    has_contents: bool = True  # False in a process that got types and sizes alone


@dataclass(frozen=True)
class ForwardParameters:
    """What inspect.signature says about forward, read once a module."""

    names: tuple[str, ...]
    positional: tuple[str, ...]
    var_positional: bool

    @staticmethod
    def of(module: torch.nn.Module) -> ForwardParameters:
        kinds = inspect.Parameter
        parameters = inspect.signature(module.forward).parameters.values()
        named = [p for p in parameters if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
        return ForwardParameters(
            names=tuple(p.name for p in named),
            positional=tuple(p.name for p in named if p.kind is not kinds.KEYWORD_ONLY),
            var_positional=any(p.kind is kinds.VAR_POSITIONAL for p in parameters),
        )


def flatten_call(
    parameters: ForwardParameters, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FlatCall | Decline:
    """Takes a call apart; a value that is no data is a Decline RM104 with the argument's name."""
    bound: dict[str, Any] = dict(zip(parameters.positional, args, strict=False))
    rest = args[len(parameters.positional) :]
    if (rest and not parameters.var_positional) or any(name in bound for name in kwargs):
        return Decline("RM104", "arguments that do not fit forward's signature")
    bound.update(kwargs)
    known = [n for n in parameters.names if n in bound]
    ordered = known + [n for n in kwargs if n not in parameters.names]
    leaves: list[Any] = []
    specs: list[Spec] = []
    try:
        for name in ordered:
            specs.append(_spec(bound[name], leaves))
        specs += [_spec(value, leaves) for value in rest]
    except TypeError as error:
        name = ordered[len(specs)] if len(specs) < len(ordered) else "*args"
        return Decline("RM104", f"argument {name!r} is {error}")
    names = (*ordered, *(f"*{i}" for i in range(len(rest))))
    return FlatCall(CallSpec(names, tuple(specs), len(rest)), leaves)


def _spec(value: Any, leaves: list[Any]) -> Spec:
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"a tensor subclass, {type(value).__name__}")
        leaves.append(value)
        return ("tensor", str(value.dtype), value.dim(), str(value.device))
    if value is None:
        return ("none",)
    if type(value) in PLAIN:
        return ("const", type(value).__name__, value)
    if type(value) is float:
        return ("float", value.hex())  # 0.0 and -0.0 are two values, and NaN is one
    if kind_of(value) == "fixed":
        return ("fixed", _name_of(value), value)
    if type(value) in (list, tuple):
        return (type(value).__name__, *(_spec(v, leaves) for v in value))
    if type(value) is dict and all(isinstance(k, str) for k in value):
        return ("dict", *((k, _spec(v, leaves)) for k, v in value.items()))
    if is_bundle(value):
        leaves.append(value)
        return ("bundle", type(value).__module__, type(value).__qualname__, *value.keys())
    if is_cache(value):
        leaves.append(value)
        return ("cache", type(value).__name__)
    raise TypeError(f"a {type(value).__name__}")


def _name_of(value: Any) -> str:
    """The name of a value of which there is one in a process: a dtype, a member of an enum."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return f"{kind.__module__}.{kind.__qualname__}.{value.name}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value)


def _plain_lists(spec: Spec) -> list[Any]:
    """A spec without objects."""
    if spec[0] == "fixed":
        return ["fixed", spec[1]]
    return [_plain_lists(part) if isinstance(part, tuple) else part for part in spec]


def leaf_count(spec: Spec) -> int:
    """Leaves below one argument."""
    if spec[0] in ("tensor", "cache", "bundle"):
        return 1
    if spec[0] in ("list", "tuple"):
        return sum(leaf_count(s) for s in spec[1:])
    return sum(leaf_count(s) for _, s in spec[1:]) if spec[0] == "dict" else 0


def objects_in(spec: CallSpec) -> list[Spec]:
    """The caches and bundles among the leaves, in containers too."""
    found: list[Spec] = []
    pending = list(spec.specs[::-1])
    while pending:
        part = pending.pop()
        if part[0] in ("cache", "bundle"):
            found.append(part)
        elif part[0] in ("list", "tuple"):
            pending += part[:0:-1]
        elif part[0] == "dict":
            pending += [value for _, value in part[:0:-1]]
    return found


def leaf_numbers(spec: CallSpec) -> dict[str, int]:
    """Where the arguments that are one tensor or cache lie among the leaves."""
    found: dict[str, int] = {}
    at = 0
    for name, s in zip(spec.names, spec.specs, strict=True):
        if s[0] in ("tensor", "cache"):
            found[name] = at
        at += leaf_count(s)
    return found


def rebuild_call(spec: CallSpec, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of `flatten_call` with other leaves: (*args, kwargs)."""
    take = iter(leaves)
    values = [_build(s, take) for s in spec.specs]
    split = len(values) - spec.positional
    kwargs = dict(zip(spec.names[:split], values[:split], strict=True))
    return tuple(values[split:]), kwargs


def call_module(
    function: Callable[..., Any], spec: CallSpec, leaves: list[Any], positional: tuple[str, ...]
) -> Any:
    """Calls `function` with rebuilt arguments; *args need the named ones in front of them."""
    args, kwargs = rebuild_args(spec, leaves, positional)
    return function(*args, **kwargs)


def rebuild_args(
    spec: CallSpec, leaves: Sequence[Any], positional: tuple[str, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call a module with."""
    rest, kwargs = rebuild_call(spec, list(leaves))
    if not rest:
        return (), kwargs
    front = [kwargs.pop(name) for name in positional]
    return (*front, *rest), kwargs


def _build(spec: Spec, take: Any) -> Any:
    kind = spec[0]
    if kind in ("tensor", "cache", "bundle"):
        return next(take)
    if kind == "none":
        return None
    if kind == "const":
        return spec[2]
    if kind == "float":
        return float.fromhex(spec[1])
    if kind == "fixed":
        return spec[2]
    if kind == "dict":
        return {k: _build(s, take) for k, s in spec[1:]}
    items = [_build(s, take) for s in spec[1:]]
    return items if kind == "list" else tuple(items)
