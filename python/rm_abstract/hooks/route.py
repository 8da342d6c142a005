"""The C router of a module as Python makes it: what it is told of torch and of the module."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from rm_abstract import _core
from rm_abstract.base.config import Settings
from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import Error
from rm_abstract.base.scope import disabled_var
from rm_abstract.guards import writes

# A new part (a resized embedding, an adapter) is born in training mode: harmless for these.
_SAME_IN_TRAINING = (
    *(nn.Linear, nn.Bilinear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Identity),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Sequential, nn.ModuleList, nn.ModuleDict),
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softmax, nn.Flatten),
)


class RouteFailure(Exception):
    """Raised by the C router when an entry failed with an error of ours; never leaves the shim."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def new_route(module: Any, facts: Any, settings: Settings) -> Any:
    """A _core.router.Route on a module; it compiles nothing and has no entries yet."""
    names, positional = _parameters(module)
    errors = (Error, _core.CoreError)
    route = _core.router.make_route(facts, module, names, positional, errors, RouteFailure)
    if settings.text("guard") == "strict":
        route.compare_contents()
    return route


def _parameters(module: Any) -> tuple[tuple[str, ...], int]:
    """Names of forward's parameters in order, and how many of them bind by position."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a builtin forward: everything is *args and **kwargs
        return (), 0
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p for p in parameters if p.kind in (*by_position, inspect.Parameter.KEYWORD_ONLY)]
    return tuple(p.name for p in named), sum(p.kind in by_position for p in named)


def make_facts() -> Any:
    """What the C router needs to know of this process's torch; feature-detected."""
    from torch.utils._python_dispatch import _disable_current_modes

    # The probe makes a few tensors: ordinary ones, whatever context the user loads the model in.
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        facts = _core.router.Facts(torch, disabled_var, Decline, writes.registry())
    for kind in _SAME_IN_TRAINING:
        facts.ignore_training(kind)
    return facts
