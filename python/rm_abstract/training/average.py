"""`Average`: gradients averaged over a group of processes, by buckets, over torch.distributed.

A step is one round, the same for every process: all buckets are started in order, then each is
waited for. A program has the two halves as operators (all_reduce_start, all_reduce_wait) that call
this object; an eager step asks for the round by `average`. Both send the same, so a process whose
step is compiled meets one whose step is not. What is sent lies in memory of its own: a program that
ends in between leaves nothing behind that another process writes to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rm_abstract import _core

# Of torch's DistributedDataParallel. The first one is small: it starts early in the backward.
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 << 20, 1 << 20


class Average:
    """Of one training loop. ``buckets``: places of parameters, in the order of the backward."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.number: int = _core.add_group(self)  # what operators call it
        self.parameters: list[torch.Tensor] = []
        self.buckets: list[list[int]] = []
        self.begun = False  # something was sent since somebody set this
        self.interrupt: KeyboardInterrupt | None = None  # that came in a round
        self.local: list[list[torch.Tensor]] = []  # this process's part of a round that was kept
        self._signature: list[Any] = []
        self._flat: list[torch.Tensor] = []  # by bucket; behind the first one flags, by parameter
        self._views: list[list[torch.Tensor]] = []  # of `_flat`, as gradients
        self._flags = torch.empty(0)
        self._works: dict[int, Any] = {}
        self._beside: dict[int, list[torch.Tensor]] | None = None

    def fit(self, parameters: Sequence[torch.Tensor]) -> None:
        """Makes buckets for them, which are alike in all processes."""
        signature = [(id(p), p.shape, p.dtype, p.device) for p in parameters]
        if signature == self._signature:
            return
        self.parameters, self._signature = list(parameters), signature
        self.buckets, self._flat, self._views = _buckets(self.parameters), [], []
        for bucket in self.buckets:
            held = [self.parameters[i] for i in bucket]
            flags = 0 if self._flat else len(self.parameters)
            count = sum(p.numel() for p in held)
            flat = torch.zeros(count + flags, dtype=held[0].dtype, device=held[0].device)
            parts = torch.split(flat[:count], [p.numel() for p in held])
            self._flat.append(flat)
            self._views.append([v.view(p.shape) for v, p in zip(parts, held, strict=True)])
            if flags:
                self._flags = flat[count:]

    # ---- the halves, which programs call -------------------------------------------------------

    @torch.no_grad()
    def start(self, bucket: int, tensors: list[torch.Tensor], has: Any = None) -> None:
        """Sends this process's gradients of a bucket. ``has``: which of all parameters have one."""
        if self._beside is not None:
            self._beside[bucket] = [t.clone() for t in tensors]
            return
        self.begun = True
        try:
            torch._foreach_copy_(self._views[bucket], tensors)
            if bucket == 0:
                self._flags.fill_(1.0) if has is None else self._flags.copy_(has)
            work = dist.all_reduce(self._flat[bucket], group=self.group, async_op=True)
            self._works[bucket] = work
        except KeyboardInterrupt as interrupt:  # a program makes an error of ours of it
            self.interrupt = interrupt
            raise

    @torch.no_grad()
    def wait(self, bucket: int, tensors: list[torch.Tensor]) -> None:
        """Writes the averages of a bucket. Raises torch.distributed's error.

        An interrupt while it waits is kept for the end of the step: the others make theirs.
        """
        try:
            self._wait(bucket, tensors)
        except KeyboardInterrupt as interrupt:
            self.interrupt = interrupt
            self._wait(bucket, tensors)

    def _wait(self, bucket: int, tensors: list[torch.Tensor]) -> None:
        """May be cut short and called again."""
        if self._beside is None and bucket in self._works:
            self._works[bucket].wait()
        torch._foreach_copy_(tensors, self._views[bucket])
        torch._foreach_div_(tensors, dist.get_world_size(self.group))
        if self._beside is None:
            self._works.pop(bucket, None)

    # ---- whole rounds --------------------------------------------------------------------------

    def average(self, parameters: Sequence[torch.Tensor], keep: bool = False) -> None:
        """Makes every ``.grad`` the mean over the group. None counts as zeros where another process
        has a gradient, and stays where none has. ``keep``: `local` is what this process had."""
        self.fit(parameters)
        lacks = [p.grad is None for p in parameters]
        has = torch.tensor([0.0 if lack else 1.0 for lack in lacks]) if any(lacks) else None
        sent = [[_gradient(parameters[i]) for i in bucket] for bucket in self.buckets]
        self.local = [[t.clone() for t in row] for row in sent] if keep else []
        for bucket, tensors in enumerate(sent):
            self.start(bucket, tensors, has)
        for bucket, tensors in enumerate(sent):
            self.wait(bucket, tensors)
        if has is None:
            return
        reached = self._flags.tolist()  # by any process
        for places, tensors in zip(self.buckets, sent, strict=True):
            for i, mean in zip(places, tensors, strict=True):
                if lacks[i] and reached[i] > 0:
                    parameters[i].grad = mean

    @contextmanager
    def beside(self) -> Iterator[dict[int, list[torch.Tensor]]]:
        """Within it nothing is sent: a program gets the averages of the round before, and what it
        would have sent is collected, by bucket."""
        self._beside = {}
        try:
            yield self._beside
        finally:
            self._beside = None

    def abandon(self) -> None:
        """After a round that failed: its memory is not used again."""
        self._works.clear()
        self._signature = []


def _gradient(p: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def _buckets(parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """In the order of the backward, of one type each, up to a size and one parameter at least."""
    out: list[list[int]] = []
    size, dtype = 0, None
    for i in reversed(range(len(parameters))):
        p = parameters[i]
        most = FIRST_BUCKET_BYTES if len(out) == 1 else BUCKET_BYTES
        if not out or dtype != p.dtype or size + p.nbytes > most:
            out.append([])
            size, dtype = 0, p.dtype
        out[-1].append(i)
        size += p.nbytes
    return out
