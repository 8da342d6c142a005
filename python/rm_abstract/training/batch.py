"""The arguments of one step: which of them are tensors, and what a program was made for."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rm_abstract.base.decline import Decline

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by precision
_VALUES = (bool, int, float, str, type(None))


@functools.cache
def _spec_of(targets: int) -> Any:
    """The structure of one tensor and so many targets: what most loops have."""
    return pytree.tree_structure((0, (0,) * targets))


def flatten(
    inputs: Any, targets: tuple[Any, ...], device: torch.device
) -> tuple[list[torch.Tensor], Hashable, Any]:
    """(tensors, key, what rebuilds them): steps with equal keys are served by one program.

    Raises Decline for arguments that a program on ``device`` cannot take.
    """
    leaves: list[Any]
    structure: Hashable  # a number of targets, or what hashes slower
    if type(inputs) is torch.Tensor and all(type(t) is torch.Tensor for t in targets):
        structure = len(targets)
        leaves, spec = [inputs, *targets], _spec_of(structure)
    else:
        leaves, spec = pytree.tree_flatten((inputs, targets))
        structure = spec
    tensors: list[torch.Tensor] = []
    kinds: list[Hashable] = []
    for leaf in leaves:
        if type(leaf) is torch.Tensor:
            if leaf.requires_grad or not is_dense(leaf):
                raise Decline("RM703", "a batch with gradients, or that is no dense tensor")
            if leaf.is_inference():  # eager may not keep it for a gradient
                raise Decline("RM703", "a batch that was made in inference mode")
            if leaf.device != device:
                raise Decline("RM703", f"a batch on {leaf.device} for a model on {device}")
            tensors.append(leaf)
            kinds.append((leaf.shape, leaf.dtype))
        elif isinstance(leaf, _VALUES):
            kinds.append((type(leaf), leaf))
        else:
            raise Decline("RM703", f"a {type(leaf).__name__} in the batch")
    return tensors, (structure, tuple(kinds)), (leaves, spec)


def is_dense(t: torch.Tensor) -> bool:
    """Whether its memory is its value: strided, and not negated or conjugated when it is read."""
    return t.layout is torch.strided and not t.is_neg() and not t.is_conj()


def call_model(model: torch.nn.Module, inputs: Any) -> Any:
    """``inputs``: a dict of keyword arguments, a tuple or list of positional ones, or one."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def loss_of(
    model: torch.nn.Module,
    loss_fn: Any,
    inputs: Any,
    targets: Sequence[Any],
    precision: str = "auto",
    kind: str = "cpu",
) -> Any:
    """The loss; without a ``loss_fn`` it is the field ``loss`` of the model's output.

    ``precision`` "bf16" or "fp16" is torch's autocast, for devices of this ``kind``, around model
    and loss, "auto" none.
    """
    if precision != "auto":
        with torch.autocast(kind, HALF[precision]):
            return loss_of(model, loss_fn, inputs, targets)
    output = call_model(model, inputs)
    if loss_fn is not None:
        return loss_fn(output, *targets)
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise ValueError("[compile_step] expected a loss_fn, or a model whose output has a loss")
    return loss


class StepModule(torch.nn.Module):
    """Model and loss as one module: what is captured, and what the guard watches."""

    def __init__(self, model: torch.nn.Module, loss_fn: Any, precision: str) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.precision = precision
        self.kind = "cpu"  # of the model's device
        self.training = model.training

    def forward(self, inputs: Any, targets: tuple[Any, ...]) -> Any:
        return loss_of(self.model, self.loss_fn, inputs, targets, self.precision, self.kind)


class OfTensors(torch.nn.Module):
    """A StepModule as a function of a list of tensors, for one structure of arguments."""

    def __init__(self, step: StepModule, structure: Any) -> None:
        super().__init__()
        self.step = step
        leaves, spec = structure
        constants = [None if isinstance(x, torch.Tensor) else (x,) for x in leaves]

        def arguments(tensors: list[torch.Tensor]) -> Any:
            rest = iter(tensors)
            values = [next(rest) if c is None else c[0] for c in constants]
            return pytree.tree_unflatten(values, spec)

        self._arguments = arguments  # a function: a copy of this module does not copy the spec
        self.training = step.training

    def forward(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = self._arguments(tensors)
        loss = self.step(inputs, targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise Decline("RM704", f"a {type(loss).__name__} {tuple(getattr(loss, 'shape', ()))}")
        return loss
