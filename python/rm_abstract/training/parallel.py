"""`ParallelStep`: one step of data parallel training, a process a device, over torch.distributed.

Every process computes loss and gradients of its own part of the batch. Where the optimiser has a
program, the averages over the group are a part of it: buckets are started within the backward as
soon as their gradients are there, and the update follows in the same program. Where it has none, or
where a process's loss does not reach all parameters, loss and gradients are `CompiledLoss`'s, and
the averages and the update are made outside. All of these send the same, so processes may differ:
then torch's update and the program's round differently, of the same averages. Where all make a step
in one way, their parameters stay equal bit for bit.
Parameters change only after every process had its gradients, so a process that fails leaves all
models as they were.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rm_abstract.base import listed_steps
from rm_abstract.base.config import Settings
from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import ExecutionError
from rm_abstract.base.scope import disabled_var
from rm_abstract.capture.training import Forward
from rm_abstract.training import check
from rm_abstract.training.average import Average
from rm_abstract.training.loss import CompiledLoss
from rm_abstract.training.program import StepProgram, Tied, compile_step_program
from rm_abstract.training.routed import PASSING
from rm_abstract.training.step import TrainingStep
from rm_abstract.training.stored import Stored


class ParallelStep(TrainingStep):
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
        super().__init__(
            model,
            loss_fn,
            optimizer,
            settings,
            clip_norm,
            None,
            precision,
            clip_value,
            scaler,
            accumulate,
        )
        self._name, self.group = "compile_parallel_step", group
        self._average = Average(group)
        self._loss = CompiledLoss(model, loss_fn, settings, precision, self.scaler)
        listed_steps.leave_out(self._loss)
        self._declined = False  # this step has no program of its own
        self._keeps = False  # the next round's local part, for a comparison
        first = dist.get_global_rank(group, 0) if group is not dist.group.WORLD else 0
        with torch.no_grad():
            for t in [*model.parameters(), *model.buffers()]:
                dist.broadcast(t, first, group=group)

    def __call__(self, inputs: Any, *targets: Any) -> torch.Tensor:
        """Trains on this process's part. Returns its loss before the update.

        Raises KeyboardInterrupt behind the step where one came while it waited for others.
        """
        self._declined, self._average.interrupt = False, None
        try:
            loss = super().__call__(inputs, *targets)
        except _Made as made:
            loss = made.loss
        except ExecutionError:
            if self._average.interrupt is None:
                raise
        if self._average.interrupt is not None:
            raise self._average.interrupt
        return loss

    # ---- one round a step ----------------------------------------------------------------------

    def _run(self, found: StepProgram, tensors: list[torch.Tensor]) -> torch.Tensor:
        self._average.begun = False
        try:
            return super()._run(found, tensors)
        except Decline as decline:
            self._check_not_begun(decline.detail)
            raise

    def _run_settled(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor | None:
        self._average.begun = False
        loss = super()._run_settled(inputs, targets)
        if loss is None:
            self._check_not_begun("a step that failed")
        return loss

    def _check_not_begun(self, why: str) -> None:
        """A step whose gradients are under way cannot be made again: others would not follow."""
        if self._average.begun:
            self._average.abandon()
            raise ExecutionError(
                "[compile_parallel_step] expected the gradients of every process, got an error "
                f"between their start and their end, before any parameter was updated: {why}"
            )

    def _both(
        self,
        found: StepProgram,
        key: Any,
        tensors: list[torch.Tensor],
        sums: list[torch.Tensor],
        copies: list[torch.Tensor],
        call: tuple[Any, tuple[Any, ...]],
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Eager makes the step, and its round is what the program gets."""
        sums, drawn = [g.clone() for g in sums], self._random.clone()
        self._keeps = True
        try:
            loss = self._beside(found, *call)
        finally:
            self._keeps = False
        after = self._random.clone()
        try:
            self._random.copy_(drawn)
            with self._average.beside() as sent:
                results = self._tried(found, key, tensors, sums, copies)
            self._compare(found, key, results[0], loss, sent)
        except Decline as decline:
            self._note(decline)
            raise _Made(loss) from None
        finally:
            self._random.copy_(after)
        return results, loss

    def _compare(
        self,
        found: StepProgram,
        key: Any,
        ours: torch.Tensor,
        loss: torch.Tensor,
        sent: dict[int, list[torch.Tensor]],
    ) -> None:
        """What the program would have sent, with what eager did. Raises Decline."""
        order = [i for bucket in self._average.buckets for i in bucket]
        difference = check.gradients_differ(
            ours,
            loss,
            [g for bucket in range(len(sent)) for g in sent[bucket]],
            [g for row in self._average.local for g in row],
            [found.trained[i].names[0] for i in order],
            found.half,
        )
        if difference and all(bool(g.isfinite().all()) for r in self._average.local for g in r):
            if not found.trial.refuses():
                raise _Made(loss)
            self._refused[key] = Decline("RM705", difference)
            del self._programs[key]
            raise self._refused[key]

    def _eager_update(self) -> None:
        trained = [p for g in self.optimizer.param_groups for p in g["params"] if p.requires_grad]
        try:
            self._average.average(trained, self._keeps)
        except BaseException:
            self._average.abandon()
            raise
        super()._eager_update()

    def _loss_of(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        if not self._declined:
            return super()._loss_of(inputs, targets)
        self._counts["eager"] -= 1  # the loss counts it
        token = disabled_var.set(None)
        try:
            return self._loss(inputs, *targets)
        finally:
            disabled_var.reset(token)

    # ---- programs ------------------------------------------------------------------------------

    def _compile(self, forward: Forward, parameters: list[Tied], stored: Stored) -> StepProgram:
        wanted = self._wanted()
        buckets: list[list[int]] = []
        if wanted.rules:
            trained = [t.tensor for t in self._parameters()]
            if len(parameters) != len(trained):
                raise Decline("RM704", "a parameter that the loss does not reach")
            self._average.fit(trained)
            buckets = self._average.buckets
        return compile_step_program(
            forward, parameters, wanted, self._place, stored, (self._average.number, buckets)
        )

    def _note(self, decline: Decline) -> None:
        """A step without a program is the loss's, which says what it thinks of it."""
        if decline.code in PASSING:
            super()._note(decline)
            return
        self._declined = True
        self._reasons.setdefault(decline.code, decline.detail)

    def report(self) -> dict[str, Any]:
        """This process's steps, compiled and eager, and why eager: as ``report`` of a compiled
        loss. ``whole``: how many had the averages and the update in their program, why others had
        not, and those programs."""
        own, loss = super().report(), self._loss.report()
        whole = {k: own[k] for k in ("compiled", "reasons", "programs")}
        counts = {k: own[k] + loss[k] for k in ("compiled", "eager")}
        return {**own, **loss, **counts, "whole": whole}


class _Made(Exception):
    """The step was made, by eager, and the program has nothing more to do with it."""

    def __init__(self, loss: torch.Tensor) -> None:
        super().__init__()
        self.loss = loss
