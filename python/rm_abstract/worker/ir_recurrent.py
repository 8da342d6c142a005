"""recurrent of the IR in torch, step by step, by the semantics of docs/operators.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from rm_abstract.worker.ir_text import Node


def _gated(cell: str, x: Any, kept: Any, h: Any, c: Any) -> tuple[Any, Any]:
    """The new state, and the new cell state of an lstm."""
    if cell == "lstm":
        i, f, g, o = (x + kept).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if cell == "gru":
        (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), kept.chunk(3, 1)
        n = (xn + (xr + hr).sigmoid() * hn).tanh()
        return n + (xz + hz).sigmoid() * (h - n), None
    return (x + kept).tanh() if cell == "tanh" else (x + kept).relu(), None


def recurrent(o: Sequence[Any], node: Node) -> list[Any]:
    """[y, h] or, of an lstm, [y, h, c]."""
    x, w, h, c, bias, proj = (*o, None, None, None)[:6]
    axis, cell = node.i("batch_first", 0), str(node.attrs["cell"])
    steps = list(range(x.shape[axis]))
    if node.i("reverse", 0):
        steps.reverse()
    outputs = {}
    for t in steps:
        h, c = _gated(cell, x.select(axis, t), linear(h, w, bias), h, c)
        h = h if proj is None else linear(h, proj)
        outputs[t] = h
    y = torch.stack([outputs[t] for t in sorted(outputs)], axis)
    return [y, h] if c is None else [y, h, c]
