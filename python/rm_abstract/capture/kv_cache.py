"""transformers' DynamicCache as tensors: read before a call, written after a successful one.

Only caches whose layers are all plain DynamicLayer take part; anything else is a Decline. Nothing
is touched until `commit`, which only assigns attributes, so a failed run leaves the cache alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from rm_abstract.engines.base import Decline


def read(cache: Any) -> list[torch.Tensor] | Decline:
    """[key 0, value 0, key 1, ...]; empty when nothing was stored yet."""
    from transformers.cache_utils import DynamicLayer

    if getattr(cache, "offloading", False):
        return Decline("RM104", "a cache that offloads its layers")
    tensors: list[Any] = []
    layers = cache.layers
    for layer in layers:
        if type(layer) is not DynamicLayer:
            return Decline("RM104", f"a cache with a {type(layer).__name__}")
        if layer.is_initialized and layer.keys is not None and layer.keys.numel():
            tensors.append(layer.keys)
            tensors.append(layer.values)
    if tensors and len(tensors) != 2 * len(layers):
        return Decline("RM104", "a cache with some layers filled and some empty")
    if not layers and cache.layer_class_to_replicate is not DynamicLayer:
        return Decline("RM104", f"a cache of {cache.layer_class_to_replicate}")
    return tensors


def make(layers: int, tensors: Sequence[torch.Tensor]) -> Any:
    """A DynamicCache of `layers` plain layers that holds `tensors` (none: all empty)."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache: Any = DynamicCache()
    layer_type: Any = DynamicLayer
    cache.layers = [layer_type() for _ in range(layers)]
    if tensors:
        commit(cache, tensors)
    return cache


def commit(cache: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Stores [key 0, value 0, ...] as the cache's content."""
    from transformers.cache_utils import DynamicLayer

    layers, layer_type = cache.layers, cast("Any", DynamicLayer)
    while len(layers) * 2 < len(tensors):
        layers.append(layer_type())
    for layer, keys, values in zip(layers, tensors[::2], tensors[1::2], strict=True):
        layer.dtype, layer.device = keys.dtype, keys.device
        layer.keys, layer.values = keys, values
        layer.is_initialized = True
