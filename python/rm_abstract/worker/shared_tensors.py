"""Torch tensors over memory shared with a worker; a tensor keeps the mapping it lies in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.worker.dtypes import DTYPE_NAMES, DTYPES


def weights_block(weights: Mapping[str, torch.Tensor]) -> Any:
    """A copy of weights in memory that workers map; None for none."""
    if not weights:
        return None
    rows = [(name, DTYPE_NAMES[t.dtype], list(t.shape)) for name, t in weights.items()]
    block = _core.worker.Weights(rows)
    slots = tensors_in(block.memory, block.places, [dtype for _, dtype, _ in rows])
    with torch.no_grad():
        for slot, tensor in zip(slots, weights.values(), strict=True):
            slot.copy_(tensor)
    block.digest()
    return block


def tensors_in(mapping: Any, places: Sequence[Any], dtypes: Sequence[str]) -> list[torch.Tensor]:
    """Torch tensors over places (offset, bytes, dims) of shared memory, which they keep mapped."""
    tensors = []
    for (offset, size, dims), dtype in zip(places, dtypes, strict=True):
        if size == 0:
            tensors.append(torch.empty(dims, dtype=DTYPES[dtype]))
            continue
        flat = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=offset)
        tensors.append(flat.view(DTYPES[dtype]).view(dims))
    return tensors
