"""A call as a program's tensors, as a size pattern, and as a copy that running it cannot move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import CompileError, Error, from_core, internal
from rm_abstract.calls.call import CallSpec, FlatCall
from rm_abstract.capture import output_classes
from rm_abstract.kv import kv_cache

Pattern = tuple[Any, ...]  # what torch specialises a capture on: sizes 0 and 1, empty caches


def unfold(
    leaves: tuple[Any, ...], read: Callable[[Any], Any] = kv_cache.read
) -> tuple[list[torch.Tensor], Pattern, list[bool]]:
    """The IR's inputs of a call, what torch specialises on, and which inputs are a cache's past.

    Images with channels last are another pattern: outputs follow them in memory.

    Raises Decline for a cache that cannot be read as tensors.
    """
    tensors: list[torch.Tensor] = []
    pattern: list[Any] = []
    marks: list[bool] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            marks.append(False)
            sizes: Pattern = tuple([d if d < 2 else 2 for d in leaf.shape])
            if leaf.dim() == 4 and not leaf.is_contiguous():
                sizes += (leaf.is_contiguous(memory_format=torch.channels_last),)
            pattern.append(sizes)
            continue
        held = read(leaf)
        if isinstance(held, Decline):
            raise held
        marks[len(tensors) :] = kv_cache.past_marks(leaf, held)
        tensors += held
        pattern.append(kv_cache.size_pattern(leaf, held))
    return tensors, tuple(pattern), marks


def snapshot(spec: CallSpec, leaves: tuple[Any, ...]) -> FlatCall:
    """The call as it is now: caches copied by reference, so that running it moves nothing."""
    copies = [leaf if isinstance(leaf, torch.Tensor) else kv_cache.copied(leaf) for leaf in leaves]
    return FlatCall(spec, copies)


def everything(value: Any) -> Any:
    return value


def wants_gradients(output: Any) -> bool:
    """Whether a tensor of an output requires gradients: a program's never do."""
    if isinstance(output, torch.Tensor):
        return output.requires_grad
    if isinstance(output, dict):
        return any(map(wants_gradients, output.values()))
    if isinstance(output, (list, tuple)):
        return any(map(wants_gradients, output))
    parts = output_classes.take(output)
    return parts is not None and any(map(wants_gradients, parts.children))


def reported(error: Exception) -> Error | Decline:
    """An exception of ours as policy and report know it; another one becomes RM306."""
    if isinstance(error, (Error, Decline)):
        return error
    if isinstance(error, _core.CoreError):
        return from_core(error, CompileError)
    return internal(error, "compile")
