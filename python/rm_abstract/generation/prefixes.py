"""Keys and values of earlier prompts, for prompts that begin alike.

Invariant: what is lent is copied, so a kept prompt never changes; the bytes kept are bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from rm_abstract.kv.device_cache import DeviceCache

_SHORTEST = 16  # fewer tokens in common are computed sooner than looked up


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def _bytes(cache: DeviceCache) -> int:
    buffers = [b for layer in cache.layers for b in (layer.key_buffer, layer.value_buffer)]
    return sum(b.numel() * b.element_size() for b in buffers if b is not None)


class Prefixes:
    """Prompts by last use. For one thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._kept: OrderedDict[tuple[int, ...], DeviceCache] = OrderedDict()
        self._held = 0

    @property
    def held_bytes(self) -> int:
        return self._held

    def lend(self, prompt: Sequence[int], cache: DeviceCache) -> int:
        """Fills the empty `cache` with the longest known beginning of `prompt`; its length.

        At least one token of the prompt is left to be computed: its logits are wanted.
        """
        best, found = 0, None
        for tokens in self._kept:
            count = min(_common(tokens, prompt), len(prompt) - 1)
            if count > best:
                best, found = count, tokens
        if found is None or best < _SHORTEST:
            return 0
        self._kept.move_to_end(found)
        source = self._kept[found]
        for layer, kept in zip(cache.layers, source.layers, strict=True):
            layer.make_room(1, kept.shape(), len(prompt))
            layer.key_buffer[:, :, :best] = kept.key_buffer[:, :, :best]
            layer.value_buffer[:, :, :best] = kept.value_buffer[:, :, :best]
        cache.advance(best)
        return best

    def keep(self, prompt: Sequence[int], cache: DeviceCache) -> None:
        """`cache` holds all of `prompt` and is nobody else's from now on."""
        size, tokens = _bytes(cache), tuple(prompt)
        if len(tokens) < _SHORTEST or size > self._most or tokens in self._kept:
            return
        self._kept[tokens] = cache
        self._held += size
        while self._held > self._most:
            _, oldest = self._kept.popitem(last=False)
            self._held -= _bytes(oldest)
