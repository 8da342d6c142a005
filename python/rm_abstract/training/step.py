"""`TrainingStep`: one call is `zero_grad(); loss.backward(); step()` of an ordinary training loop.

Parameters and optimiser state stay torch's tensors and are updated in place, last of all, so a step
that fails leaves them as they were. Every program is compared with eager on its first batch; until
then, and whenever something is not as it was, eager makes the step. Nothing is ever approximated:
a step that cannot be compiled is eager's, with a reason in `report()`.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch

from rm_abstract import _core, device
from rm_abstract.base.config import Settings
from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import Error, RoutingWarning
from rm_abstract.base.reasons import remedy_of
from rm_abstract.base.scope import disabled_var
from rm_abstract.capture.ir_builder import RANDOM
from rm_abstract.capture.training import capture_forward
from rm_abstract.guards import sources
from rm_abstract.hooks.router import make_facts
from rm_abstract.training import batch as batches
from rm_abstract.training import check, optimizers
from rm_abstract.training.dropout import Drawing, new_state
from rm_abstract.training.program import StepProgram, Tied, compile_step_program
from rm_abstract.training.stored import Stored

_BRIDGE = "torch"


class TrainingStep:
    """See ``rm_abstract.compile_step``. For one thread at a time, as its optimizer is."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Any,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        clip_norm: float | None = None,
    ) -> None:
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.clip_norm = clip_norm
        self.grad_norm: torch.Tensor | None = None  # of the last step, when it clips
        self._settings = settings
        self._module = batches.StepModule(model, loss_fn)
        self._programs: dict[Hashable, StepProgram] = {}
        self._refused: dict[Hashable, Decline] = {}
        self._stored: Stored | None = None  # opened by the first program
        self._random = new_state()
        self._tree: Any = None
        self._hook_dicts: list[Any] = []
        self._signature: Hashable = None  # of the optimiser, when programs were made
        self._rules: tuple[optimizers.Rule, ...] = ()
        self._cells = array("d")
        self._hyper = torch.empty(0)
        self._reasons: dict[str, str] = {}
        self._counts = {"compiled": 0, "eager": 0}

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
                found = self._make(tensors, key, structure)
            if found.checked:
                return self._run(found, tensors)
            if not self._lacks_state(found):
                return self._first(found, key, tensors, inputs, targets)
        except Decline as decline:
            self._note(decline)
        return self._eager(inputs, targets)

    def _run(self, found: StepProgram, tensors: list[torch.Tensor]) -> torch.Tensor:
        donated, taken = self._donated(found)
        self._check_memory(found, tensors, donated)
        self._fill(optimizers.numbers(self.optimizer, taken))
        try:
            results = found.run(tensors, self._hyper, donated, self._frozen(found))
        except _core.CoreError as error:  # nothing was written: eager says what it thinks of it
            raise Decline(error.reason or "RM703", str(error)) from error
        torch.autograd.graph.increment_version(donated)
        optimizers.advanced(self.optimizer, taken)
        if found.draws:
            self._random[1] += found.draws
        found.runs += 1
        self._counts["compiled"] += 1
        if found.clipped:
            self.grad_norm = results[1]
        return results[0]  # type: ignore[no-any-return]

    def _eager(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        self._counts["eager"] += 1
        with _original():
            self.optimizer.zero_grad(set_to_none=True)
            try:
                loss = batches.loss_of(self.model, self.loss_fn, inputs, targets)
                loss.backward()
                if self.clip_norm is not None:
                    held = [p for g in self.optimizer.param_groups for p in g["params"]]
                    self.grad_norm = torch.nn.utils.clip_grad_norm_(held, self.clip_norm)
                self.optimizer.step()
            finally:
                self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()  # type: ignore[no-any-return]

    # ---- making programs ---------------------------------------------------------------------

    def _make(self, tensors: list[torch.Tensor], key: Hashable, structure: Any) -> StepProgram:
        """The program for batches like this one, not yet checked."""
        try:
            parameters = self._parameters()
            with _original():
                module = batches.OfTensors(self._module, structure)
                names = {n for t in parameters for n in t.names}
                if self._stored is None:
                    self._stored = Stored(self._settings)
                forward = self._stored.forward(
                    self._module, key, names, lambda: capture_forward(module, tensors, names)
                )
            used = set(forward.weights)
            tied = [Tied(t.tensor, [n for n in t.names if n in used], t.group) for t in parameters]
            found = compile_step_program(
                forward,
                [t for t in tied if t.names],
                self._rules,
                self.clip_norm is not None,
                _backends(),
                self._stored,
            )
        except Decline as decline:
            self._refused[key] = decline
            raise
        except Error as error:
            self._refused[key] = Decline(error.code or "RM306", str(error))
            raise self._refused[key] from error
        self._programs[key] = found
        return found

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
        self._check_memory(found, tensors, donated)
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
        )
        difference = difference or check.buffers_differ(
            copies[inner:], eager[inner:], found.written
        )
        if difference:
            self._refused[key] = Decline("RM705", difference)
            del self._programs[key]
            self._note(self._refused[key])
        found.checked = not difference
        return loss

    def _parameters(self) -> list[Tied]:
        """The optimiser's parameters that require gradients, under their names in the capture."""
        names: dict[int, list[str]] = {}
        for name, p in self._module.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), []).append("step." + name)
        found = []
        for number, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                if not p.requires_grad:
                    continue
                if id(p) not in names:
                    raise Decline("RM703", "the optimizer trains a tensor that is not the model's")
                dense = p.layout is torch.strided and p.device.type == "cpu"
                if not dense or p.dtype not in (torch.float32, torch.float64):
                    raise Decline("RM703", f"{names[id(p)][0]} is {p.dtype} on {p.device}")
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
        donated += [_named(self._module, name) for name in found.written]
        return donated, optimizers.counters(self.optimizer, by_group)

    def _frozen(self, found: StepProgram) -> list[torch.Tensor]:
        return [
            self._random
            if n == RANDOM
            else found.constants[n]
            if n in found.constants
            else _named(self._module, n)
            for n in found.frozen
        ]

    def _check_memory(
        self, found: StepProgram, batch: list[torch.Tensor], donated: list[torch.Tensor]
    ) -> None:
        """Tensors that are updated share no memory with each other, nor with the batch."""
        memory = [t.data_ptr() for t in donated]
        if memory != found.memory:
            spans = sorted(_span(t) for t in donated if t.numel())
            if any(a[1] > b[0] for a, b in pairwise(spans)):
                raise Decline("RM703", "parameters or states that share memory")
            found.memory, found.spans = memory, spans
        if not found.spans:
            return
        low, high = found.spans[0][0], found.spans[-1][1]
        for t in batch:
            start, end = _span(t)
            if end <= low or start >= high:
                continue
            if any(start < b and a < end for a, b in found.spans):
                raise Decline("RM703", "a batch that shares memory with a parameter")

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

    def _check_surroundings(self) -> None:
        """Modes of this call that a program does not have."""
        if not torch.is_grad_enabled():
            raise Decline("RM706", "gradients are switched off")
        if torch.is_autocast_enabled("cpu"):
            raise Decline("RM106", "autocast")
        if torch.is_anomaly_enabled() or torch.is_inference_mode_enabled():
            raise Decline("RM706", "anomaly detection or inference mode")
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            raise Decline("RM103", "a mode that sees every operator is active")
        if disabled_var.get() is not None:
            raise Decline("RM108", "")

    def _check_unchanged(self) -> None:
        """Drops all programs when the model, the loss or the optimiser is no longer what it was."""
        optimizers.check(self.optimizer)
        signature = (
            optimizers.rules(self.optimizer),
            tuple(id(p) for g in self.optimizer.param_groups for p in g["params"]),
            tuple(len(g["params"]) for g in self.optimizer.param_groups),
            tuple(p.requires_grad for g in self.optimizer.param_groups for p in g["params"]),
        )
        why = self._tree.why_not() if self._tree is not None else ("", "")
        if why is not None or signature != self._signature:
            self._watch(signature)
        if any(self._hook_dicts):
            raise Decline("RM706", "backward hooks of a module")
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p._backward_hooks or p._post_accumulate_grad_hooks:
                    raise Decline("RM706", "a hook on a parameter")

    def _watch(self, signature: Hashable) -> None:
        self._programs.clear()
        self._refused.clear()
        self._tree = None
        self._module.training = self.model.training
        self._rules = optimizers.rules(self.optimizer)
        found = sources.of_module(self._module)
        if found.unseen:
            raise Decline("RM210", found.unseen[0])
        tree = _core.router.TrainedTree(make_facts(), self._module, found.rows())
        why = tree.why_not()
        if why is not None:
            raise Decline(*why)
        self._hook_dicts = [
            hooks
            for m in self._module.modules()
            for hooks in (m._backward_hooks, m._backward_pre_hooks)
        ]
        self._tree, self._signature = tree, signature

    # ---- what happened -------------------------------------------------------------------------

    def _note(self, decline: Decline) -> None:
        if decline.code in self._reasons:
            return
        self._reasons[decline.code] = decline.detail
        if decline.code in ("RM108", "RM103"):
            return
        text = f"{decline.code} {decline.detail}; try {remedy_of(decline.code)}"
        policy = self._settings.fallback_for("training")
        if policy == "error":
            raise Error(
                f"[compile_step] expected a step that compiles, got {text}", code=decline.code
            )
        if policy == "warn":
            warnings.warn(f"rm_abstract: steps run eager: {text}", RoutingWarning, stacklevel=4)

    def report(self) -> dict[str, Any]:
        """How many steps were compiled and eager, why eager, how many forwards were captured and
        how many came from the compile cache, and each program's figures."""
        return {
            **self._counts,
            **(self._stored.sources if self._stored is not None else {}),
            "reasons": dict(self._reasons),
            "programs": [{"runs": p.runs, **p.program.report()} for p in self._programs.values()],
        }

    def memory_report(self) -> list[dict[str, Any]]:
        """By program, in bytes: what a step holds beside parameters and optimiser state.

        ``arena``: activations, gradients and workspaces, reused between steps; ``lower_bound``: the
        most that is alive at once; ``parameters`` and ``states``: torch's tensors that are updated
        in place. Nothing is recomputed but the rows' statistics of norms and attention.
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
                }
            )
        return rows


def _backends() -> list[str]:
    device.load_plugins()
    usable = {row["name"] for row in _core.backend.backends() if row["available"]}
    return [name for name in ("cpu", _BRIDGE) if name in usable]


def _named(module: Any, name: str) -> torch.Tensor:
    found: Any = module
    for part in name.removeprefix("step.").split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _span(t: torch.Tensor) -> tuple[int, int]:
    """First byte and the one behind the last that the tensor touches."""
    start = t.data_ptr()
    if t.is_contiguous() or not t.numel():
        return start, start + t.nbytes
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return start, start + (last + 1) * t.element_size()


def _split(tensors: list[torch.Tensor], sizes: list[int]) -> list[list[torch.Tensor]]:
    rest = iter(tensors)
    return [[next(rest) for _ in range(n)] for n in sizes]


@contextmanager
def _original() -> Iterator[None]:
    """Nothing inside is routed."""
    token = disabled_var.set("compiling")
    try:
        yield
    finally:
        disabled_var.reset(token)
