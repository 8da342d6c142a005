"""Torch tensors over memory shared with a worker; a tensor keeps the mapping it lies in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
DTYPE_NAMES = {value: name for name, value in _DTYPES.items()}


def tensors_in(mapping: Any, places: Sequence[Any], dtypes: Sequence[str]) -> list[torch.Tensor]:
    """Torch tensors over places (offset, bytes, dims) of shared memory, which they keep mapped."""
    tensors = []
    for (offset, size, dims), dtype in zip(places, dtypes, strict=True):
        if size == 0:
            tensors.append(torch.empty(dims, dtype=_DTYPES[dtype]))
            continue
        flat = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=offset)
        tensors.append(flat.view(_DTYPES[dtype]).view(dims))
    return tensors
