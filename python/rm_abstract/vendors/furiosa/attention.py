"""Attention in the words of FuriosaAI's compiler: products, a softmax, and a mask that is added.

It lowers no booleans. And the CPU's fused attention, which torch.export asks for the layout of the
result, has another one than the vendor's decomposition: views of it that export takes down do not
hold there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rm_abstract.plugin import Failure
from rm_abstract.worker.ir_text import Node, Program

# Large against any score and finite: rows that see nothing stay numbers.
HIDDEN = -1e9
_MASK = 3  # sdpa(q, k, v, mask)


def mask_inputs(program: Program) -> set[int]:
    """Positions among the inputs of booleans that nothing but attention reads, as its mask."""
    found = set()
    for position, value in enumerate(program.inputs):
        if program.types[value].dtype != "bool" or value in program.outputs:
            continue
        uses = [
            node.op == "sdpa" and place == _MASK
            for node in program.nodes
            for place, operand in enumerate(node.operands)
            if operand == value
        ]
        if uses and all(uses):
            found.add(position)
    return found


def as_sum(mask: torch.Tensor) -> torch.Tensor:
    """f32 of the mask's shape: 0 where it is true, HIDDEN elsewhere."""
    return torch.zeros(mask.shape).masked_fill_(~mask, HIDDEN)


def spelled_out(operands: Sequence[Any], node: Node) -> Any:
    """sdpa(q, k, v, mask?) of `worker.ir_to_torch`, the mask as a sum. Raises Failure RM304."""
    if node.i("is_causal"):
        raise Failure(
            "[furiosa compile] expected attention with a mask as input or none, got the causal one",
            "RM304",
        )
    q, k, v = operands[:3]
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.matmul(q * node.f("scale"), k.transpose(-2, -1))
    if len(operands) > _MASK and operands[_MASK] is not None:
        scores = scores + operands[_MASK]
    return torch.matmul(torch.softmax(scores, -1), v)
