"""conv, pool, resize and group_norm of the IR in torch, by the semantics of docs/operators.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from rm_abstract.worker.ir_text import Node

Operands = Sequence[Any]


def _ints(node: Node, name: str, count: int, otherwise: int) -> list[int]:
    return node.ints(name) if name in node.attrs else [otherwise] * count


def _split(node: Node, axes: int) -> tuple[list[int], list[int]]:
    """Padding at the begins and at the ends."""
    padding = _ints(node, "padding", 2 * axes, 0)
    return padding[:axes], padding[axes:]


def _padded(x: Any, begins: list[int], ends: list[int], value: float) -> Any:
    pairs = [p for pair in zip(begins[::-1], ends[::-1], strict=True) for p in pair]
    return functional.pad(x, pairs, value=value) if any(pairs) else x


def _conv(o: Operands, node: Node) -> Any:
    x, w, bias = o[0], o[1], o[2] if len(o) > 2 else None
    axes = x.dim() - 2
    stride, dilation = _ints(node, "stride", axes, 1), _ints(node, "dilation", axes, 1)
    begins, ends = _split(node, axes)
    groups = node.i("groups", 1)
    if node.i("transposed", 0):
        more = _ints(node, "output_padding", axes, 0)
        if begins != ends:
            raise ValueError("[ir_to_torch] expected equal paddings of a transposed convolution")
        function = getattr(functional, f"conv_transpose{axes}d")
        return function(x, w, bias, stride, begins, more, groups, dilation)
    if begins != ends:
        x, begins = _padded(x, begins, ends, 0.0), [0] * axes
    return getattr(functional, f"conv{axes}d")(x, w, bias, stride, begins, dilation, groups)


def _pool(o: Operands, node: Node) -> Any:
    """By windows: dilation, divisors and uneven padding have no one operator in torch."""
    x, kernel = o[0], node.ints("kernel")
    axes = len(kernel)
    stride, dilation = _ints(node, "stride", axes, 1), _ints(node, "dilation", axes, 1)
    begins, ends = _split(node, axes)
    largest = node.attrs["kind"] == "max"
    inside = torch.ones_like(x)
    # torch counts padding up to the size of the begins; what an end has beyond it is not there.
    counted = _padded(inside, begins, begins, 1.0)
    rest = [end - begin for begin, end in zip(begins, ends, strict=True)]
    counted = _padded(counted, [0] * axes, rest, 0.0)
    inside = _padded(inside, begins, ends, 0.0)
    x = _padded(x, begins, ends, -torch.inf if largest else 0.0)
    for a in range(axes):
        reach = dilation[a] * (kernel[a] - 1) + 1
        x, inside, counted = (
            t.unfold(2 + a, reach, stride[a])[..., :: dilation[a]] for t in (x, inside, counted)
        )
    window = list(range(-axes, 0))
    if largest:
        return x.amax(window)
    count: Any = node.i("divisor", 0)
    if not count:
        count = (counted if node.i("count_include_pad", 1) else inside).sum(window)
    return x.sum(window) / count


def _positions(node: Node, axis: int, size: int, count: int) -> tuple[Any, Any, Any]:
    """Along one axis: the first and the second element of each, and the weight of the second."""
    ratio = node.floats("ratio")[axis]
    at = torch.arange(count)
    if node.attrs["mode"] == "nearest":
        first = (at.float() * torch.tensor(ratio).float()).floor().long().clamp(max=size - 1)
        return first, first, torch.zeros(count)
    corners = node.i("align_corners", 0)
    real = at * ratio if corners else ((at + 0.5) * ratio - 0.5).clamp(min=0)
    first = real.long().clamp(max=size - 1)
    return first, (first + 1).clamp(max=size - 1), (real - first).clamp(max=1)


def _resize(o: Operands, node: Node) -> Any:
    x, shape = o[0], node.types[0].shape
    for axis in range(x.dim() - 2):
        first, second, weight = _positions(node, axis, x.shape[2 + axis], shape[2 + axis])
        low, high = x.index_select(2 + axis, first), x.index_select(2 + axis, second)
        sizes = [1] * x.dim()
        sizes[2 + axis] = -1
        x = torch.lerp(low, high, weight.to(x.dtype).reshape(sizes))
    return x


def _group_norm(o: Operands, node: Node) -> Any:
    weight, bias = o[1] if len(o) > 1 else None, o[2] if len(o) > 2 else None
    return functional.group_norm(o[0], node.i("groups"), weight, bias, node.f("eps"))


IMAGES: dict[str, Callable[[Operands, Node], Any]] = {
    "conv": _conv,
    "pool": _pool,
    "resize": _resize,
    "group_norm": _group_norm,
}
