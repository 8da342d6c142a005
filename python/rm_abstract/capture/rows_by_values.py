"""Rows that are split where values of a tensor say, each part times a weight of its own, and the
products laid end to end again: a mixture of experts in plain PyTorch. Such parts have sizes that no
input has; together they are one product in groups, whose sizes are those of the rows.

Only graphs are looked at: what is found is imported as one operator, and its parts not at all.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped,unused-ignore]
import torch

from rm_abstract.capture.ir_builder import IrBuilder, Value

A = torch.ops.aten
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Grouped:
    """`rows` [S,K] in groups of `sizes` [E] rows, group e times the transpose of `weights`[e]."""

    rows: torch.fx.Node
    sizes: torch.fx.Node
    weights: list[torch.fx.Node]  # [N,K] each, or one of [E,N,K]


@dataclass
class Found:
    """By concatenation: the product it is; nodes that only lead to it; sizes by others."""

    products: dict[torch.fx.Node, Grouped] = field(default_factory=dict)
    inner: set[torch.fx.Node] = field(default_factory=set)
    sizes: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)


def product_of(b: IrBuilder, values: Mapping[torch.fx.Node, Any], found: Grouped) -> Value:
    """Products of groups of rows, as one."""
    rows, sizes = values[found.rows], values[found.sizes]
    weights = [values[w] for w in found.weights]
    if len(weights) > 1 or weights[0].rank == 2:
        width = weights[0].dims
        parts = [b.reshape(w, [1, *width]) for w in weights]
        weights = [b.concat(parts, 0, [len(parts), *width])]
    matrices = b.permute(weights[0], [0, 2, 1])
    ends = b.op("cumsum", [b.cast(sizes, "i64")], "i64", sizes.dims, axis=0)
    dims = [rows.dims[0], matrices.dims[2]]
    return b.op("grouped_gemm", [rows, matrices, ends], rows.dtype, dims)


def find(graph: torch.fx.Graph) -> Found:
    found = Found()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is A.cat.default:
            _look_at(node, found)
    return found


def _look_at(node: torch.fx.Node, found: Found) -> None:
    parts: Any = node.args[0]
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if axis != 0 or not parts or not all(_is(p, A.linear.default) for p in parts):
        return
    if any(len(p.args) != 2 or p.kwargs or len(p.users) != 1 for p in parts):
        return
    pieces = [p.args[0] for p in parts]
    if not all(_is(p, operator.getitem) and p.args[1] == i for i, p in enumerate(pieces)):
        return
    split = pieces[0].args[0]
    sizes = _split_sizes(split)
    if sizes is None or any(p.args[0] is not split or len(p.users) != 1 for p in pieces):
        return
    counts = _counted(sizes)
    if counts is None or len(sizes) != len(parts) or len(split.users) != len(parts):
        return
    symbols = [s.meta["val"].node.expr for s in sizes]
    if not all(isinstance(s, sympy.Symbol) for s in symbols) or len(set(symbols)) != len(symbols):
        return
    weights = [p.args[1] for p in parts]
    found.products[node] = Grouped(split.args[0], counts, _stacked(weights))
    found.inner |= {split, *pieces, *parts}
    if symbols[-1] not in found.sizes:
        total = split.args[0].meta["val"].shape[0]
        whole = total if isinstance(total, int) else total.node.expr
        found.sizes[symbols[-1]] = whole - sum(symbols[:-1])


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.target is target


def _split_sizes(split: Any) -> list[torch.fx.Node] | None:
    if not _is(split, A.split_with_sizes.default):
        return None
    part = split.meta["val"][0]
    if part.dim() != 2 or part.dtype not in _TYPES:
        return None
    axis = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    sizes = list(split.args[1])
    return sizes if axis == 0 and all(isinstance(s, torch.fx.Node) for s in sizes) else None


def _counted(sizes: list[torch.fx.Node]) -> torch.fx.Node | None:
    """The tensor of which the sizes are the elements, in order and all of them."""
    source = None
    for i, size in enumerate(sizes):
        if not (_is(size, A.item.default) or _is(size, A._local_scalar_dense.default)):
            return None
        element: Any = size.args[0]
        if _is(element, operator.getitem) and _is(element.args[0], A.unbind.int):
            tensor, at = element.args[0].args[0], element.args[1]
        elif _is(element, A.select.int) and element.args[1] == 0:
            tensor, at = element.args[0], element.args[2]
        else:
            return None
        if at != i or (source is not None and tensor is not source):
            return None
        source = tensor
    shape = None if source is None else source.meta["val"].shape
    return source if shape is not None and tuple(shape) == (len(sizes),) else None


def _stacked(weights: list[Any]) -> list[torch.fx.Node]:
    """The tensor of which these are the matrices in order, or themselves."""
    first = weights[0]
    if not _is(first, A.select.int):
        return weights
    whole = first.args[0]
    in_order = all(
        _is(w, A.select.int) and w.args[0] is whole and tuple(w.args[1:]) == (0, i)
        for i, w in enumerate(weights)
    )
    return [whole] if in_order and whole.meta["val"].shape[0] == len(weights) else weights
