"""Draws cases: a holder, the way forward reads it, an edit, when and from where it is made.

A case is a module's source text and a plan of steps; `edit_runner` carries it out.
"""
# Source text of the cases: its lines end where they end there.
# ruff: noqa: E501

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from edit_holders import EFFECTS, HOLDERS, Holder

HEADER = """
import array, collections, contextvars, ctypes, dataclasses, enum, functools, itertools, logging
import operator, os, queue, random, sys, tempfile, threading, time, types, warnings, weakref
import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn

AFTER = []
X = torch.arange(32.0).reshape(4, 8) / 32


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)


"""

# How forward comes to the value; {read} is the holder's expression, with `self` and `x`.
PATHS = {
    "direct": "        return torch.relu(y) * ({read})\n",
    "local": "        v = {read}\n        return torch.relu(y) * v + v\n",
    "branch": "        v = {read}\n        if isinstance(v, float) and v > 2.5:\n            return y * 5\n"
    "        return torch.relu(y) * v\n",
    "inner_function": "        def inner():\n            return {read}\n        return torch.relu(y) * inner()\n",
    "lambda": "        return torch.relu(y) * (lambda: {read})()\n",
    "comprehension": "        return torch.relu(y) * [({read}) for _ in range(1)][0]\n",
    "caught": "        try:\n            v = {read}\n        except (KeyError, AttributeError, IndexError, NameError):\n"
    "            v = 11.0\n        return torch.relu(y) * v\n",
    "loop": "        for _ in range(2):\n            y = y + 1\n        return torch.relu(y) * ({read})\n",
    "method": "        return torch.relu(y) * self.value(x)\n\n    def value(self, x):\n        return {read}\n",
    "property": "        self_x = x\n        return torch.relu(y) * self.value\n\n    @property\n    def value(self):\n"
    "        x = X\n        return {read}\n",
    "helper": "        return torch.relu(y) * helper(self, x)\n\n\ndef helper(self, x):\n    return {read}\n",
    "wrapped": "        return torch.relu(y) * wrapped(self, x)\n\n\ndef plain(self, x):\n    return {read}\n\n\n"
    "@functools.wraps(plain)\ndef wrapped(*args):\n    return plain(*args)\n",
    "mapped": "        return torch.relu(y) * list(map(lambda s: helper(s, x), [self]))[0]\n\n\ndef helper(self, x):\n"
    "    return {read}\n",
}
TIMINGS = (
    "first",
    "after_one",
    "after_some",
    "in_thread",
    "call_in_thread",
    "back_and_forth",
    "both_shapes",
)
MODES = ("no_grad", "inference_mode", "grad")
# Below a root that cannot be captured the model is served as a part: calls before the first step.
# Two calls are PyTorch's (one is refused, one is measured), 70 bring the router's direct programs.
WARM = (2, 5, 12, 70)
PARTS = 1 / 3  # the share of such cases


@dataclass(frozen=True)
class Case:
    number: int
    holder: str
    path: str
    edit: str  # empty: a control without an edit, or an effect that is only called
    timing: str
    mode: str
    effect: bool
    control: bool  # should be served by a program
    warm: int  # calls that choose and serve parts before the first step; 0: the model is the root
    source: str
    edit_source: str
    state: str

    @property
    def name(self) -> str:
        part = f"/part after {self.warm}" if self.warm else ""
        return f"{self.number}:{self.holder}/{self.path}/{self.edit or 'none'}/{self.timing}/{self.mode}{part}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"name": self.name}


def script(holder: Holder, path: str) -> str:
    """The module of one case: `Model`, whose forward reads the holder by the path."""
    members = holder.methods + "\n" if holder.methods else ""
    return (
        HEADER
        + holder.module
        + "\n\nclass Model(Base):\n"
        + members
        + "    def __init__(self):\n        super().__init__()\n"
        + (f"        {holder.init}\n" if holder.init else "")
        + "\n    def forward(self, x):\n        y = self.inner(x)\n"
        + PATHS[path].replace("{read}", holder.read)
    )


def case_of(
    number: int, name: str, path: str, edit: str, timing: str, mode: str, warm: int = 0
) -> Case:
    effect = name in EFFECTS
    holder = EFFECTS[name] if effect else HOLDERS[name]
    return Case(
        *(number, name, path, edit, timing, mode, effect),
        # Parts leave calls with gradients to PyTorch.
        control=holder.control and not effect and not edit and not (warm and mode == "grad"),
        warm=warm,
        source=script(holder, path),
        edit_source=holder.edits[edit] if edit else "",
        state=holder.state,
    )


def draw(seed: int, count: int, parts: float = PARTS) -> list[Case]:
    """`count` cases, the same for the same seed; a sixth are controls, a sixth are effects. In
    a share of `parts` the model is a part of a root that cannot be captured.
    """
    rng = random.Random(seed)
    cases = []
    for number in range(count):
        kind = rng.random()
        effect, edited = kind < 1 / 6, kind >= 1 / 3
        table = EFFECTS if effect else HOLDERS
        name = rng.choice(sorted(table))
        path = rng.choice(sorted(PATHS))
        edits = sorted(table[name].edits)
        edit = rng.choice([*edits, ""]) if effect else rng.choice(edits) if edited else ""
        timing, mode = rng.choice(TIMINGS), rng.choice(MODES)
        warm = rng.choice(WARM) if rng.random() < parts else 0
        cases.append(case_of(number, name, path, edit, timing, mode, warm))
    return cases
