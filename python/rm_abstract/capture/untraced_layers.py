"""The loop over a list of layers of which the first alone are traced.

The other layers stand in the list and are called as ever, but give what the last traced one gave.
A loop that treats one of them in another way is seen in what it gives them: the last traced one
must have been given the same, or what the layer before gave. What a traced layer knows of its
number may lead it to a cache and nowhere else. `ok` says whether all of that held.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

_CACHES = ("transformers.cache_utils", "rm_abstract.kv.")
_TRACED_CACHE = "rm_abstract.kv.traced_cache"
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CONTAINERS = (list, tuple, set, dict)


@dataclass
class _Call:
    """The leaves that a layer was given and those that it gave, and their structures."""

    given: list[Any]
    structure: Any
    gave: list[Any] = field(default_factory=list)


class UntracedLayers:
    """Of the layers of a copied model the first `traced` compute; nobody else has the model.

    ``numbers``: by name in a layer, attributes that are the layer's number.
    """

    def __init__(
        self, layers: torch.nn.ModuleList, traced: int, numbers: Mapping[str, set[str]]
    ) -> None:
        self._count, self._traced = len(layers), traced
        self._calls: list[_Call] = []
        self._output: Any = None
        self._irregular = False
        for number, layer in enumerate(layers):
            part: Any = layer  # an attribute of the instance hides the method
            if number < traced:
                part.forward = self._watched(number, layer, layer.forward)
                for name, attributes in numbers.items():
                    inside = vars(layer.get_submodule(name))
                    inside.update({a: _Number(inside[a], self._refuse) for a in attributes})
            else:
                part.forward = self._standing(number)
                for inner in layer.modules():
                    inner._parameters.clear()
                    inner._buffers.clear()

    def begin(self) -> None:
        """In front of each forward of the model."""
        self._calls, self._output, self._irregular = [], None, False

    @property
    def ok(self) -> bool:
        """After a forward: whether the layers that were not traced are as the last traced one."""
        return not self._irregular and len(self._calls) == self._count

    def _refuse(self) -> None:
        self._irregular = True

    def _watched(
        self, number: int, layer: torch.nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            call = self._next(number, args, kwargs)
            before = _held_by(layer)
            output = forward(*args, **kwargs)
            self._irregular |= before != _held_by(layer)
            call.gave = tree_flatten(output)[0]
            self._output = output
            return output

        return watched

    def _standing(self, number: int) -> Callable[..., Any]:
        def standing(*args: Any, **kwargs: Any) -> Any:
            call = self._next(number, args, kwargs)
            if len(self._calls) <= self._traced:
                raise RuntimeError("a layer behind the traced ones is called before them")
            like, before = self._calls[self._traced - 1], self._calls[self._traced - 2]
            self._irregular |= not self._as_given(call, like, before)
            call.gave = like.gave
            return self._output

        return standing

    def _next(self, number: int, args: Any, kwargs: Any) -> _Call:
        self._irregular |= number != len(self._calls)  # each once, in order
        self._calls.append(_Call(*tree_flatten((args, kwargs))))
        return self._calls[-1]

    def _as_given(self, call: _Call, like: _Call, before: _Call) -> bool:
        """Whether a call is that of the last traced layer, one layer later."""
        if call.structure != like.structure:
            return False
        for own, other in zip(call.given, like.given, strict=True):
            moved = [
                now
                for then, now in zip(before.gave, like.gave, strict=False)
                if then is other and isinstance(other, torch.Tensor)
            ]
            if not all(_same(own, expected) for expected in moved or [other]):
                return False
        return len(before.gave) == len(like.gave)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or type(a).__module__ == _TRACED_CACHE:
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, _SYMBOLIC):
        return bool(a.node.expr == b.node.expr)
    return isinstance(a, _PLAIN) and a == b  # another object may count its readers


def _held_by(layer: torch.nn.Module) -> list[Any]:
    """What the objects hold that a layer's modules hold, and so may share with other layers."""
    found: list[Any] = []
    for part in layer.modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                _add_content(value, found, 2)
    return found


def _add_content(value: Any, found: list[Any], depth: int) -> None:
    if isinstance(value, (type, torch.Tensor, *_PLAIN)) or callable(value):
        return
    items: list[Any] = []
    if isinstance(value, _CONTAINERS):
        items = list(value.values() if isinstance(value, dict) else value)
    elif hasattr(value, "__dict__"):
        items = list(vars(value).values())
    found += [id(item) for item in items]
    for item in items if depth else ():
        _add_content(item, found, depth - 1)


class _Number:
    """An integer that says when anybody but a cache asks for it.

    It is no `int`: lists take those as they are.
    """

    def __init__(self, value: int, asked: Callable[[], None]) -> None:
        self.__dict__.update(_value=value, _asked=asked)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return int

    def __deepcopy__(self, memo: Any) -> _Number:
        return self


def _operator(name: str) -> Callable[..., Any]:
    def asked(self: Any, *arguments: Any) -> Any:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith(_CACHES):
            self.__dict__["_asked"]()
        plain = [vars(a)["_value"] if type(a) is _Number else a for a in arguments]
        return getattr(self.__dict__["_value"], name)(*plain)

    return asked


_LEFT_ALONE = set(dir(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
_LEFT_ALONE -= {"__hash__", "__str__", "__repr__", "__format__"}
for _name in dir(int):
    if callable(getattr(int, _name)) and _name not in _LEFT_ALONE:
        setattr(_Number, _name, _operator(_name))
for _name in ("real", "imag", "numerator", "denominator"):
    setattr(_Number, _name, property(_operator("__pos__")))
