"""A module's weights in memory that workers map: one copy for all programs that use the same."""

from __future__ import annotations

import threading
from typing import Any

import torch

from rm_abstract.worker.shared_tensors import weights_block

_Identity = tuple[Any, ...]


class WeightBlocks:
    """Keeps the last copy. Whoever hears that weights changed calls `forget`: a write through
    `data`, or by an optimiser that is fused, leaves a tensor's address and version as they were.
    Thread safe."""

    def __init__(self) -> None:
        self._last: tuple[_Identity, Any] | None = None
        self._lock = threading.Lock()

    def of(self, weights: dict[str, torch.Tensor]) -> Any:
        """A _core.worker.Weights with these; None for none."""
        if not weights:
            return None
        identity = tuple(
            (n, t.data_ptr(), t._version, t.dtype, t.shape, t.stride()) for n, t in weights.items()
        )
        with self._lock:
            if self._last is not None and self._last[0] == identity:
                return self._last[1]
            block = weights_block(weights)
            self._last = (identity, block)
            return block

    def forget(self) -> None:
        with self._lock:
            self._last = None
