"""Hooks where autograd adds a gradient to its parameter, as DistributedDataParallel sets them.

They hang on the node ``AccumulateGrad``, of which a parameter knows as long as a graph, or who set
the hook, holds it. Torch counts such a node among the users of the tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


def accumulation_hooks(p: torch.Tensor) -> list[Any]:
    """The dicts of hooks of its node, before and behind it; none where it has no node.

    A hook that is set later is in one of them, as long as the node lives.
    """
    before = p._use_count()  # type: ignore[attr-defined]
    if before == 1:
        return []  # nothing but Python holds it
    node: Any = get_gradient_edge(p).node
    if p._use_count() != before:  # type: ignore[attr-defined]
        return []  # made for this question
    handles = [node.register_hook(_nothing), node.register_prehook(_nothing)]
    dicts = [handle.hooks_dict_ref() for handle in handles]
    for handle in handles:
        handle.remove()
    return dicts


def _nothing(*_: Any) -> None:
    """A hook that is removed before it could be called."""
