"""Caches of state-space models as tensors: [convolution state, recurrent state] a layer.

transformers overwrites states in place, so copies are real copies and a trace works on clones.
Only filled caches are tensors: the first call of a generation, which makes them, is a Decline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rm_abstract.base.decline import Decline

_LAYER = "LinearAttentionLayer"


def is_states(cache: Any) -> bool:
    """True for a DynamicCache whose layers hold states; hybrids have other layers too."""
    layers: Any = getattr(cache, "layers", None) or ()
    return len(layers) > 0 and type(layers[0]).__name__ == _LAYER


def read(cache: Any) -> list[torch.Tensor] | Decline:
    tensors: list[torch.Tensor] = []
    for layer in cache.layers:
        if type(layer).__name__ != _LAYER or layer.number_of_states != 1 or layer.record_past:
            return Decline("RM114", f"a cache with a {type(layer).__name__} among states")
        held = [layer.conv_states[0], layer.recurrent_states[0]]
        if not layer.has_previous_state[0] or any(t is None for t in held):
            return Decline("RM114", "a cache of states before its first use")
        tensors += held
    return tensors


def around(tensors: Sequence[torch.Tensor]) -> Any:
    """A cache of its own memory with these states."""
    return made([t.clone() for t in tensors])


def made(tensors: Sequence[torch.Tensor]) -> Any:
    """A cache that holds these very tensors."""
    from transformers import cache_utils

    cache: Any = cache_utils.DynamicCache()
    cache.layers = [getattr(cache_utils, _LAYER)() for _ in tensors[::2]]
    commit(cache, tensors)
    return cache


def commit(cache: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Stores the states a call left."""
    for layer, conv, recurrent in zip(cache.layers, tensors[::2], tensors[1::2], strict=True):
        layer.conv_states[0], layer.recurrent_states[0] = conv, recurrent
        layer.is_conv_states_initialized[0] = layer.is_recurrent_states_initialized[0] = True
        layer.has_previous_state[0] = True
        layer.conv_kernel_size[0] = conv.shape[-1]
        layer.dtype, layer.device = conv.dtype, conv.device


def size_pattern(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What a capture of this cache is specialised on."""
    return ("states", *(tuple(d if d < 2 else 2 for d in t.shape) for t in tensors[:2]))
