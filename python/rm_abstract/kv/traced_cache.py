"""The cache a capture of a generation step runs with: buffers and length are tensors of the graph.

transformers sees what it sees of a static cache: a length that is a tensor, masks over the whole
capacity. An update is a functional index_copy; the compiler makes it an append in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class TracedLayer(cast("Any", CacheLayerMixin)):  # type: ignore[misc]
    """One layer: `keys` and `values` are the buffers after the updates so far."""

    is_compileable = False

    def __init__(
        self, window: int | None, length: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self.before = length
        self.length = length
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("the buffers of a capture exist before it starts")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = key_states.shape[-2]
        positions = torch.arange(count, device=key_states.device) + self.length
        self.length = self.length + count
        self.keys = self.keys.index_copy(2, positions, key_states)
        self.values = self.values.index_copy(2, positions, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Any:
        return self.length

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class TracedCache(cast("Any", Cache)):  # type: ignore[misc]
    """`tensors` are the length and the buffers, as kv_cache.read gives them."""

    def __init__(self, windows: Sequence[int | None], tensors: Sequence[torch.Tensor]) -> None:
        length, buffers = tensors[0], tensors[1:]
        pairs = zip(windows, buffers[::2], buffers[1::2], strict=True)
        super().__init__(layers=[TracedLayer(w, length, k, v) for w, k, v in pairs])

    def content(self) -> list[torch.Tensor]:
        """The length and the buffers after the traced call."""
        tensors = [self.layers[0].length]
        for layer in self.layers:
            tensors += [layer.keys, layer.values]
        return tensors
