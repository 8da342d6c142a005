"""torch.optim's optimisers as the step's program sees them: rules, numbers, states.

The optimiser stays the owner of everything: its groups are read at every step, its state tensors
are updated in place, its counters are advanced after a step that succeeded.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks as _GLOBAL_POST_HOOKS
from torch.optim.optimizer import _global_optimizer_pre_hooks as _GLOBAL_PRE_HOOKS

from rm_abstract import _core
from rm_abstract.base.decline import Decline

_ADAM = (torch.optim.Adam, torch.optim.AdamW)
_FUNCTIONS = ("step", "zero_grad", "_init_group")  # what a step calls of its optimizer


@dataclass(frozen=True)
class Rule:
    """What changes the formula of one parameter group; everything else is a number per step."""

    algorithm: str  # "sgd" or "adam"
    momentum: bool = False
    nesterov: bool = False
    weight_decay: bool = False
    decoupled: bool = False
    amsgrad: bool = False
    maximize: bool = False

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


_rule = functools.cache(Rule)  # one object each: programs compare them at every step


def _number(group: dict[str, Any], name: str) -> float:
    value = group[name]
    if isinstance(value, torch.Tensor) or not isinstance(value, (int, float)):
        raise Decline("RM701", f"{name} is a {type(value).__name__} and no number")
    return float(value)


def _is_foreign(hook: Any) -> bool:
    """Not the session's own, which notes writes that leave no version: a step counts versions."""
    owner = getattr(hook, "func", hook)
    return not (getattr(owner, "__module__", None) or "").startswith("rm_abstract.")


def formula(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], str, Any]:
    """(namespace, name, function) of what computes a step of SGD or Adam."""
    name = "adam" if isinstance(optimizer, _ADAM) else "sgd"
    space = vars(sys.modules[f"torch.optim.{name}"])
    return space, name, space[name]


@functools.lru_cache(maxsize=64)
def _is_torchs(function: Any) -> bool:
    """Whether it, and all that it wraps, is a function of torch's own."""
    while function is not None:
        if not isinstance(function, types.FunctionType):
            return False
        if str(function.__globals__.get("__name__")).split(".")[0] != "torch":
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def check(optimizer: torch.optim.Optimizer) -> None:
    """Raises Decline for an optimiser whose step does more than a program would."""
    kind = type(optimizer)
    if kind not in (torch.optim.SGD, *_ADAM):
        raise Decline("RM701", f"{kind.__module__}.{kind.__qualname__}")
    if (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or any(map(_is_foreign, _GLOBAL_PRE_HOOKS.values()))
        or any(map(_is_foreign, _GLOBAL_POST_HOOKS.values()))
    ):
        raise Decline("RM701", "hooks of the optimizer's step")
    if not _is_torchs(formula(optimizer)[2]):
        raise Decline("RM701", "the function of the optimizer's formula was replaced")
    for name in _FUNCTIONS:
        own = vars(optimizer).get(name)
        scheduled = name == "step" and hasattr(own, "_wrapped_by_lr_sched")
        if not _is_torchs(getattr(kind, name, None)) or not (
            own is None or (scheduled and _is_torchs(own))
        ):
            raise Decline("RM701", f"the optimizer's {name} was replaced")


def rules(optimizer: torch.optim.Optimizer) -> tuple[Rule, ...]:
    """The rule of every group. Raises Decline for settings that have none."""
    adam = isinstance(optimizer, _ADAM)
    found = []
    for group in optimizer.param_groups:
        if not optimizer.defaults.keys() <= group.keys():
            missing = optimizer.defaults.keys() - group.keys()
            raise Decline("RM701", f"a group without {', '.join(sorted(missing))}")
        if group.get("differentiable") or group.get("capturable"):
            raise Decline("RM701", "differentiable or capturable")
        decay = _number(group, "weight_decay") != 0
        maximize = bool(group.get("maximize"))
        if not adam:
            momentum = _number(group, "momentum") != 0
            nesterov = bool(group["nesterov"])
            found.append(_rule("sgd", momentum, nesterov, decay, False, False, maximize))
            continue
        decoupled = bool(group.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW))
        amsgrad = bool(group["amsgrad"])
        found.append(_rule("adam", False, False, decay, decoupled, amsgrad, maximize))
    return tuple(found)


@functools.cache
def state_names(rule: Rule) -> tuple[str, ...]:
    """Names of one parameter's state tensors in the optimiser's ``state``."""
    return tuple(_core.autograd.states(rule.as_dict()))


def states(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, rule: Rule
) -> list[torch.Tensor] | None:
    """The state tensors the program updates; None when the optimiser has not made them yet."""
    names = state_names(rule)
    if not names:
        return []
    held = optimizer.state.get(parameter, {})
    found = [held.get(name) for name in names]
    return None if any(tensor is None for tensor in found) else found


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimiser is counted, by parameter."""
    return isinstance(optimizer, _ADAM)


class _Cell:
    """The number of a tensor that is not written where it lies."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def value(self) -> float:
        return float(self._tensor)

    @value.setter
    def value(self, number: float) -> None:
        self._tensor.fill_(number)


_CELLS: dict[torch.dtype, Any] = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


def _cell(counter: Any) -> Any:
    if not isinstance(counter, torch.Tensor) or not counter.is_cpu:
        raise Decline("RM701", "a counter of steps that is no tensor on the CPU")
    kind = _CELLS.get(counter.dtype)
    plain = counter.numel() == 1 and counter.layout is torch.strided
    return _Cell(counter) if kind is None or not plain else kind.from_address(counter.data_ptr())


class Counters:
    """The optimiser's counters of steps, which are torch's tensors: read and written in place, as
    an operator of torch's for each of them takes longer than the rest of a small step."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []
        self._sizes: list[int] = []  # how many of each group
        self._places: list[int] = []
        self._cells: list[list[Any]] = []  # by group

    def read(self, taken: list[list[torch.Tensor]]) -> list[float]:
        """The steps that each group took. Raises Decline when they differ within a group."""
        held = [s for steps in taken for s in steps]
        sizes = [*map(len, taken)]
        same = sizes == self._sizes and all(map(operator.is_, held, self._held))
        if not same or [s.data_ptr() for s in held] != self._places:
            self._sizes = []  # until all of them are known
            self._cells = [[_cell(s) for s in steps] for steps in taken]
            self._held, self._places = held, [s.data_ptr() for s in held]
            if len(set(self._places)) != len(held):
                raise Decline("RM701", "parameters that share a counter of steps")
            self._sizes = sizes
        out = []
        for cells in self._cells:
            counts = {cell.value for cell in cells}
            if len(counts) > 1:
                why = "parameters of one group that took different numbers of steps"
                raise Decline("RM701", why)
            out.append(counts.pop() if counts else 0.0)
        return out

    def write(self, counts: list[float]) -> None:
        """The steps that each group of those that were read last took."""
        for cells, count in zip(self._cells, counts, strict=True):
            for cell in cells:
                cell.value = count
        torch.autograd.graph.increment_version(self._held)


def numbers(optimizer: torch.optim.Optimizer, counts: list[float]) -> list[float]:
    """The rows of the program's input ``hyper``, in float64, for the step that comes next.

    ``counts`` are the steps taken, by group.
    """
    out: list[float] = []
    for group, count in zip(optimizer.param_groups, counts, strict=True):
        lr, decay = _number(group, "lr"), _number(group, "weight_decay")
        if "momentum" in group:
            momentum, dampening = _number(group, "momentum"), _number(group, "dampening")
            out += _core.autograd.sgd_numbers(lr, decay, momentum, dampening)
            continue
        beta1, beta2 = group["betas"]
        if isinstance(beta1, torch.Tensor) or isinstance(beta2, torch.Tensor):
            raise Decline("RM701", "betas that are tensors")
        eps = _number(group, "eps")
        row = _core.autograd.adam_numbers(lr, decay, beta1, beta2, eps, count)
        if row is None:
            raise Decline("RM701", f"betas {beta1}, {beta2} behind {count:g} steps")
        out += row
    return out


def note_finite(optimizer: torch.optim.Optimizer, scaler: Any, finite: bool) -> None:
    """Tells a GradScaler what it would have found in the gradients, and has it move its scale."""
    found = torch.tensor(0.0 if finite else 1.0)
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {found.device: found}
    scaler.update()


def was_finite(optimizer: torch.optim.Optimizer, scaler: Any) -> bool:
    """What a GradScaler found in the gradients of this step; between its step and its update."""
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return not any(float(v) for v in found.values())


def advanced(optimizer: torch.optim.Optimizer, counters: Counters, counts: list[float]) -> None:
    """Counts a step that succeeded behind ``counts``, as the optimiser's own step does."""
    if is_adam(optimizer):
        counters.write([count + 1.0 for count in counts])
    optimizer._opt_called = True  # type: ignore[attr-defined] # what lr schedulers look at
