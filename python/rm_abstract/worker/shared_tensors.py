"""Torch tensors over memory shared with a worker; a tensor keeps the mapping it lies in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rm_abstract.worker.dtypes import DTYPES


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
