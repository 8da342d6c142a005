"""A call's tensors in the order in which programs take them, caches unfolded in place.

Needed by every served call: imports no more of torch than an eager call does.
"""

from __future__ import annotations

from typing import Any

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.calls.call import FlatCall
from rm_abstract.kv import kv_cache


def held_tensors(cache: Any) -> list[torch.Tensor]:
    """The tensors of a cache. Raises Decline for one that cannot be read as tensors."""
    held = kv_cache.read(cache)
    if isinstance(held, Decline):
        raise held
    return held


def call_tensors(call: FlatCall) -> list[torch.Tensor]:
    """The inputs of a call's program. Raises Decline."""
    tensors: list[torch.Tensor] = []
    for leaf in call.leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        else:
            tensors += held_tensors(leaf)
    return tensors
