"""Digests of weights: what they hold, by which a verdict of the parity gate is found.

A warm first call reads its record and makes its program while other threads read the weights.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from rm_abstract import _core
from rm_abstract.guards import writes

_MOST_THREADS = 8


class WeightDigests:
    """Of the weights of one module. What was read ahead counts as long as nothing was written."""

    def __init__(self) -> None:
        self._ahead: _Ahead | None = None

    def begin(self, tensors: Iterable[torch.nn.Parameter]) -> None:
        """Starts to read those on the host, on other threads than this one. Parameters: of writes
        through their `data` the process hears (guards/writes.py)."""
        found = {_stamp(t): t.detach() for t in tensors if t.device.type == "cpu"}
        found.pop(None, None)
        clock = writes.registry().clock
        # This thread goes on meanwhile.
        shares = _shares(found, found, max(1, _threads() - 1))
        pool = ThreadPoolExecutor(max(1, len(shares)))
        read = {}
        for share in shares:
            future = pool.submit(_contents, found, share)
            read.update(dict.fromkeys(share, future))
        pool.shutdown(wait=False)
        self._ahead = _Ahead(read, list(found.values()), clock, os.getpid())

    def forget(self) -> None:
        """Lets the memory go that was read ahead."""
        self._ahead = None

    def of(self, weights: dict[str, torch.Tensor]) -> bytes:
        """One digest over names, types and contents."""
        read: dict[Hashable, Future[dict[Hashable, bytes]]] = {}
        if self._ahead is not None and self._ahead.holds():
            read = self._ahead.read
        stamps = {name: _stamp(tensor) for name, tensor in weights.items()}
        missing = [name for name in weights if stamps[name] not in read]
        shares = _shares(missing, weights, _threads())
        contents: dict[Hashable, bytes] = {}
        if len(shares) == 1:
            contents = _contents(weights, missing)
        elif shares:
            with ThreadPoolExecutor(len(shares)) as pool:
                for part in pool.map(lambda share: _contents(weights, share), shares):
                    contents.update(part)
        for name, stamp in stamps.items():
            if name not in contents:
                contents[name] = read[stamp].result()[stamp]
        heads = {n: f"{n}|{t.dtype}|{list(t.shape)}|".encode() for n, t in weights.items()}
        return bytes(_core.cache.digest(b"".join(heads[n] + contents[n] for n in sorted(weights))))


class _Ahead(NamedTuple):
    read: dict[Hashable, Future[dict[Hashable, bytes]]]  # by stamp: what reads the tensor
    held: list[torch.Tensor]  # else their memory could become another tensor's
    clock: int
    pid: int

    def holds(self) -> bool:
        """False when something was written unseen, or a fork left the threads behind."""
        return self.clock == writes.registry().clock and self.pid == os.getpid()


def _threads() -> int:
    """Hashing leaves the GIL, so threads help: one a core up to where memory is the limit."""
    return min(torch.get_num_threads(), _MOST_THREADS)


def _shares(
    names: Iterable[Any], tensors: Mapping[Any, torch.Tensor], count: int
) -> list[list[Any]]:
    """The names for each of so many threads. Handing out single tensors would cost more than
    hashing small ones."""
    ordered = sorted(names, key=lambda name: tensors[name].numel(), reverse=True)
    return [ordered[first::count] for first in range(min(count, len(ordered)))]


def _contents(tensors: Mapping[Any, torch.Tensor], names: Iterable[Any]) -> dict[Hashable, bytes]:
    return {name: _digest(tensors[name].detach()) for name in names}


def _digest(tensor: torch.Tensor) -> bytes:
    """Of the elements; empty for none."""
    if not tensor.numel():
        return b""
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return bytes(_core.cache.digest(flat.numpy()))


def _stamp(tensor: torch.Tensor) -> Hashable:
    """Another one after a write that a tensor counts; None for one that counts none."""
    if tensor.is_inference():
        return None
    return tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, tensor.stride()
