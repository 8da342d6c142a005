"""`ParallelStep`: one step of data parallel training, a process a device, over torch.distributed.

Every process computes loss and gradients of its own part of the batch by a compiled program; the
gradients are averaged in buckets; scaling, clipping and the update are torch's. Of several
micro-batches only the last is followed by the averaging, as under DistributedDataParallel's
``no_sync``. Parameters change only after every process had its gradients, so a process that fails
leaves all models as they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from rm_abstract.base.config import Settings
from rm_abstract.training.loss import CompiledLoss
from rm_abstract.training.place import device_type

_BUCKET_BYTES = 25 << 20  # of torch's DistributedDataParallel


class ParallelStep:
    """See ``rm_abstract.compile_parallel_step``."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Any,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        group: Any,
        clip_norm: float | None = None,
        precision: str = "auto",
        clip_value: float | None = None,
        scaler: Any = None,
        accumulate: int = 1,
    ) -> None:
        if clip_norm is not None and clip_value is not None:
            raise ValueError("[compile_parallel_step] expected clip_norm or clip_value, got both")
        if accumulate < 1:
            raise ValueError(
                f"[compile_parallel_step] expected 1 micro-batch or more, got {accumulate}"
            )
        if scaler is None and precision == "fp16":
            scaler = torch.amp.GradScaler(device_type(model.parameters()))
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        self.model, self.optimizer, self.group = model, optimizer, group
        self.clip_norm, self.clip_value, self.scaler = clip_norm, clip_value, scaler
        self.accumulate = accumulate  # micro-batches, and so calls, of one step
        self.accumulated = 0  # whose gradients wait, of this process alone, in `.grad`
        self.grad_norm: torch.Tensor | None = None  # of the last step, when it clips to one
        self._loss = CompiledLoss(model, loss_fn, settings, precision, scaler)
        first = dist.get_global_rank(group, 0) if group is not dist.group.WORLD else 0
        with torch.no_grad():
            for t in [*model.parameters(), *model.buffers()]:
                dist.broadcast(t, first, group=group)

    def __call__(self, inputs: Any, *targets: Any) -> torch.Tensor:
        """Trains on this process's part. Returns its loss before the update."""
        if self.accumulated == 0:
            self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(inputs, *targets)  # when it fails, nothing was added
        try:
            part = loss if self.accumulate == 1 else loss / self.accumulate
            (part if self.scaler is None else self.scaler.scale(part)).backward()
            self.accumulated += 1
            if self.accumulated < self.accumulate:
                return loss.detach()
            self._update()
        except BaseException:  # some gradients may be there: the step starts over
            self._drop()
            raise
        self._drop()
        return loss.detach()

    def _update(self) -> None:
        """Of all processes: each has the same gradients, and so the same verdict on them."""
        trained = [p for g in self.optimizer.param_groups for p in g["params"] if p.requires_grad]
        average_gradients(trained, self.group)
        if self.scaler is not None and (self.clip_norm is not None or self.clip_value is not None):
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None:
            self.grad_norm = torch.nn.utils.clip_grad_norm_(trained, self.clip_norm)
        elif self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(trained, self.clip_value)
        if self.scaler is None:
            self.optimizer.step()
            return
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _drop(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.accumulated = 0

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
