"""Modes of torch that a step's program does not have: asked before every step, by Python or C++."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from rm_abstract.base.decline import Decline
from rm_abstract.base.scope import disabled_var
from rm_abstract.training.place import Place

_NO_LEVEL = -1  # of forward-mode gradients

# The innermost pair of hooks that sees what a backward needs, or None.
_saved_tensors_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


_BACKWARDS = torch.Tensor.backward, torch.autograd.backward


def foreign_backward() -> bool:
    """Whether somebody replaced what a loss's ``backward`` runs."""
    return (torch.Tensor.backward, torch.autograd.backward) != _BACKWARDS


def check_modes(place: Place) -> None:
    """Raises Decline for a mode that changes what this step computes, or who sees it."""
    place.check()
    if not torch.is_grad_enabled():
        raise Decline("RM706", "gradients are switched off")
    if torch.is_autocast_enabled(place.kind):
        raise Decline("RM106", "autocast")
    if torch.is_anomaly_enabled() or torch.is_inference_mode_enabled():
        raise Decline("RM706", "anomaly detection or inference mode")
    if _saved_tensors_hooks() is not None:
        raise Decline("RM706", "hooks of the tensors that a backward needs")
    if forward_ad._current_level != _NO_LEVEL:
        raise Decline("RM706", "forward-mode gradients")
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise Decline("RM103", "a mode that sees every operator is active")
    if disabled_var.get() is not None:
        raise Decline("RM108", "")


def quiet() -> list[Any]:
    """Functions that give False or None while no such mode is on, beside those that the C++ router
    asks anyway."""
    return [
        torch.is_anomaly_enabled,
        torch.is_inference_mode_enabled,
        _saved_tensors_hooks,
        foreign_backward,
    ]


def still() -> list[tuple[dict[str, Any], str, Any]]:
    """(namespace, name, the value it has while no such mode is on)."""
    return [(vars(forward_ad), "_current_level", _NO_LEVEL)]
