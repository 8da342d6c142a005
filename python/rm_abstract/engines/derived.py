"""What derives from a module's weights (quantised, cast, joined), held once for all its programs.

A program keeps what it uses; the pool only lets the next program find it. Tensors are told apart
by memory and version: after a write the derived values of before are not found again. Writes that
leave no trace there (through `data`, by a fused optimiser) are heard of, and the pool is left.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from rm_abstract import _core

_Identity = tuple[Any, ...]


class SharedWeights:
    """Which `_core.SharedConstants` a program over these weights may share. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: Any = None
        self._seen: dict[str, _Identity] = {}

    def of(self, weights: dict[str, torch.Tensor]) -> Any:
        """The pool; None when writes to a weight could not be noticed."""
        try:
            now = {name: _identity(tensor) for name, tensor in weights.items()}
        except RuntimeError:  # inference tensors have no version
            return None
        with self._lock:
            if self._pool is None or any(self._seen.get(n, i) != i for n, i in now.items()):
                self._pool, self._seen = _core.SharedConstants(), {}
            self._seen.update(now)
            return self._pool

    def forget(self) -> None:
        """Programs asked for from now on share with none of before."""
        with self._lock:
            self._pool, self._seen = None, {}


def _identity(tensor: torch.Tensor) -> _Identity:
    return (tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, tensor.stride())
