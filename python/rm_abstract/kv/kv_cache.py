"""transformers' caches as tensors: read before a call, written after a successful one.

A DynamicCache of plain layers gives [key 0, value 0, key 1, ...] and takes new ones; an
EncoderDecoderCache gives those of its two caches. A DeviceCache gives [length, key buffer 0, value
buffer 0, ...], which the program appends to in place; a DevicePair is a pair whose first half is
one. Anything else is a Decline. Nothing a reader could notice changes before `commit`, which only
assigns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.kv import bundle, layer_content, state_cache, window_cache

_OURS = "rm_abstract.kv.device_cache"


def is_cache(value: Any) -> bool:
    """True for the four kinds (told apart by type, as the router does)."""
    kind = type(value)
    if kind.__name__ in ("DynamicCache", "EncoderDecoderCache"):
        return kind.__module__ == "transformers.cache_utils"
    return device_part(value) is not None


def is_pair(value: Any) -> bool:
    """True for an EncoderDecoderCache, with device buffers or without."""
    return type(value).__name__ in ("EncoderDecoderCache", "DevicePair")


def halves(pair: Any) -> tuple[Any, Any]:
    """The caches of self- and cross-attention."""
    return pair.self_attention_cache, pair.cross_attention_cache


def is_device(value: Any) -> bool:
    return type(value).__name__ == "DeviceCache" and type(value).__module__ == _OURS


def device_part(value: Any) -> Any:
    """The DeviceCache that a value is, or holds for self-attention; None when there is none."""
    if is_device(value):
        return value
    kind = type(value)
    pair = kind.__name__ == "DevicePair" and kind.__module__ == _OURS
    return value.self_attention_cache if pair else None


def read(cache: Any) -> list[torch.Tensor] | Decline:
    """The tensors that stand for the cache; empty for a DynamicCache that stored nothing yet.

    A ModelOutput among the arguments is read the same way.
    """
    from transformers.cache_utils import DynamicLayer

    if bundle.is_bundle(cache):
        return bundle.read(cache)
    if is_device(cache):
        return _read_device(cache)
    if is_pair(cache):
        both: list[torch.Tensor] = []
        for half in halves(cache):
            held = read(half) if is_cache(half) else Decline("RM114", f"a {type(half).__name__}")
            if isinstance(held, Decline):
                return held
            both += held
        return both
    if getattr(cache, "offloading", False):
        return Decline("RM114", "a cache that offloads its layers")
    if state_cache.is_states(cache):
        return state_cache.read(cache)
    tensors: list[Any] = []
    layers = cache.layers
    for layer in layers:
        if type(layer) is not DynamicLayer:
            return Decline("RM114", f"a cache with a {type(layer).__name__}")
        if layer.is_initialized and layer.keys is not None and layer.keys.numel():
            tensors.append(layer.keys)
            tensors.append(layer.values)
    if tensors and len(tensors) != 2 * len(layers):
        return Decline("RM114", "a cache with some layers filled and some empty")
    if not layers and cache.layer_class_to_replicate is not DynamicLayer:
        return Decline("RM114", f"a cache of {cache.layer_class_to_replicate}")
    return tensors


def contents(cache: Any) -> list[Any] | Decline:
    """What a call left in a cache it returned, for comparisons: the tensors as `read` gives them,
    of a cache of windows also their lengths and the positions seen."""
    if not window_cache.is_windowed(cache):
        return read(cache)
    held = window_cache.read(cache)
    if isinstance(held, Decline):
        return held
    return [*held[0], window_cache.windows(cache), held[1]]


def _read_device(cache: Any) -> list[torch.Tensor] | Decline:
    length = cache.length
    buffer = cache.layers[0].key_buffer
    tensors: list[torch.Tensor] = [_number(length, None if buffer is None else buffer.device)]
    for layer in cache.layers:
        if layer.key_buffer is None or layer.length != length:
            return Decline("RM114", "a cache whose layers differ in length")
        tensors.append(layer.key_buffer)
        tensors.append(layer.value_buffer)
    return tensors


def _number(value: int, device: torch.device | None) -> torch.Tensor:
    if device is None or device.type == "cpu":
        return torch.tensor(value)
    return torch.full((), value, dtype=torch.int64, device=device)  # no copy from the host


def length_of(cache: Any) -> int:
    """How many positions it holds. Raises Decline for a cache that cannot be read."""
    if is_device(cache):
        return int(cache.length)
    held = read(cache)
    if isinstance(held, Decline):
        raise held
    return int(held[0].shape[2]) if held else 0


def read_types(cache: Any) -> list[torch.Tensor] | Decline:
    """As `read`, for a look at types and sizes: content on a device stays there."""
    residence = getattr(cache, "residence", None)
    if residence is not None and residence.on_device:
        return [torch.tensor(cache.length), *residence.placeholders()]
    return read(cache)


def past_marks(cache: Any, tensors: Sequence[torch.Tensor]) -> list[bool]:
    """True for each tensor whose sizes another one of the cache stands for."""
    if bundle.is_bundle(cache) or state_cache.is_states(cache):
        return [False] * len(tensors)
    if is_pair(cache):
        marks: list[bool] = []
        for half in halves(cache):
            held = cast("list[torch.Tensor]", read(half))
            marks += past_marks(half, held)
        return marks
    first = 1 if is_device(cache) else 0
    return [i > first for i in range(len(tensors))]


def size_pattern(cache: Any, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What a capture of this cache is specialised on."""
    if bundle.is_bundle(cache):
        return bundle.size_pattern(cache, tensors)
    if state_cache.is_states(cache):
        return state_cache.size_pattern(tensors)
    if is_device(cache):  # heads and sizes are constants of the program
        layers = tuple((*s[:3], str(s[3])) for s in cache.shapes())
        return (layers, min(int(tensors[1].shape[0]), 2))
    if is_pair(cache):
        parts = [(half, cast("list[torch.Tensor]", read(half))) for half in halves(cache)]
        updated = tuple(sorted(cache.is_updated.items()))
        return (*(size_pattern(half, held) for half, held in parts), updated)
    first = tuple([d if d < 2 else 2 for d in tensors[0].shape]) if tensors else None
    return (len(cache.layers), first)


def copied(cache: Any) -> Any:
    """The cache as it is now, for a run that must not touch the user's. Raises Decline."""
    if bundle.is_bundle(cache):
        return cache  # nothing writes it
    if is_device(cache):
        return cache.copied()
    if is_pair(cache):
        pair = type(cache)(*(copied(half) for half in halves(cache)))
        pair.is_updated = dict(cache.is_updated)
        return pair
    held = read(cache)
    if isinstance(held, Decline):
        raise held
    if state_cache.is_states(cache):
        return state_cache.around(held)
    return make(len(cache.layers), held)


def traced(cache: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The cache a capture runs with: the same kind, holding the capture's tensors."""
    if bundle.is_bundle(cache):
        return bundle.rebuilt(cache, tensors)
    if state_cache.is_states(cache):
        return state_cache.around(tensors)
    if is_device(cache):
        from rm_abstract.kv.traced_cache import TracedCache

        return TracedCache([layer.sliding_window for layer in cache.layers], tensors)
    if is_pair(cache):
        first, second = halves(cache)
        count = len(cast("list[torch.Tensor]", read(first)))
        pair = type(cache)(traced(first, tensors[:count]), traced(second, tensors[count:]))
        pair.is_updated = dict(cache.is_updated)
        return pair
    return make(len(cache.layers), tensors)


def make(layers: int, tensors: Sequence[torch.Tensor]) -> Any:
    """A DynamicCache of `layers` plain layers that holds `tensors` (none: all empty)."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache: Any = DynamicCache()
    layer_type: Any = DynamicLayer
    cache.layers = [layer_type() for _ in range(layers)]
    if tensors:
        commit(cache, tensors)
    return cache


def make_pair() -> Any:
    """An encoder-decoder's cache that holds nothing yet."""
    from transformers.cache_utils import EncoderDecoderCache

    return EncoderDecoderCache(make(0, ()), make(0, ()))


def commit(cache: Any, tensors: Sequence[Any]) -> None:
    """Stores what a call left as the cache's content. None: updated in place, nothing to store."""
    from transformers.cache_utils import DynamicLayer

    if is_device(cache):
        for layer, keys, values in zip(cache.layers, tensors[1::2], tensors[2::2], strict=True):
            if keys is not None:
                layer.key_buffer = keys
            if values is not None:
                layer.value_buffer = values
        cache.advance(int(tensors[0]))
        return
    if state_cache.is_states(cache):
        state_cache.commit(cache, tensors)
        return
    layers, layer_type = cache.layers, cast("Any", DynamicLayer)
    while len(layers) * 2 < len(tensors):
        layers.append(layer_type())
    for layer, keys, values in zip(layers, tensors[::2], tensors[1::2], strict=True):
        layer_content.put(layer, keys, values)
