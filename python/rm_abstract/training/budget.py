"""Steps under a memory budget: what is computed twice so that the arena is small enough.

The pass counts the temporaries of a program; kernels' workspaces and copies that lowering makes
come on top. So the arena of the finished program decides, and the pass is asked again for less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rm_abstract import _core

_TRIES = 8


@dataclass
class Fitted:
    program: Any
    text: str
    arena: int  # bytes
    recomputed: list[dict[str, Any]] = field(default_factory=list)  # _core.ir.recompute: values


def arena_of(program: Any, inputs: list[torch.Tensor]) -> int:
    """Bytes of the arena for inputs of these shapes; runs nothing."""
    program.kernel_set(inputs)
    return int(program.report()["arena_bytes"])


def fit(
    program: Any,
    text: str,
    budget: int,
    compile_text: Callable[[str], Any],
    inputs: list[torch.Tensor],
) -> Fitted:
    """The program with the smallest arena found, the first that is within the budget (bytes)."""
    best = Fitted(program, text, arena_of(program, inputs))
    limit, arena = budget, best.arena
    for _ in range(_TRIES):
        if arena <= budget:
            break
        made = _core.ir.recompute(text, limit)
        again = compile_text(made["text"])
        arena = arena_of(again, inputs)
        if arena < best.arena:
            best = Fitted(again, made["text"], arena, made["values"])
        if made["after"] > limit:
            break  # nothing is left that would help
        limit = min(limit, made["after"]) - max(arena - budget, 1)
    return best


def summary(recomputed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By operator and type of the value: how many are computed again, and what that frees."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for value in recomputed:
        row = rows.setdefault(
            (value["operator"], value["type"]),
            {
                "operator": value["operator"],
                "type": value["type"],
                "values": 0,
                "bytes": 0,
                "operators": 0,
                "share": 0.0,
            },
        )
        row["values"] += 1
        for name in ("bytes", "operators", "share"):
            row[name] += value[name]
    return list(rows.values())
