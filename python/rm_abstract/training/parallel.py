"""`ParallelStep`: one step of data parallel training, a process a device, over torch.distributed.

Every process computes loss and gradients of its own part of the batch by a compiled program; the
gradients are averaged in buckets; clipping and the update are torch's. Parameters change only after
every process had its gradients, so a process that fails leaves all models as they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from rm_abstract.base.config import Settings
from rm_abstract.training.loss import CompiledLoss

_BUCKET_BYTES = 25 << 20  # of torch's DistributedDataParallel


class ParallelStep:
    """See ``rm_abstract.compile_step`` with a ``process_group``."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Any,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        group: Any,
        clip_norm: float | None = None,
    ) -> None:
        self.model, self.optimizer, self.group = model, optimizer, group
        self.clip_norm = clip_norm
        self.grad_norm: torch.Tensor | None = None  # of the last step, when it clips
        self._loss = CompiledLoss(model, loss_fn, settings)
        first = dist.get_global_rank(group, 0) if group is not dist.group.WORLD else 0
        with torch.no_grad():
            for t in [*model.parameters(), *model.buffers()]:
                dist.broadcast(t, first, group=group)

    def __call__(self, inputs: Any, *targets: Any) -> torch.Tensor:
        """Trains on this process's part. Returns its loss before the update."""
        trained = [p for g in self.optimizer.param_groups for p in g["params"] if p.requires_grad]
        self.optimizer.zero_grad(set_to_none=True)
        try:
            loss = self._loss(inputs, *targets)
            loss.backward()  # type: ignore[no-untyped-call]
            average_gradients(trained, self.group)
            if self.clip_norm is not None:
                self.grad_norm = torch.nn.utils.clip_grad_norm_(trained, self.clip_norm)
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def report(self) -> dict[str, Any]:
        """As ``report`` of a compiled loss: this process's steps, compiled and eager, and why."""
        return self._loss.report()


def average_gradients(parameters: Iterable[torch.Tensor], group: Any) -> None:
    """Makes every ``.grad`` the mean over the group's processes, which all call it with the same
    parameters. None counts as zeros where another process has a gradient, and stays where none has.
    """
    held = list(parameters)
    present = torch.tensor([p.grad is not None for p in held], dtype=torch.int32)
    dist.all_reduce(present, group=group)
    reached = [p for p, count in zip(held, present.tolist(), strict=True) if count]
    for p in reached:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    size = dist.get_world_size(group)
    waiting = []
    for bucket in _buckets([p.grad for p in reached if p.grad is not None]):
        flat = torch.cat([g.reshape(-1) for g in bucket])
        waiting.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in waiting:
        work.wait()
        flat.div_(size)
        parts = torch.split(flat, [g.numel() for g in bucket])
        torch._foreach_copy_(bucket, [p.view_as(g) for p, g in zip(parts, bucket, strict=True)])


def _buckets(gradients: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """In the order of the backward, of one type each, up to a size."""
    out: list[list[torch.Tensor]] = []
    size = 0
    for g in reversed(gradients):
        if not out or out[-1][0].dtype != g.dtype or size + g.nbytes > _BUCKET_BYTES:
            out.append([])
            size = 0
        out[-1].append(g)
        size += g.nbytes
    return out
