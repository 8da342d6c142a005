"""`CompiledLoss`: a loss with a `backward()`, computed together with its gradients by one program.

Everything behind the loss is the user's: scaling, accumulation, clipping, hooks on parameters, any
optimiser. The program gives loss and gradients at once; `backward()` hands the gradients, times
that of the loss, to torch's autograd, which adds them to `.grad` as it adds any others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rm_abstract import _core
from rm_abstract.base.config import Settings
from rm_abstract.base.decline import Decline
from rm_abstract.capture.training import Forward
from rm_abstract.engines.variant import OUT_OF_RANGE
from rm_abstract.training import batch as batches
from rm_abstract.training import check
from rm_abstract.training.dropout import Drawing
from rm_abstract.training.modes import check_modes
from rm_abstract.training.program import StepProgram, Tied, Wanted, compile_step_program
from rm_abstract.training.routed import (
    Routed,
    check_apart,
    check_parameter,
    named,
    original,
)
from rm_abstract.training.stored import Stored


class CompiledLoss(Routed):
    """See ``rm_abstract.compile_loss``. For one thread at a time."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Any,
        settings: Settings,
        precision: str = "auto",
        scaler: Any = None,
    ) -> None:
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        super().__init__("compile_loss", model, loss_fn, settings, precision, scaler)
        self._held: list[torch.nn.Parameter] = []  # all parameters of model and loss

    def __call__(self, inputs: Any, *targets: Any) -> torch.Tensor:
        """The loss of one batch, to be differentiated by its ``backward()``."""
        self._locate()
        try:
            check_modes(self._place)
            self._pure.check()
            tensors, key, structure = batches.flatten(inputs, targets, self._place.device)
            self._check_module(tuple(p.requires_grad for p in self._held))
            if key in self._refused:
                raise self._refused[key]
            found = self._programs.get(key)
            if found is None:
                if not self._pure.knows(key):
                    return self._watched(key, inputs, targets)
                found = self._make(tensors, key, structure, self._compile)
            if found.checked:
                return self._run(found, tensors)
            return self._first(found, key, tensors, inputs, targets)
        except Decline as decline:
            self._note(decline)
        return self._eager(inputs, targets)

    def _run(self, found: StepProgram, tensors: list[torch.Tensor]) -> torch.Tensor:
        trained = [t.tensor for t in found.trained]
        buffers = [named(self._module, name) for name in found.written]
        check_apart(found, tensors, buffers)
        try:
            scales = self._scales()
            results = found.program.run(
                [*tensors, *scales, *trained, *buffers, *self._frozen(found)]
            )
        except _core.CoreError as error:  # nothing was written: eager says what it thinks of it
            code = "RM120" if error.code == OUT_OF_RANGE else "RM703"
            raise Decline(error.reason or code, str(error)) from error
        torch.autograd.graph.increment_version(buffers)
        if found.draws:
            self._random[1] += found.draws
        found.runs += 1
        self._counts["compiled"] += 1
        self._pure.ran()
        loss: torch.Tensor = _Differentiated.apply(  # type: ignore[no-untyped-call]
            list(results[: 1 + len(trained)]), float(scales[0]) if scales else 1.0, *trained
        )
        return loss

    def _watched(self, key: Hashable, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        """Eager's loss, from which it is learned whether the forward only computes."""
        effects = self._pure.watch(self._module, inputs, targets)
        loss = self._eager(inputs, targets, effects)
        if decline := self._pure.judge(effects, key):
            self._note(decline)
        return loss

    def _eager(self, inputs: Any, targets: tuple[Any, ...], around: Any = None) -> torch.Tensor:
        """``around``: a context that the forward runs in."""
        self._counts["eager"] += 1
        with original(), around or nullcontext():
            loss: torch.Tensor = batches.loss_of(
                self.model, self.loss_fn, inputs, targets, self.precision, self._place.kind
            )
        return loss

    def _first(
        self,
        found: StepProgram,
        key: Hashable,
        tensors: list[torch.Tensor],
        inputs: Any,
        targets: tuple[Any, ...],
    ) -> torch.Tensor:
        """The program on copies of the buffers, eager for the user: they must agree."""
        trained = [t.tensor for t in found.trained]
        if any(p._backward_hooks for p in self._held):
            raise Decline("RM706", "a hook on a parameter, when gradients are to be compared")
        buffers = [named(self._module, name) for name in found.written]
        check_apart(found, tensors, buffers)
        copies = [b.clone() for b in buffers]
        scales = self._scales()
        batch = [*(t.clone() for t in tensors), *scales]
        try:
            results = found.program.run([*batch, *trained, *copies, *self._frozen(found)])
        except _core.CoreError as error:
            self._refused[key] = Decline(error.reason or "RM705", str(error))
            raise self._refused[key] from error
        with Drawing(self._random) if found.draws else nullcontext():
            loss = self._eager(inputs, targets)
        self._random[1] += found.draws
        wanted = [p for p in self._held if p.requires_grad]
        scaled = loss * scales[0] if scales else loss
        eager = torch.autograd.grad(scaled, wanted, retain_graph=True, allow_unused=True)
        if scales and not _all_finite([*results[1 : 1 + len(trained)], *eager]):
            return loss  # the scale was too large, which shows nothing
        ours = {id(p): g for p, g in zip(trained, results[1:], strict=False)}
        difference = check.gradients_differ(
            results[0],
            loss.detach(),
            [ours.get(id(p)) for p in wanted],
            list(eager),
            [self._names()[id(p)][0] for p in wanted],
            found.half,
        ) or check.buffers_differ(copies, buffers, found.written, found.half)
        self._judge(found, key, difference, loss)
        return loss

    def _watch(self, signature: Hashable) -> None:
        self._held = list(self._module.parameters())
        super()._watch(tuple(p.requires_grad for p in self._held))

    def _compile(self, forward: Forward, parameters: list[Tied], stored: Stored) -> StepProgram:
        return compile_step_program(
            forward,
            parameters,
            Wanted(scaled=self.scaler is not None),
            self._place,
            stored,
        )

    def _anchor(self) -> Any:
        return next(self.model.parameters(), None)

    def _parameters(self) -> list[Tied]:
        names = self._names()
        trained = [p for p in self._held if p.requires_grad]
        for p in trained:
            check_parameter(p, names[id(p)][0], self._place.device)
        return [Tied(p, names[id(p)], 0) for p in trained]


def _all_finite(tensors: Iterable[torch.Tensor | None]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors if t is not None)


class _Differentiated(torch.autograd.Function):
    """(loss and gradients of the loss times a scale, that scale, parameters) -> loss."""

    @staticmethod
    def forward(
        ctx: Any, results: list[torch.Tensor], scale: float, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*parameters)  # torch notices when they change before backward
        ctx.gradients, ctx.scale = results[1:], scale
        return results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018 # raises torch's errors: changed since, or already used
        gradients: list[torch.Tensor] = ctx.gradients
        scale = float(slope) / ctx.scale
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return None, None, *(g * scale for g in gradients)
        ctx.gradients = None  # they become `.grad` themselves
        if scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        return None, None, *gradients
