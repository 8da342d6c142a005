"""Steps about which Python has nothing left to decide run from C++ (decision 0220).

`settle` remembers a step that ran compiled and was compared: everything that `TrainingStep` looked
at on the way. As long as all of that is as it was, `SettledStep.run` makes the step; where anything
is not, it returns None, nothing has happened, and the long way decides again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks as _GLOBAL_POST_HOOKS
from torch.optim.optimizer import _global_optimizer_pre_hooks as _GLOBAL_PRE_HOOKS

from rm_abstract import _core
from rm_abstract.capture.ir_builder import RANDOM
from rm_abstract.training import modes, optimizers
from rm_abstract.training.program import StepProgram

# Steps of a program by the long way before it is remembered, and before it is so again: a loop that
# changes something at each step pays nothing for it.
_STEPS_BEFORE = 3


def due(found: StepProgram) -> bool:
    """Whether a step that Python made is to be remembered; C++ makes those that update parameters
    and neither draw nor scale nor clip anything."""
    found.long_ways += 1
    if found.long_ways < _STEPS_BEFORE:
        return False
    found.long_ways = 0
    wanted = found.wanted
    plain = not (wanted.clip_norm or wanted.clip_value or wanted.scaled)
    drawn = found.draws or RANDOM in found.frozen
    return bool(wanted.rules) and plain and wanted.micro_batches == 1 and not drawn


def settle(
    found: StepProgram,
    optimizer: torch.optim.Optimizer,
    batch: list[torch.Tensor],
    hyper: torch.Tensor,
    buffers: list[torch.Tensor],
    frozen: list[torch.Tensor],
    guards: tuple[Any, Any, list[Any]],
) -> Any:
    """A `_core.training.SettledStep`, or None where something in it cannot be watched.

    ``guards``: what the C router knows of torch, the guard of the module tree, dicts of hooks on
    the way of gradients.
    """
    facts, tree, hooks = guards
    adam = optimizers.is_adam(optimizer)
    rows = []
    for t in found.trained:
        held = optimizer.state.get(t.tensor, {})
        states = {name: held[name] for name in found.state_names[t.group]}
        rows.append((t.tensor, t.group, states, held["step"] if adam else None))
    quiet = modes.quiet()
    if hyper.device.type == "cuda":
        quiet.append(torch._C._cuda_isCurrentStreamCapturing)
    try:
        watched = _core.training.WatchedOptimizer(
            optimizer,
            [rule.as_dict() for rule in found.wanted.rules],
            [_GLOBAL_PRE_HOOKS, _GLOBAL_POST_HOOKS],
        )
        return _core.training.SettledStep(
            facts,
            found.program,
            tree,
            watched,
            batch,
            hyper,
            rows,
            buffers,
            frozen,
            hooks,
            quiet,
            [*modes.still(), optimizers.formula(optimizer)],
        )
    except (KeyError, ValueError, _core.CoreError):
        return None
