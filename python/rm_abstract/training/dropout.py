"""Dropout of a compiled step, and the same numbers for eager.

A program draws by a counter (operator `uniform`), eager from torch's generator. For the one step
that both make, eager's dropouts are given the program's numbers: then the two can be compared like
any other step. Their order is that of the calls.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rm_abstract.worker.ir_random import philox_uniform

_streams = itertools.count()


def new_state() -> torch.Tensor:
    """i64 [2]: a seed that follows torch.manual_seed and differs between steps; no draws yet."""
    return torch.tensor([(torch.initial_seed() + next(_streams)) & (2**63 - 1), 0])


class Drawing(TorchFunctionMode):
    """Within it, dropouts draw what a program with this state draws."""

    def __init__(self, state: torch.Tensor) -> None:
        super().__init__()
        self._seed, self._next = (int(v) for v in state)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.dropout or kwargs.get("inplace"):
            return func(*args, **kwargs)
        x, p = args[0], kwargs.get("p", 0.5)
        if not kwargs.get("training", True) or p == 0:
            return func(*args, **kwargs)
        drawn = philox_uniform(torch.tensor([self._seed, self._next]), tuple(x.shape)).float()
        self._next += 1
        keep = (drawn >= torch.tensor(p, dtype=torch.float32)).to(x.device)
        return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros_like(x))
