"""`EagerSteps`: what a compiled step does where it is eager's: torch's own loop, for one batch.

A step whose backward or update fails leaves no gradients behind: the next one starts over.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any

import torch

from rm_abstract.base.config import Settings
from rm_abstract.training import batch as batches
from rm_abstract.training import optimizers
from rm_abstract.training.place import device_type
from rm_abstract.training.routed import Routed, original


class EagerSteps(Routed):
    """Of one optimizer, which may clip, scale the loss and sum gradients of micro-batches."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Any,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        clip_norm: float | None,
        precision: str,
        clip_value: float | None,
        scaler: Any,
        accumulate: int,
    ) -> None:
        if scaler is None and precision == "fp16":
            scaler = torch.amp.GradScaler(device_type(model.parameters()))
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        super().__init__("compile_step", model, loss_fn, settings, precision, scaler)
        if clip_norm is not None and clip_value is not None:
            raise ValueError("[compile_step] expected clip_norm or clip_value, got both")
        if accumulate < 1:
            raise ValueError(f"[compile_step] expected 1 micro-batch or more, got {accumulate}")
        self.accumulate = accumulate  # micro-batches, and so calls, of one step
        self.accumulated = 0  # whose gradients wait in the parameters' `.grad`
        self.optimizer = optimizer
        self.clip_norm, self.clip_value = clip_norm, clip_value
        self.grad_norm: torch.Tensor | None = None  # of the last step, when it clips to one
        self._finite = True  # the last gradients, as the scaler saw them

    def _is_last(self) -> bool:
        """Whether the next micro-batch is the last of its step."""
        return self.accumulated + 1 >= self.accumulate

    def _watched(self, batch: Hashable, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        """Eager's step, from which it is learned whether the forward only computes."""
        effects = self._pure.watch(self._module, inputs, targets)
        loss = self._eager(inputs, targets, effects)
        if decline := self._pure.judge(effects, batch):
            self._note(decline)
        return loss

    def _eager(self, inputs: Any, targets: tuple[Any, ...], around: Any = None) -> torch.Tensor:
        """``around``: a context that the forward runs in."""
        self._counts["eager"] += 1
        last = self._is_last()
        with original():
            if self.accumulated == 0:
                self.optimizer.zero_grad(set_to_none=True)
            with around or nullcontext():
                loss = self._loss_of(inputs, targets)
            try:
                part = loss if self.accumulate == 1 else loss / self.accumulate
                (part if self.scaler is None else self.scaler.scale(part)).backward()
                if last:
                    self._eager_update()
            except BaseException:  # some gradients may be there: the step starts over
                self._drop()
                raise
        self.accumulated += 1
        if last:
            self._drop()
        return loss.detach()

    def _loss_of(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        return batches.loss_of(  # type: ignore[no-any-return]
            self.model, self.loss_fn, inputs, targets, self.precision, self._place.kind
        )

    def _eager_update(self) -> None:
        self._clip()
        if self.scaler is None:
            self.optimizer.step()
            return
        self.scaler.step(self.optimizer)
        self._finite = optimizers.was_finite(self.optimizer, self.scaler)
        self.scaler.update()

    def _drop(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.accumulated = 0

    def _clip(self) -> None:
        """Eager's gradients."""
        if self.clip_norm is None and self.clip_value is None:
            return
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        held = [p for g in self.optimizer.param_groups for p in g["params"]]
        if self.clip_norm is not None:
            self.grad_norm = torch.nn.utils.clip_grad_norm_(held, self.clip_norm)
        elif self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(held, self.clip_value)
