"""A vendor's copies of weights on its device: one for all programs of a worker that have the same.

A model's programs (a prompt's, a token's, every bucket of sizes) are loaded one by one, each with
all of its weights; without this each would bring them to the device again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from rm_abstract.worker.tensors import Tensor

T = TypeVar("T")


class Held(Generic[T]):
    """Keeps ``value`` on the device: a loaded program keeps those of its weights."""

    def __init__(self, value: T) -> None:
        self.value = value


class SharedWeights(Generic[T]):
    """``make(tensor)`` brings a weight to the device. It copies: the tensor's memory goes with the
    program it was given to, and the copy serves others. Thread safe."""

    def __init__(self, make: Callable[[Tensor], T]) -> None:
        self._make = make
        self._held: weakref.WeakValueDictionary[tuple[object, ...], Held[T]] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()

    def of(self, tensor: Tensor) -> Held[T]:
        """The copy that a loaded program has of the same content, else a new one."""
        if not tensor.digest:
            return Held(self._make(tensor))
        key = (tensor.digest, tensor.dtype, tensor.shape)
        with self._lock:
            found = self._held.get(key)
            if found is None:
                found = self._held[key] = Held(self._make(tensor))
            return found
