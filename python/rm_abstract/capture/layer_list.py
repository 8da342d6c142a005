"""The list of layers of a model that are one layer with other weights.

torch.export takes 0.2 to 0.45 s of processor time for each layer of a decoder. Layers that differ
in nothing but weights and their number are traced as often as it takes to see how one follows
another (`repeated_layers.py` writes the others).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rm_abstract.calls.call import FlatCall
from rm_abstract.capture.untraced_layers import UntracedLayers
from rm_abstract.kv import kv_cache

TRACED = 4  # the first, two whose windows are compared, and the one the rest of the model follows
FEWEST = 8  # of a list that is worth it
_PARTS = {"_parameters", "_buffers", "_modules"}


@dataclass(frozen=True)
class LayerList:
    """`name` of the list in the model, how many layers are in it, and by name in a layer the
    attributes that are its number."""

    name: str
    count: int
    numbers: Mapping[str, set[str]]

    def shorten(self, model: torch.nn.Module) -> UntracedLayers:
        """Lets all but the first layers compute nothing, in a model that nobody else has."""
        layers = model.get_submodule(self.name)
        assert isinstance(layers, torch.nn.ModuleList)
        return UntracedLayers(layers, TRACED, self.numbers)

    def shortened(self, call: FlatCall) -> FlatCall | None:
        """The call with a cache of as many layers; None where it has another one."""
        leaves: list[Any] = []
        for leaf in call.leaves:
            if not isinstance(leaf, torch.Tensor) and kv_cache.read(leaf):
                if not kv_cache.is_device(leaf) or len(leaf.layers) != self.count:
                    return None
                if leaf.residence is not None:
                    return None  # its buffers are in another process
                if len({layer.sliding_window for layer in leaf.layers}) > 1:
                    return None
                leaf = copy.copy(leaf)
                leaf.layers = leaf.layers[:TRACED]
            leaves.append(leaf)
        # What the capture learns is about the call: the same dictionary.
        return FlatCall(call.spec, leaves, call.torch_state, call.has_contents)


def find(model: torch.nn.Module) -> LayerList | None:
    """The longest list of layers that are alike; None when it is short."""
    found: LayerList | None = None
    for name, module in model.named_modules():
        if type(module) is torch.nn.ModuleList and len(module) >= FEWEST:
            if found is None or len(module) > found.count:
                numbers = _numbers(module)
                if numbers is not None:
                    found = LayerList(name, len(module), numbers)
    return found


def _numbers(layers: torch.nn.ModuleList) -> dict[str, set[str]] | None:
    """Attributes that are a layer's number; None for layers that differ in more than that."""
    parts = [list(layer.named_modules()) for layer in layers]
    first = parts[0]
    held = [id(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())]
    if len(set(held)) != len(held):  # weights that two of them share
        return None
    if any([n for n, _ in others] != [n for n, _ in first] for others in parts):
        return None
    numbers: dict[str, set[str]] = {}
    for at, (name, _) in enumerate(first):
        found = _numbers_of([others[at][1] for others in parts])
        if found is None:
            return None
        if found:
            numbers[name] = found
    return numbers


def _numbers_of(counterparts: list[torch.nn.Module]) -> set[str] | None:
    """`_numbers` of the module of each layer at one place."""
    first = counterparts[0]
    numbers = {
        name
        for name, value in vars(first).items()
        if type(value) is int and vars(counterparts[1]).get(name) == value + 1
    }
    for number, other in enumerate(counterparts[1:], 1):
        if type(first) is not type(other) or vars(first).keys() != vars(other).keys():
            return None
        for own, its in ((first._parameters, other._parameters), (first._buffers, other._buffers)):
            if not _same_tensors(own, its):
                return None
        for name in vars(first).keys() - _PARTS:
            own, its = vars(first)[name], vars(other)[name]
            if not (_same(own + number, its) if name in numbers else _same(own, its)):
                return None
    return numbers


def _same_tensors(own: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def described(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        return type(t), t.dtype, t.shape, t.stride(), t.device

    return {n: described(t) for n, t in own.items()} == {n: described(t) for n, t in other.items()}


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (int, float, str, torch.dtype, torch.device)):
        return bool(a == b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (dict, set, frozenset)) and not a and not b:
        return True
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return False  # an object of its own: what forward does with it is not known
