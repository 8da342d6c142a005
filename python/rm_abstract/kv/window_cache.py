"""Caches whose layers keep the last positions of a sliding window, as a call that made them leaves
them.

transformers makes such a cache for a model with `sliding_window` in its configuration: a layer
holds the keys and values of at most `window - 1` positions and counts all it has seen. A program
returns one; one that is given to a call is left to PyTorch (`kv_cache.read` declines it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.kv import layer_content

_LAYER = "DynamicSlidingWindowLayer"


def is_windowed(cache: Any) -> bool:
    """True for a DynamicCache in which at least one layer keeps a window."""
    if type(cache).__name__ != "DynamicCache":
        return False
    return any(type(layer).__name__ == _LAYER for layer in cache.layers)


def windows(cache: Any) -> list[int | None]:
    """Positions of each layer's window; None for a layer that keeps all."""
    return [
        int(layer.sliding_window) if type(layer).__name__ == _LAYER else None
        for layer in cache.layers
    ]


def read(cache: Any) -> tuple[list[torch.Tensor], Any] | Decline:
    """([key 0, value 0, key 1, ...], the positions seen): both symbolic in a trace."""
    tensors: list[torch.Tensor] = []
    seen: list[Any] = []
    for layer in cache.layers:
        kind = type(layer).__name__
        if kind not in (_LAYER, "DynamicLayer") or not layer.is_initialized:
            return Decline("RM114", f"a cache with a {kind} among windows, or an empty layer")
        if kind == _LAYER:
            if getattr(layer, "record_past", False):
                return Decline("RM114", "a cache that keeps what left its window")
            seen.append(layer.cumulative_length)
        tensors += [layer.keys, layer.values]
    if any(count != seen[0] for count in seen):
        return Decline("RM114", "a cache whose layers have seen different numbers of positions")
    return tensors, seen[0]


def made(tensors: Sequence[torch.Tensor], kept: Sequence[int | None], seen: int) -> Any:
    """A cache that holds these very tensors, after `seen` positions. `kept` is `windows` of it."""
    from transformers import cache_utils

    cache: Any = cache_utils.DynamicCache()
    plain: Any = cache_utils.DynamicLayer
    cache.layers = []
    for window, keys, values in zip(kept, tensors[::2], tensors[1::2], strict=True):
        if window is None:
            layer = plain()
        else:
            layer = getattr(cache_utils, _LAYER)(sliding_window=window)
            layer._sliding_window_tensor = layer._sliding_window_tensor.to(keys.device)
            layer.cumulative_length = seen
        layer_content.put(layer, keys, values)
        cache.layers.append(layer)
    return cache
