"""`TrainingStep`: one call is `zero_grad(); loss.backward(); step()` of an ordinary training loop.

Parameters and optimiser state stay torch's tensors and are updated in place, last of all, so a step
that fails leaves them as they were. Every program is compared with eager on its first batch; until
then, and whenever something is not as it was, eager makes the step. Nothing is ever approximated:
a step that cannot be compiled is eager's, with a reason in `report()`.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.config import Settings
from rm_abstract.base.decline import Decline
from rm_abstract.capture.training import Forward
from rm_abstract.training import batch as batches
from rm_abstract.training import check, optimizers
from rm_abstract.training.budget import fit, summary
from rm_abstract.training.dropout import Drawing
from rm_abstract.training.program import StepProgram, Tied, compile_step_program, program_of
from rm_abstract.training.routed import (
    Routed,
    check_apart,
    check_parameter,
    named,
    original,
    usable_backends,
)
from rm_abstract.training.stored import Stored


class TrainingStep(Routed):
    """See ``rm_abstract.compile_step``. For one thread at a time, as its optimizer is."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Any,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        clip_norm: float | None = None,
        memory_budget: int | None = None,
        precision: str = "auto",
    ) -> None:
        super().__init__("compile_step", model, loss_fn, settings, precision)
        if memory_budget is not None and memory_budget < 0:
            raise ValueError(f"[compile_step] expected a budget in bytes, got {memory_budget}")
        self.memory_budget = memory_budget
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.grad_norm: torch.Tensor | None = None  # of the last step, when it clips
        self._has_gradients = False  # parameters, before this step
        self._rules: tuple[optimizers.Rule, ...] = ()
        self._cells = array("d")
        self._hyper = torch.empty(0)

    # ---- the step ----------------------------------------------------------------------------

    def __call__(self, inputs: Any, *targets: Any) -> torch.Tensor:
        """Trains on one batch. Returns the loss before the update, a scalar without gradient."""
        try:
            self._check_surroundings()
            tensors, key, structure = batches.flatten(inputs, targets)
            self._check_unchanged()
            if key in self._refused:
                raise self._refused[key]
            found = self._programs.get(key)
            if found is None:
                found = self._make(tensors, key, structure, self._compile)
                if self.memory_budget is not None:
                    self._fit(found, tensors, self.memory_budget)
            if found.checked:
                return self._run(found, tensors)
            if not self._lacks_state(found):
                return self._first(found, key, tensors, inputs, targets)
        except Decline as decline:
            self._note(decline)
        return self._eager(inputs, targets)

    def _run(self, found: StepProgram, tensors: list[torch.Tensor]) -> torch.Tensor:
        donated, taken = self._donated(found)
        check_apart(found, tensors, donated)
        self._fill(optimizers.numbers(self.optimizer, taken))
        try:
            results = found.run(tensors, self._hyper, donated, self._frozen(found))
        except _core.CoreError as error:  # nothing was written: eager says what it thinks of it
            raise Decline(error.reason or "RM703", str(error)) from error
        torch.autograd.graph.increment_version(donated)
        optimizers.advanced(self.optimizer, taken)
        if self._has_gradients:  # of a backward outside of the step
            self.optimizer.zero_grad(set_to_none=True)
        if found.draws:
            self._random[1] += found.draws
        found.runs += 1
        self._counts["compiled"] += 1
        if found.clipped:
            self.grad_norm = results[1]
        return results[0]  # type: ignore[no-any-return]

    def _eager(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        self._counts["eager"] += 1
        with original():
            self.optimizer.zero_grad(set_to_none=True)
            try:
                loss = batches.loss_of(self.model, self.loss_fn, inputs, targets, self.precision)
                loss.backward()
                if self.clip_norm is not None:
                    held = [p for g in self.optimizer.param_groups for p in g["params"]]
                    self.grad_norm = torch.nn.utils.clip_grad_norm_(held, self.clip_norm)
                self.optimizer.step()
            finally:
                self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()  # type: ignore[no-any-return]

    # ---- making programs ---------------------------------------------------------------------

    def _compile(self, forward: Forward, parameters: list[Tied], stored: Stored) -> StepProgram:
        return compile_step_program(
            forward,
            parameters,
            self._rules,
            self.clip_norm is not None,
            usable_backends(),
            stored,
        )

    def _fit(self, found: StepProgram, tensors: list[torch.Tensor], budget: int) -> None:
        """Computes values twice where the arena is larger than the budget."""
        stored, backends = self._stored, usable_backends()
        assert stored is not None
        self._fill([0.0] * (found.hyper_columns * len(self._rules)))
        donated: list[torch.Tensor] = []  # of their shapes: states may not be there yet
        for t in found.trained:
            names = optimizers.state_names(self._rules[t.group])
            donated += [t.tensor, *(torch.empty_like(t.tensor) for _ in names)]
        donated += [named(self._module, name) for name in found.written]
        inputs = [*tensors, self._hyper, *donated, *self._frozen(found)]
        fitted = fit(
            found.program,
            found.text,
            budget,
            lambda text: program_of(text, backends, stored),
            inputs,
        )
        found.program, found.text = fitted.program, fitted.text
        found.recomputed = fitted.recomputed
        if fitted.arena > budget:
            self._note(Decline("RM711", f"{fitted.arena} bytes, the budget is {budget}"))

    def _lacks_state(self, found: StepProgram) -> bool:
        """Whether the optimiser has yet to make the state of a parameter: its own step does."""
        return any(
            optimizers.states(self.optimizer, t.tensor, self._rules[t.group]) is None
            for t in found.trained
        )

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
        check_apart(found, tensors, donated)
        rows = optimizers.numbers(self.optimizer, taken)
        self._fill(rows)
        copies = [t.detach().clone(memory_format=torch.preserve_format) for t in donated]
        before = [t.detach().clone() for t in donated]
        batch = [t.clone() for t in tensors]
        try:
            results = found.run(batch, self._hyper, copies, self._frozen(found))
        except _core.CoreError as error:
            self._refused[key] = Decline(error.reason or "RM705", str(error))
            raise self._refused[key] from error
        with Drawing(self._random) if found.draws else nullcontext():
            loss = self._eager(inputs, targets)
        self._random[1] += found.draws
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
        if difference:
            self._refused[key] = Decline("RM705", difference)
            del self._programs[key]
            self._note(self._refused[key])
        found.checked = not difference and bool(loss == loss)  # NaN shows nothing
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
                check_parameter(p, names[id(p)][0])
                found.append(Tied(p, names[id(p)], number))
        trained = {id(t.tensor) for t in found}
        for name, p in self._module.named_parameters():
            if p.requires_grad and id(p) not in trained:
                # Eager would leave its gradient to the user.
                raise Decline("RM703", f"{name} requires a gradient and is not the optimizer's")
        return found

    # ---- the tensors of a run ----------------------------------------------------------------

    def _donated(self, found: StepProgram) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        """What the program updates, in its order, and the optimiser's counters by group."""
        donated: list[torch.Tensor] = []
        by_group: list[list[torch.Tensor]] = [[] for _ in self._rules]
        for t in found.trained:
            held = optimizers.states(self.optimizer, t.tensor, self._rules[t.group])
            if held is None:
                raise Decline("RM701", f"the optimizer has no state of {t.names[0]}")
            donated.append(t.tensor)
            donated += held
            by_group[t.group].append(t.tensor)
        donated += [named(self._module, name) for name in found.written]
        return donated, optimizers.counters(self.optimizer, by_group)

    def _fill(self, rows: list[float]) -> None:
        if self.clip_norm is not None:
            width = len(rows) // len(self._rules)
            rows = [*rows, float(self.clip_norm), *([0.0] * (width - 1))]
        if len(rows) != len(self._cells):
            self._cells = array("d", rows)
            height = len(self._rules) + (self.clip_norm is not None)
            self._hyper = torch.frombuffer(self._cells, dtype=torch.float64).reshape(height, -1)
            return
        self._cells[:] = array("d", rows)

    # ---- is everything as it was? --------------------------------------------------------------

    def _check_unchanged(self) -> None:
        """Drops all programs when the model, the loss or the optimiser is no longer what it was."""
        optimizers.check(self.optimizer)
        groups = self.optimizer.param_groups
        signature = (
            optimizers.rules(self.optimizer),
            tuple(id(p) for g in groups for p in g["params"]),
            tuple(len(g["params"]) for g in groups),
            tuple(p.requires_grad for g in groups for p in g["params"]),
        )
        self._check_module(signature)
        self._has_gradients = False
        for group in groups:
            for p in group["params"]:
                if p._backward_hooks or p._post_accumulate_grad_hooks:
                    raise Decline("RM706", "a hook on a parameter")
                self._has_gradients = self._has_gradients or p.grad is not None

    def _watch(self, signature: Hashable) -> None:
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
                }
            )
        return rows


def _split(tensors: list[torch.Tensor], sizes: list[int]) -> list[list[torch.Tensor]]:
    rest = iter(tensors)
    return [[next(rest) for _ in range(n)] for n in sizes]
