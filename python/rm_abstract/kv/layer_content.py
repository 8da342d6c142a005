"""What a cache of transformers leaves in a layer, put there without a concatenation."""

from __future__ import annotations

import functools
from typing import Any

import torch


def put(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Makes these tensors, [batch, heads, positions, head size], the layer's content."""
    layer.device = keys.device
    if _knows_its_dtype():
        layer.dtype = keys.dtype
    layer.keys, layer.values = keys, values
    layer.is_initialized = True


@functools.cache
def _knows_its_dtype() -> bool:
    """Whether a layer of this version of transformers has the attribute once it holds something."""
    from transformers import cache_utils

    layer: Any = cache_utils.DynamicLayer
    filled = layer()
    filled.lazy_initialization(torch.empty(1, 1, 0, 1), torch.empty(1, 1, 0, 1))
    return hasattr(filled, "dtype")
