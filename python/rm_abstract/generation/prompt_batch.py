"""Prompts of several requests in one call of the model.

Rows are padded behind their ends: what follows a token changes nothing of it. The call gives the
logits of the last column alone; the last token of a shorter row is left to the row's first step.
Widths are few, so that few shapes are planned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rm_abstract.generation.rows import Calls
from rm_abstract.kv.device_cache import DeviceCache, DeviceLayer

_WIDTHS = 32  # multiples of it: fewer columns take about as long


def computed_together(
    calls: Calls, pieces: Sequence[Sequence[int]], caches: Sequence[DeviceCache]
) -> list[tuple[torch.Tensor | None, DeviceCache]]:
    """Computes each of `pieces` behind what its cache holds; the caches are equally long, and are
    read, not written.

    Returns for each row the logits ``[vocabulary]`` of its last token, None where it ends before
    the last column, and a cache with all of its tokens. The returned caches share buffers and hold
    one row each. Raises what the model raises.
    """
    at, rows = caches[0].length, len(pieces)
    width = -(-max(map(len, pieces)) // _WIDTHS) * _WIDTHS
    common = calls.new_cache()
    if at:
        _begin_with(common, caches, at + width)
    ids = [[*piece, *[0] * (width - len(piece))] for piece in pieces]
    # Padding stays where the row ends, also for models that count positions by the mask: there may
    # be none beyond.
    places = [[at + min(n, len(piece) - 1) for n in range(width)] for piece in pieces]
    mask = torch.ones(rows, at + width, dtype=torch.long)
    for row, piece in enumerate(pieces):
        mask[row, at + len(piece) :] = 0
    logits = calls.logits(torch.tensor(ids), torch.tensor(places), mask, common)
    return [
        (logits[row, -1] if len(piece) == width else None, _row_of(common, row, at + len(piece)))
        for row, piece in enumerate(pieces)
    ]


def _begin_with(common: DeviceCache, caches: Sequence[DeviceCache], room: int) -> None:
    """The content of `caches`, row after row."""
    at = caches[0].length
    for number, layer in enumerate(common.layers):
        parts = [cache.layers[number] for cache in caches]
        layer.make_room(len(caches), parts[0].shape(), room)
        for row, part in enumerate(parts):
            layer.key_buffer[row, :, :at] = part.key_buffer[0, :, :at]
            layer.value_buffer[row, :, :at] = part.value_buffer[0, :, :at]
    common.advance(at)


def _row_of(common: DeviceCache, row: int, length: int) -> DeviceCache:
    """A view of one row, of so many positions."""
    layers = []
    for whole in common.layers:
        layer = DeviceLayer(whole.sliding_window)
        layer.key_buffer = whole.key_buffer[row : row + 1]
        layer.value_buffer = whole.value_buffer[row : row + 1]
        layer.place = whole.place
        layers.append(layer)
    cache = DeviceCache(layers, common.expected)
    cache.advance(length)
    return cache
