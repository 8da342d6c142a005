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
from rm_abstract.kv import kv_cache

TRACED = 4  # the first, two whose windows are compared, and the one the rest of the model follows
FEWEST = 8  # of a list that is worth it
_PARTS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class LayerList:
    """`name` of the list in the model, and how many layers are in it."""

    name: str
    count: int

    def shorten(self, model: torch.nn.Module) -> None:
        """Takes all but the first layers out of a model that nobody else has."""
        layers = model.get_submodule(self.name)
        for number in range(TRACED, self.count):
            del layers._modules[str(number)]

    def shortened(self, call: FlatCall) -> FlatCall | None:
        """The call with a cache of as many layers; None where it has another one."""
        leaves: list[Any] = []
        for leaf in call.leaves:
            if not isinstance(leaf, torch.Tensor) and kv_cache.read(leaf):
                if not kv_cache.is_device(leaf) or len(leaf.layers) != self.count:
                    return None
                if leaf.residence is not None:
                    return None  # its buffers are in another process
                leaf = copy.copy(leaf)
                leaf.layers = leaf.layers[:TRACED]
            leaves.append(leaf)
        short = FlatCall(call.spec, leaves)
        short.torch_state = call.torch_state  # what the capture learns is about the call
        return short


def find(model: torch.nn.Module) -> LayerList | None:
    """The longest list of layers that are alike; None when it is short."""
    found: LayerList | None = None
    for name, module in model.named_modules():
        if type(module) is torch.nn.ModuleList and len(module) >= FEWEST:
            if (found is None or len(module) > found.count) and _all_alike(module):
                found = LayerList(name, len(module))
    return found


def _all_alike(layers: torch.nn.ModuleList) -> bool:
    parts = [list(layer.named_modules()) for layer in layers]
    first = parts[0]
    held = [id(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())]
    if len(set(held)) != len(held):  # weights that two of them share
        return False
    for number, others in enumerate(parts[1:], 1):
        if [n for n, _ in others] != [n for n, _ in first]:
            return False
        if not all(_alike(a, b, number) for (_, a), (_, b) in zip(first, others, strict=True)):
            return False
    return True


def _alike(a: torch.nn.Module, b: torch.nn.Module, number: int) -> bool:
    """Whether a module of the first layer and its counterpart differ in weights and number only."""
    if type(a) is not type(b) or vars(a).keys() != vars(b).keys():
        return False
    for own, other in ((a._parameters, b._parameters), (a._buffers, b._buffers)):
        if not _same_tensors(own, other):
            return False
    rest = [name for name in vars(a) if name not in _PARTS]
    return all(_same(vars(a)[name], vars(b)[name], number) for name in rest)


def _same_tensors(own: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def described(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        return type(t), t.dtype, t.shape, t.stride(), t.device

    return {n: described(t) for n, t in own.items()} == {n: described(t) for n, t in other.items()}


def _same(a: Any, b: Any, number: int) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is int:
        return bool(a == b or b - a == number)  # layers know their number
    if isinstance(a, (float, str, torch.dtype, torch.device)):
        return bool(a == b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y, number) for x, y in zip(a, b, strict=True))
    if isinstance(a, (dict, set, frozenset)) and not a and not b:
        return True
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k], number) for k in a)
    return False  # an object of its own: what forward does with it is not known
