"""`TrainingStep`: one call is `zero_grad(); loss.backward(); step()` of an ordinary training loop.

Parameters and optimiser state stay torch's tensors and are updated in place, last of all, so a step
that fails leaves them as they were. Every program is compared with eager on its first batch; until
then, and whenever something is not as it was, eager makes the step. Nothing is ever approximated:
a step that cannot be compiled is eager's, with a reason in `report()`.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.config import Settings
from rm_abstract.base.decline import Decline
from rm_abstract.capture.training import Forward
from rm_abstract.engines.variant import OUT_OF_RANGE
from rm_abstract.training import batch as batches
from rm_abstract.training import check, optimizers, run_tensors
from rm_abstract.training.budget import fit, summary
from rm_abstract.training.dropout import Drawing
from rm_abstract.training.eager_step import EagerSteps
from rm_abstract.training.gradient_hooks import accumulation_hooks
from rm_abstract.training.modes import check_modes, foreign_backward
from rm_abstract.training.program import StepProgram, Tied, Wanted, compile_step_program, program_of
from rm_abstract.training.routed import (
    check_apart,
    check_parameter,
    named,
)
from rm_abstract.training.settled import due, settle
from rm_abstract.training.stored import Stored


class TrainingStep(EagerSteps):
    """See ``rm_abstract.compile_step``. For one thread at a time, as its optimizer is."""

    _settled: Any = None  # the step made last, remembered; None: the next one takes the long way
    _settled_of: tuple[StepProgram, torch.optim.Optimizer]

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Any,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        clip_norm: float | None = None,
        memory_budget: int | None = None,
        precision: str = "auto",
        clip_value: float | None = None,
        scaler: Any = None,
        accumulate: int = 1,
    ) -> None:
        super().__init__(
            model,
            loss_fn,
            optimizer,
            settings,
            clip_norm,
            precision,
            clip_value,
            scaler,
            accumulate,
        )
        if memory_budget is not None and memory_budget < 0:
            raise ValueError(f"[compile_step] expected a budget in bytes, got {memory_budget}")
        self.memory_budget = memory_budget
        self._has_gradients = False  # parameters, before this step
        self._accumulation_hooks: list[Any] = []  # dicts of them, all empty
        self._rules: tuple[optimizers.Rule, ...] = ()
        self._hyper = run_tensors.HyperRows()
        self._counters = optimizers.Counters()

    # ---- the step ----------------------------------------------------------------------------

    def __call__(self, inputs: Any, *targets: Any) -> torch.Tensor:
        """Trains on one batch. Returns the loss before the update, a scalar without gradient."""
        if self._settled is not None:
            loss = self._run_settled(inputs, targets)
            if loss is not None:
                return loss
        self._locate()
        try:
            check_modes(self._place)
            if foreign_backward():
                raise Decline("RM706", "a backward of tensors that is not torch's own")
            self._pure.check()
            tensors, batch, structure = batches.flatten(inputs, targets, self._place.device)
            self._check_unchanged()
            key = (batch, self._is_last())
            if key in self._refused:
                raise self._refused[key]
            found = self._programs.get(key)
            if found is None:
                if not self._pure.knows(batch):
                    return self._watched(batch, inputs, targets)
                found = self._make(tensors, key, structure, self._compile, batch)
                if self.memory_budget is not None:
                    self._fit(found, tensors, self.memory_budget)
            if found.checked:
                return self._run(found, tensors)
            if not found.wanted.rules:
                return self._first_sums(found, key, tensors, inputs, targets)
            if not run_tensors.lacks_state(found, self.optimizer):
                return self._first(found, key, tensors, inputs, targets)
        except Decline as decline:
            self._note(decline)
        return self._eager(inputs, targets)

    def _run(self, found: StepProgram, tensors: list[torch.Tensor]) -> torch.Tensor:
        donated, taken = self._donated(found)
        sums = self._sums(found)
        check_apart(found, tensors, [*sums, *donated])
        counts: list[float] = []
        if found.wanted.rules:
            counts = self._counters.read(taken)
            self._fill(optimizers.numbers(self.optimizer, counts))
        batch, frozen = [*tensors, *self._scales()], self._frozen(found)
        run_tensors.check_dense([*donated, *frozen])
        run_tensors.check_frozen(found, frozen)
        try:
            with run_tensors.buffers_kept(found, donated):
                results = found.run(batch, self._hyper.tensor, sums, donated, frozen)
        except _core.CoreError as error:  # nothing is written: eager says what it thinks of it
            code = "RM120" if error.code == OUT_OF_RANGE else "RM703"
            raise Decline(error.reason or code, str(error)) from error
        if found.wanted.rules:
            torch.autograd.graph.increment_version(donated)
            self._updated(found, results, counts)
        else:
            torch.autograd.graph.increment_version([*sums, *donated[len(sums) :]])
            self._kept(found, sums)
        if found.draws:
            self._random[1] += found.draws
        found.runs += 1
        self._counts["compiled"] += 1
        self._pure.ran()
        self._settle(found, tensors, donated)
        return results[0]  # type: ignore[no-any-return]

    def _settle(
        self, found: StepProgram, tensors: list[torch.Tensor], donated: list[torch.Tensor]
    ) -> None:
        """Remembers the step that was just made, where it may be made again without Python."""
        if not due(found):
            return
        self._settled = settle(
            found,
            self.optimizer,
            tensors,
            self._hyper.tensor,
            donated[len(donated) - len(found.written) :],
            self._frozen(found),
            (self._facts, self._tree, [*self._hook_dicts, *self._accumulation_hooks]),
        )
        self._settled_of = (found, self.optimizer)

    def _run_settled(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor | None:
        """The loss of the step as it was made last; None where something is not as it was."""
        self._hyper.forget()
        found, optimizer = self._settled_of
        plain = self.clip_norm is None and self.clip_value is None and self.scaler is None
        if not plain or self.accumulate != 1 or self.accumulated or optimizer is not self.optimizer:
            return None
        try:
            loss: torch.Tensor | None = self._settled.run(inputs, targets)
        except _core.CoreError:  # nothing was written: the long way meets it again
            return None
        if loss is None:
            return None
        found.runs += 1
        self._counts["compiled"] += 1
        optimizer._opt_called = True  # type: ignore[attr-defined] # what lr schedulers look at
        return loss

    def _updated(self, found: StepProgram, results: list[Any], counts: list[float]) -> None:
        """What else happens in a step whose program updated the parameters."""
        finite = True
        if found.wanted.scaled:
            finite = bool(results.pop(1))
            optimizers.note_finite(self.optimizer, self.scaler, finite)
        if finite:
            optimizers.advanced(self.optimizer, self._counters, counts)
        if found.wanted.clip_norm:
            self.grad_norm = results[1]
        if self._has_gradients:  # of earlier micro-batches, or of a backward outside of the step
            self.optimizer.zero_grad(set_to_none=True)
        self.accumulated = 0

    def _kept(self, found: StepProgram, sums: list[torch.Tensor]) -> None:
        """Sums of gradients wait where eager's do."""
        if self.accumulated == 0 and self._has_gradients:
            self.optimizer.zero_grad(set_to_none=True)
        for t, total in zip(found.trained, sums, strict=True):
            t.tensor.grad = total
        self.accumulated += 1

    # ---- making programs ---------------------------------------------------------------------

    def _compile(self, forward: Forward, parameters: list[Tied], stored: Stored) -> StepProgram:
        return compile_step_program(
            forward,
            parameters,
            self._wanted(),
            self._place,
            stored,
        )

    def _wanted(self) -> Wanted:
        """Of the program for the next micro-batch."""
        scaled = self.scaler is not None
        if not self._is_last():
            return Wanted(scaled=scaled, micro_batches=self.accumulate)
        return Wanted(
            self._rules,
            self.clip_norm is not None,
            self.clip_value is not None,
            scaled,
            self.accumulate,
        )

    def _fit(self, found: StepProgram, tensors: list[torch.Tensor], budget: int) -> None:
        """Computes values twice where the arena is larger than the budget."""
        stored = self._stored
        assert stored is not None
        rules = found.wanted.rules
        donated: list[torch.Tensor] = []  # of their shapes: states may not be there yet
        for t in found.trained:
            names = optimizers.state_names(rules[t.group]) if rules else ()
            donated += [t.tensor, *(torch.empty_like(t.tensor) for _ in names)]
        donated += [named(self._module, name) for name in found.written]
        inputs = [*tensors, *self._scales()]
        if rules:
            self._fill([0.0] * (found.hyper_columns * len(rules)))
            inputs.append(self._hyper.tensor)
        if found.wanted.micro_batches > 1:
            inputs += [torch.empty_like(t.tensor) for t in found.trained]
        inputs += [*donated, *self._frozen(found)]
        fitted = fit(
            found.program,
            found.text,
            budget,
            lambda text: program_of(text, self._place, stored),
            inputs,
        )
        found.program, found.text = fitted.program, fitted.text
        found.recomputed = fitted.recomputed
        if fitted.arena > budget:
            self._note(Decline("RM711", f"{fitted.arena} bytes, the budget is {budget}"))

    def _first(
        self,
        found: StepProgram,
        key: Hashable,
        tensors: list[torch.Tensor],
        inputs: Any,
        targets: tuple[Any, ...],
    ) -> torch.Tensor:
        """The program on copies, eager on the tensors themselves: they must agree."""
        donated, taken = self._donated(found)
        sums = self._sums(found)
        check_apart(found, tensors, [*sums, *donated])
        run_tensors.check_frozen(found, self._frozen(found))
        rows = optimizers.numbers(self.optimizer, self._counters.read(taken))
        self._fill(rows)
        copies = [t.detach().clone(memory_format=torch.preserve_format) for t in donated]
        before = [t.detach().clone() for t in donated]
        results, loss = self._both(found, key, tensors, sums, copies, (inputs, targets))
        if found.wanted.scaled and not (bool(results.pop(1)) and self._finite):
            return loss  # no update, which shows nothing
        sizes = [1 + len(optimizers.state_names(self._rules[t.group])) for t in found.trained]
        width = len(rows) // len(self._rules) if self._rules else 0
        eager = [t.detach() for t in donated]
        inner = sum(sizes)  # behind them the buffers that the forward updates
        difference = check.differs(
            results[0],
            loss,
            _split(before, sizes),
            _split(copies, sizes),
            _split(eager, sizes),
            [self._rules[t.group] for t in found.trained],
            [rows[t.group * width : (t.group + 1) * width] for t in found.trained],
            [t.names[0] for t in found.trained],
            found.half,
        )
        difference = difference or check.buffers_differ(
            copies[inner:], eager[inner:], found.written, found.half
        )
        self._judge(found, key, difference, loss)
        return loss

    def _first_sums(
        self,
        found: StepProgram,
        key: Hashable,
        tensors: list[torch.Tensor],
        inputs: Any,
        targets: tuple[Any, ...],
    ) -> torch.Tensor:
        """The same for a micro-batch behind which nothing is updated: sums must agree."""
        donated, _ = self._donated(found)
        sums = self._sums(found)
        check_apart(found, tensors, [*sums, *donated])
        run_tensors.check_frozen(found, self._frozen(found))
        trained = [t.tensor for t in found.trained]
        buffers = donated[len(trained) :]
        written = [b.clone() for b in buffers]
        ours = [g.clone(memory_format=torch.preserve_format) for g in sums]
        results = self._tried(found, key, tensors, ours, [*trained, *written])
        loss = self._beside(found, inputs, targets)
        eager = [p.grad for p in trained]
        if found.wanted.scaled and not all(
            bool(g.isfinite().all()) for g in (*ours, *eager) if g is not None
        ):
            return loss  # the scale was too large, which shows nothing
        difference = check.gradients_differ(
            results[0], loss, ours, eager, [t.names[0] for t in found.trained], found.half
        ) or check.buffers_differ(written, buffers, found.written, found.half)
        self._judge(found, key, difference, loss)
        return loss

    def _both(
        self,
        found: StepProgram,
        key: Hashable,
        tensors: list[torch.Tensor],
        sums: list[torch.Tensor],
        copies: list[torch.Tensor],
        call: tuple[Any, tuple[Any, ...]],
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The program's results on copies, and the loss of eager's step."""
        return self._tried(found, key, tensors, sums, copies), self._beside(found, *call)

    def _tried(
        self,
        found: StepProgram,
        key: Hashable,
        tensors: list[torch.Tensor],
        sums: list[torch.Tensor],
        donated: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The results of a program that was never compared; one that fails is refused for good."""
        batch = [*(t.clone() for t in tensors), *self._scales()]
        try:
            return found.run(batch, self._hyper.tensor, sums, donated, self._frozen(found))
        except _core.CoreError as error:
            self._refused[key] = Decline(error.reason or "RM705", str(error))
            raise self._refused[key] from error

    def _beside(self, found: StepProgram, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        """Eager's loss with the random numbers that the program drew."""
        with Drawing(self._random) if found.draws else nullcontext():
            loss = self._eager(inputs, targets)
        self._random[1] += found.draws
        return loss

    def _parameters(self) -> list[Tied]:
        """The optimiser's parameters that require gradients, under their names in the capture."""
        names = self._names()
        found = []
        for number, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                if not p.requires_grad:
                    continue
                if id(p) not in names:
                    raise Decline("RM703", "the optimizer trains a tensor that is not the model's")
                check_parameter(p, names[id(p)][0], self._place.device)
                found.append(Tied(p, names[id(p)], number))
        trained = {id(t.tensor) for t in found}
        for name, p in self._module.named_parameters():
            if p.requires_grad and id(p) not in trained:
                # Eager would leave its gradient to the user.
                raise Decline("RM703", f"{name} requires a gradient and is not the optimizer's")
        return found

    # ---- the tensors of a run ----------------------------------------------------------------

    def _donated(self, found: StepProgram) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        return run_tensors.donated(found, self._module, self.optimizer)

    def _sums(self, found: StepProgram) -> list[torch.Tensor]:
        return run_tensors.sums(found, self.optimizer, self.accumulated)

    def _fill(self, numbers: list[float]) -> None:
        limits = (self.clip_norm, self.clip_value)
        self._hyper.fill(numbers, len(self._rules), limits, self._place)

    # ---- is everything as it was? --------------------------------------------------------------

    def _anchor(self) -> Any:
        return next((p for g in self.optimizer.param_groups for p in g["params"]), None)

    def _check_unchanged(self) -> None:
        """Drops all programs when the model, the loss or the optimiser is no longer what it was."""
        optimizers.check(self.optimizer)
        groups = self.optimizer.param_groups
        held = [p for g in groups for p in g["params"]]
        signature = (
            optimizers.rules(self.optimizer),
            tuple([id(p) for p in held]),
            tuple([len(g["params"]) for g in groups]),
            tuple([p.requires_grad for p in held]),
            tuple(map(type, held)),
            (self.clip_norm is None, self.clip_value is None, self.scaler is None),
            self.accumulate,
        )
        self._check_module(signature)
        self._has_gradients = False
        self._accumulation_hooks.clear()
        for p in held:
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise Decline("RM706", "a hook on a parameter")
            if p._use_count() != 1 and p.requires_grad:
                self._accumulation_hooks += accumulation_hooks(p)
            if p.grad is not None:
                self._has_gradients = True
        if any(self._accumulation_hooks):
            raise Decline("RM706", "a hook where a gradient is added to its parameter")

    def _watch(self, signature: Hashable) -> None:
        self._settled = None
        self._rules = optimizers.rules(self.optimizer)
        super()._watch(signature)

    # ---- what happened -------------------------------------------------------------------------

    def memory_report(self) -> list[dict[str, Any]]:
        """By program, in bytes: what a step holds beside parameters and optimiser state.

        ``arena``: activations, gradients and workspaces, reused between steps; ``lower_bound``: the
        most that is alive at once; ``parameters`` and ``states``: torch's tensors that are updated
        in place; ``budget``: what was asked for, or None. ``recomputed``: values that are computed
        a second time because of it, by operator and type: ``values`` (how many), ``bytes`` (freed
        between their readers), ``operators`` (run again) and ``share`` (of the step's work, as
        estimated). The rows' statistics of norms and attention are always computed again.
        ``split``: logits of the loss that are made by ``pieces`` of their rows (0: as a whole), so
        that ``piece_bytes`` of their ``bytes`` are held.
        """
        rows = []
        for p in self._programs.values():
            now = p.program.report()
            donated, _ = self._donated(p)
            own = sum(t.tensor.nbytes for t in p.trained)
            rows.append(
                {
                    "arena": now["arena_bytes"],
                    "lower_bound": now["arena_lower_bound_bytes"],
                    "parameters": own,
                    "states": sum(t.nbytes for t in donated) - own,
                    "packed": now["packed_bytes"],
                    "budget": self.memory_budget,
                    "recomputed": summary(p.recomputed),
                    "split": dict(p.split),
                }
            )
        return rows


def _split(tensors: list[torch.Tensor], sizes: list[int]) -> list[list[torch.Tensor]]:
    rest = iter(tensors)
    return [[next(rest) for _ in range(n)] for n in sizes]
