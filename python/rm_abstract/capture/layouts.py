"""Outputs that eager gives with their axes in another order in memory (a transposed matrix, images
with channels last): the program computes them in that order, and a permuted view is given.

So `view`, `stride` and `is_contiguous` of an output say what they say without us.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.export import ExportedProgram

_PERMUTE = torch.ops.aten.permute.default


def put_in_order(program: ExportedProgram, views: Collection[int]) -> dict[int, list[int]]:
    """Makes such outputs contiguous in the graph; by output number, how to permute them back.

    `views` are outputs that are taken from another tensor anyway.
    """
    (end,) = (n for n in program.graph.nodes if n.op == "output")
    outputs = list(end.args[0])
    found: dict[int, list[int]] = {}
    for number, node in enumerate(outputs):
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if number in views or not isinstance(value, torch.Tensor):
            continue
        order = _order(value)
        if order is None:
            continue
        with program.graph.inserting_before(end):
            turned = program.graph.call_function(_PERMUTE, (node, order))
        turned.meta.update(node.meta)
        turned.meta["val"] = value.permute(order)
        outputs[number] = turned
        found[number] = [order.index(axis) for axis in range(len(order))]
    if found:
        end.args = (type(end.args[0])(outputs),)
        program.graph_module.recompile()
    return found


def _order(value: torch.Tensor) -> list[int] | None:
    """The axes from the slowest to the fastest, of a dense tensor that is not contiguous."""
    sizes, strides = [_hint(s) for s in value.shape], [_hint(s) for s in value.stride()]
    if None in sizes or None in strides or 0 in strides:
        return None
    real = [axis for axis, size in enumerate(sizes) if size != 1]
    slowest = sorted(real, key=lambda axis: -strides[axis])
    if slowest == real:
        return None
    expected = 1
    for axis in reversed(slowest):
        if strides[axis] != expected:
            return None  # with gaps: part of a larger tensor
        expected *= sizes[axis]
    # Axes of one element lie anywhere: they keep their places.
    moving = iter(slowest)
    return [axis if sizes[axis] == 1 else next(moving) for axis in range(len(sizes))]


def _hint(size: Any) -> Any:
    """The number in the call that was captured."""
    return size if isinstance(size, int) else getattr(size.node, "hint", None)
