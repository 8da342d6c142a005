"""Digests of weights: what they hold, by which a verdict of the parity gate is found.

A warm first call reads its record and makes its program while other threads read the weights.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from rm_abstract import _core
from rm_abstract.guards import writes

_MOST_THREADS = 8
_SHARES = 4  # for each thread that reads ahead; who needs the digest reads what was not begun


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
        threads = max(1, _threads() - 1)  # this one goes on meanwhile
        pool = ThreadPoolExecutor(threads)
        read = {}
        for stamps in _shares(found, found, _SHARES * threads):
            share = _Share({stamp: found[stamp] for stamp in stamps})
            pool.submit(share.run)
            read.update(dict.fromkeys(stamps, share))
        pool.shutdown(wait=False)
        self._ahead = _Ahead(read, list(found.values()), clock, os.getpid())

    def forget(self) -> None:
        """Lets the memory go that was read ahead."""
        self._ahead = None

    def of(self, weights: dict[str, torch.Tensor]) -> bytes:
        """One digest over names, types and contents."""
        read: dict[Hashable, _Share] = {}
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
        ahead = {name: read[stamps[name]] for name in weights if name not in contents}
        for share in reversed(dict.fromkeys(ahead.values())):  # the threads begin at the front
            share.run()
        contents.update({name: share.contents()[stamps[name]] for name, share in ahead.items()})
        heads = {n: f"{n}|{t.dtype}|{list(t.shape)}|".encode() for n, t in weights.items()}
        return bytes(_core.cache.digest(b"".join(heads[n] + contents[n] for n in sorted(weights))))


class _Share:
    """Some of the tensors, read by the first thread that comes to it."""

    def __init__(self, tensors: dict[Hashable, torch.Tensor]) -> None:
        self._tensors = tensors
        self._begun = threading.Lock()
        self._read: Future[dict[Hashable, bytes]] = Future()

    def run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._read.set_result(_contents(self._tensors, self._tensors))
        except BaseException as error:  # for whoever asks for the contents
            self._read.set_exception(error)

    def contents(self) -> dict[Hashable, bytes]:
        """By stamp, once it is read."""
        return self._read.result()


class _Ahead(NamedTuple):
    read: dict[Hashable, _Share]  # by stamp: what reads the tensor
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
    return {name: digest_of(tensors[name].detach()) for name in names}


def digest_of(tensor: torch.Tensor) -> bytes:
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
