"""The structure of a module's output as JSON, and the way back.

A structure is recorded while the module is traced and rebuilt on every routed call: ModelOutput
classes by import path, tuples, lists, dicts, classes that torch's pytree knows and dataclasses
(`output_classes.py`), None, plain values, sizes as tensors of one integer, tensors by number,
inputs that were passed through by number, also out of a ModelOutput, views of inputs and of other
outputs by what they are views of, caches by the input they came in as. Data only, never pickled
code.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.calls.call import PLAIN
from rm_abstract.capture import output_classes
from rm_abstract.capture.aliases import taker
from rm_abstract.capture.errors import capture_error
from rm_abstract.kv import bundle, kv_cache, state_cache, window_cache
from rm_abstract.kv.bundle import is_bundle_type

Structure: TypeAlias = "list[Any]"
Build: TypeAlias = "Callable[[Sequence[torch.Tensor], Sequence[Any]], Any]"


@dataclass
class Recorder:
    """Walks an output, collecting tensors; `inputs` are the leaves of the call it came from."""

    inputs: list[Any]
    caches: dict[int, int]  # id(cache made for the trace) -> leaf number of the call
    tensors: list[torch.Tensor] = field(default_factory=list)
    touched: dict[int, Structure] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)  # ids of tensors that caches of the call held

    def record(self, value: Any, path: str = "output") -> Structure:
        if isinstance(value, torch.Tensor):
            for i, given in enumerate(self.inputs):
                if given is value:
                    return ["input", i]
                if is_bundle_type(type(given)):
                    for j, held in enumerate(bundle.leaves(given)):
                        if held is value:
                            return ["part", i, j]
            return ["tensor", self._number(value)]
        if value is None:
            return ["none"]
        if isinstance(value, PLAIN):
            return ["const", value]
        if isinstance(value, torch.SymInt):  # a size: the program computes it for each call
            size: Any = value
            return ["int", self._number(torch.full((), size, dtype=torch.int64))]
        if type(value) is float:
            return ["float", value.hex()]
        if id(value) in self.caches or kv_cache.is_cache(value):
            return self.cache(value, path)
        kind = type(value)
        if kind in (list, tuple, torch.Size):
            items = [self.record(v, f"{path}[{i}]") for i, v in enumerate(value)]
            return [kind.__name__, *items]
        if kind in (dict, OrderedDict) or is_bundle_type(kind):
            items = [[k, self.record(v, f"{path}.{k}")] for k, v in value.items()]
            if kind in (dict, OrderedDict):
                return ["dict" if kind is dict else "ordered", *items]
            return ["class", *output_classes.path_of(kind), *items]
        if isinstance(value, tuple) and kind.__module__ == "torch.return_types":
            items = [self.record(v, f"{path}[{i}]") for i, v in enumerate(value)]
            return ["torch", kind.__name__, *items]
        if (
            isinstance(value, tuple)
            and hasattr(kind, "_fields")
            and not getattr(value, "__dict__", 0)
        ):
            items = [self.record(v, f"{path}[{i}]") for i, v in enumerate(value)]
            return ["named", *output_classes.path_of(kind), *items]
        taken = output_classes.take(value)
        if taken is not None:
            items = [self.record(v, f"{path}.{i}") for i, v in enumerate(taken.children)]
            return ["node", taken.form, *output_classes.path_of(kind), taken.context, *items]
        raise capture_error(
            "RM204",
            f"expected outputs of tensors in tuples, lists, dicts, dataclasses and classes that "
            f"torch.utils._pytree knows, got a {kind.__name__} at {path}",
            "returning plain tensors",
        )

    def cache(self, cache: Any, path: str) -> Structure:
        """A cache: which input it is (-1: made by the call) and the tensors it now holds."""
        if id(cache) not in self.touched and kv_cache.is_pair(cache):
            first, second = (self._numbers(half, path) for half in kv_cache.halves(cache))
            updated = sorted(int(i) for i, done in cache.is_updated.items() if done)
            leaf = self.caches.get(id(cache), -1)
            self.touched[id(cache)] = ["caches", leaf, first, second, updated]
        elif id(cache) not in self.touched and self._is_new_window(cache):
            self.touched[id(cache)] = self._windows(cache, path)
        elif id(cache) not in self.touched:
            numbers = self._numbers(cache, path)
            leaf = self.caches.get(id(cache), -1)
            new_states = leaf < 0 and state_cache.is_states(cache)
            self.touched[id(cache)] = (
                ["states", numbers] if new_states else ["cache", leaf, numbers]
            )
        return self.touched[id(cache)]

    def _is_new_window(self, cache: Any) -> bool:
        return id(cache) not in self.caches and window_cache.is_windowed(cache)

    def _windows(self, cache: Any, path: str) -> Structure:
        """A cache of windows that the call made: its tensors, windows and the positions seen."""
        held = window_cache.read(cache)
        if isinstance(held, Decline):
            raise capture_error(
                "RM204",
                f"expected layers that have all seen the same positions at {path}, got {held}",
                "use_cache=False",
            )
        tensors, seen = held
        count = self._number(torch.full((), seen, dtype=torch.int64))
        return ["windows", [self._number(t) for t in tensors], window_cache.windows(cache), count]

    def _numbers(self, cache: Any, path: str) -> list[int]:
        """The content of one cache by number; -1: a tensor of the call that did not change."""
        held = cache.content() if hasattr(cache, "content") else kv_cache.read(cache)
        if not isinstance(held, list):
            raise capture_error(
                "RM204", f"expected a plain DynamicCache at {path}, got {held}", "use_cache=False"
            )
        return [-1 if id(t) in self.given else self._number(t) for t in held]

    def _number(self, tensor: torch.Tensor) -> int:
        for i, known in enumerate(self.tensors):
            if known is tensor:
                return i
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def _load_class(module: str, name: str) -> Any:
    found = output_classes.find(module, name)
    if not (isinstance(found, type) and (is_bundle_type(found) or hasattr(found, "_fields"))):
        raise capture_error(
            "RM204", f"expected an output class, got {module}.{name}", "clearing the compile cache"
        )
    return found


_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "Size": torch.Size}


def builder(structure: Structure) -> Build:
    """A function (tensors, leaves of the call) -> output. It commits caches: call it last."""
    kind = structure[0]
    if kind == "tensor":
        number = structure[1]
        return lambda tensors, leaves: tensors[number]
    if kind == "alias":
        return _alias_builder(*structure[1:])
    if kind == "turned":
        turned, order = structure[1:]
        return lambda tensors, leaves: tensors[turned].permute(order)
    if kind == "input":
        number = structure[1]
        return lambda tensors, leaves: leaves[number]
    if kind == "part":
        leaf, part = structure[1:]
        return lambda tensors, leaves: bundle.leaves(leaves[leaf])[part]
    if kind in ("none", "const"):
        value = structure[1] if kind == "const" else None
        return lambda tensors, leaves: value
    if kind == "float":
        number = float.fromhex(structure[1])
        return lambda tensors, leaves: number
    if kind == "int":
        number = structure[1]
        return lambda tensors, leaves: int(tensors[number])
    if kind == "node":
        make_node = output_classes.maker(*structure[1:5])
        nodes = [builder(s) for s in structure[5:]]
        return lambda tensors, leaves: make_node([b(tensors, leaves) for b in nodes])
    if kind == "cache":
        return _cache_builder(structure[1], structure[2])
    if kind == "states":
        numbers = structure[1]
        return lambda tensors, leaves: state_cache.made([tensors[n] for n in numbers])
    if kind == "windows":
        held, windows, seen = structure[1:]
        return lambda tensors, leaves: window_cache.made(
            [tensors[n] for n in held], windows, int(tensors[seen])
        )
    if kind == "caches":
        return _pair_builder(*structure[1:])
    if kind in _SEQUENCES:
        items = [builder(s) for s in structure[1:]]
        make = _SEQUENCES[kind]
        return lambda tensors, leaves: make([b(tensors, leaves) for b in items])
    if kind == "dict":
        pairs = [(k, builder(s)) for k, s in structure[1:]]
        return lambda tensors, leaves: {k: b(tensors, leaves) for k, b in pairs}
    if kind == "ordered":
        pairs = [(k, builder(s)) for k, s in structure[1:]]
        return lambda tensors, leaves: OrderedDict((k, b(tensors, leaves)) for k, b in pairs)
    if kind == "torch":
        result: Any = getattr(torch.return_types, structure[1])
        parts = [builder(s) for s in structure[2:]]
        return lambda tensors, leaves: result([b(tensors, leaves) for b in parts])
    cls = _load_class(structure[1], structure[2])
    if kind == "named":
        items = [builder(s) for s in structure[3:]]
        # Without its constructor, as a dataclass: forward has run that.
        return lambda tensors, leaves: tuple.__new__(cls, [b(tensors, leaves) for b in items])
    pairs = [(k, builder(s)) for k, s in structure[3:]]
    if _keeps_order(cls, [k for k, _ in pairs]):
        return lambda tensors, leaves: cls(**{k: b(tensors, leaves) for k, b in pairs})

    def in_order(tensors: Sequence[Any], leaves: Sequence[Any]) -> Any:
        made = cls(**{k: b(tensors, leaves) for k, b in pairs})
        for key, _ in pairs:
            OrderedDict.move_to_end(made, key)
        return made

    return in_order


def _keeps_order(cls: type, keys: list[str]) -> bool:
    """Whether an output made of these has them in this order: one that forward filled bit by bit
    may have another than its fields."""
    if not (issubclass(cls, OrderedDict) and dataclasses.is_dataclass(cls)):
        return True
    return keys == [field.name for field in dataclasses.fields(cls) if field.name in keys]


def with_aliases(
    structure: Structure, views: Mapping[int, tuple[str, int, list[Any]]]
) -> Structure:
    """The structure with views (`aliases.find`) in the place of tensors of their own."""

    def put(number: int) -> Structure:
        if number not in views:
            return ["tensor", number]
        kind, of, steps = views[number]
        return ["alias", number, ["input", of] if kind == "input" else put(of), steps]

    return _replaced(structure, put) if views else structure


def with_layouts(structure: Structure, turned: Mapping[int, list[int]]) -> Structure:
    """The structure with permuted views (`layouts.put_in_order`) of tensors."""

    def put(number: int) -> Structure:
        return ["turned", number, turned[number]] if number in turned else ["tensor", number]

    return _replaced(structure, put) if turned else structure


NEW_CACHES = ("states", "windows")  # caches that only a call itself makes
_LEAVES = frozenset(
    ("input", "part", "none", "const", "float", "int", "cache", *NEW_CACHES, "caches")
)
_FRONT = {"class": 3, "named": 3, "torch": 2, "node": 5}  # where the parts begin


def _replaced(structure: Structure, put: Callable[[int], Structure]) -> Structure:
    """The structure with put(number) where tensors were."""
    kind = structure[0]
    if kind in _LEAVES:
        return structure
    if kind == "tensor":
        return put(structure[1])
    if kind == "alias":
        return [kind, structure[1], _replaced(structure[2], put), structure[3]]
    front = _FRONT.get(kind, 1)
    pairs = kind in ("dict", "ordered", "class")
    items = [
        [item[0], _replaced(item[1], put)] if pairs else _replaced(item, put)
        for item in structure[front:]
    ]
    return [*structure[:front], *items]


def _alias_builder(number: int, base: Structure, steps: list[Any]) -> Build:
    of, take = builder(base), taker(steps)
    return lambda tensors, leaves: take(of(tensors, leaves), tensors[number])


def _pair_builder(leaf: int, first: list[int], second: list[int], updated: list[int]) -> Build:
    def build(tensors: Sequence[Any], leaves: Sequence[Any]) -> Any:
        if leaf < 0:  # made by the call
            pair = kv_cache.make_pair()
        else:
            pair = leaves[leaf]
        for half, numbers in zip(kv_cache.halves(pair), (first, second), strict=True):
            if any(n >= 0 for n in numbers):
                held = kv_cache.read(half)  # of the numbers' length when some did not change
                old = held if isinstance(held, list) else []
                content = [old[i] if n < 0 else tensors[n] for i, n in enumerate(numbers)]
                kv_cache.commit(half, content)
        pair.is_updated.update(dict.fromkeys(updated, True))
        return pair

    return build


def _cache_builder(leaf: int, numbers: list[int]) -> Build:
    def build(tensors: Sequence[Any], leaves: Sequence[Any]) -> Any:
        content = [tensors[n] for n in numbers]
        if leaf < 0:
            return kv_cache.make(len(numbers) // 2, content)
        kv_cache.commit(leaves[leaf], content)
        return leaves[leaf]

    return build
