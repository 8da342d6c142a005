"""Elements turned round, mirrored or put elsewhere: operators that are an index, a scatter or a
choice between two values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rm_abstract.capture.dims import Dim, plus, product
from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call, Handler


def _along(c: Call, x: Value, axis: int, index: Value) -> Value:
    """x's elements at `index` [n] along one axis."""
    dims = [*x.dims[:axis], index.dims[0], *x.dims[axis + 1 :]]
    return c.b.op("index", [x, index], x.dtype, dims, axes=[axis])


def _flip(c: Call) -> Value:
    x = c.value("self")
    for axis in c.axes("dims", x.rank) if c["dims"] else []:
        x = _along(c, x, axis, c.b.iota(x.dims[axis], start=plus(x.dims[axis], -1), step=-1))
    return x


def turned(c: Call, x: Value, axis: int, shift: Any) -> Value:
    """x rolled along an axis of any size by a number, a size or a computed number."""
    by = c.operand(shift, "i64")
    at = c.b.binary("sub", c.b.iota(x.dims[axis]), by)
    return _along(c, x, axis, c.b.binary("remainder", at, c.b.dim_value(x.dims[axis])))


def _mirrored(c: Call, at: Value, last: Dim, mode: str) -> Value:
    """Places outside of 0..last as places inside."""
    b = c.b
    end, zero = b.dim_value(last), b.scalar("i64", 0)
    if mode == "replicate":
        return b.binary("minimum", b.binary("maximum", at, zero), end)
    if mode == "circular":
        return b.binary("remainder", at, b.dim_value(plus(last, 1)))
    beyond = b.unary("abs", b.binary("sub", end, b.unary("abs", at)))
    return b.binary("sub", end, beyond)


def padded(c: Call, x: Value, pads: Sequence[Any], mode: str) -> Value | None:
    """Padding with elements of x; `pads` as torch has them, from the last axis."""
    if not all(isinstance(p, int) and p >= 0 for p in pads) or mode not in _MODES:
        return None
    for i in range(len(pads) // 2):
        low, high, axis = pads[2 * i], pads[2 * i + 1], x.rank - 1 - i
        if low or high:
            at = c.b.iota(plus(x.dims[axis], low + high), start=-low)
            x = _along(c, x, axis, _mirrored(c, at, plus(x.dims[axis], -1), mode))
    return x


_MODES = ("reflect", "replicate", "circular")


def _pad(mode: str) -> Handler:
    return lambda c: padded(c, c.value("self"), c["padding"], mode)


def _diagonal(c: Call) -> Value:
    """A view of torch's, made here: elements (i, i + offset) of two axes, as the last one."""
    x, offset = c.value("self"), int(c["offset"])
    first, second = c.axis("dim1", x.rank), c.axis("dim2", x.rank)
    others = [i for i in range(x.rank) if i not in (first, second)]
    turned = c.b.permute(x, [*others, first, second])
    count = c.dims[-1]
    rows, columns = (c.b.iota(count, start=max(0, s)) for s in (-offset, offset))
    axes = [x.rank - 2, x.rank - 1]
    return c.b.op("index", [turned, rows, columns], x.dtype, c.dims, axes=axes)


def _masked(c: Call, x: Value, mask: Value, values: Value) -> Value | None:
    """x[mask] = one number."""
    if values.rank != 0 and [d for d in values.dims if d != 1]:
        return None
    number = c.b.cast(c.b.reshape(values, []), x.dtype)
    wide = c.b.reshape(mask, [*mask.dims, *([1] * (x.rank - mask.rank))])
    return c.b.expand(c.b.where(wide, number, x), x.dims)


def _index_put(c: Call) -> Value | None:
    """x[..., i0, i1, ..., :] = values for integer indices of neighbouring axes: a scatter along
    these axes laid end to end."""
    x, values, b = c.value("self"), c.value("values"), c.b
    axes = [i for i, v in enumerate(c["indices"]) if v is not None]
    indices = [c["indices"][i] for i in axes]
    if len(indices) == 1 and indices[0].dtype == "bool" and axes == [0] and not c["accumulate"]:
        return _masked(c, x, indices[0], values)
    if not indices or axes != list(range(axes[0], axes[0] + len(axes))):
        return None
    if any(v.dtype not in ("i64", "i32") for v in indices):
        return None
    before, after = x.dims[: axes[0]], x.dims[axes[-1] + 1 :]
    place: Value | None = None
    for axis, index in zip(axes, indices, strict=True):
        size = b.dim_value(x.dims[axis])
        at = b.cast(index, "i64")
        negative = b.binary("lt", at, b.scalar("i64", 0), "bool")
        at = b.where(negative, b.binary("add", at, size), at)
        place = at if place is None else b.binary("add", b.binary("mul", place, size), at)
    assert place is not None
    count = product(place.dims)
    source = b.expand(b.cast(values, x.dtype), [*before, *place.dims, *after])
    lines = [product(before), count, product(after)]
    inside = product(x.dims[axes[0] : axes[-1] + 1])
    wide = b.expand(b.reshape(place, [1, count, 1]), lines)
    flat = b.reshape(x, [lines[0], inside, lines[2]])
    kind = "add" if c["accumulate"] else "set"
    operands = [flat, wide, b.reshape(source, lines)]
    return b.reshape(b.op("scatter", operands, x.dtype, flat.dims, axis=1, kind=kind), x.dims)


def _put(c: Call) -> Value | None:
    """Elements of the flattened x, by number."""
    x, index, source, b = c.value("self"), c.value("index"), c.value("source"), c.b
    if source.dtype != x.dtype or x.rank == 0:
        return None
    count, all_of = product(index.dims), product(x.dims)
    at = b.reshape(b.cast(index, "i64"), [count])
    negative = b.binary("lt", at, b.scalar("i64", 0), "bool")
    at = b.where(negative, b.binary("add", at, b.dim_value(all_of)), at)
    operands = [b.reshape(x, [all_of]), at, b.reshape(source, [count])]
    kind = "add" if c["accumulate"] else "set"
    return b.reshape(b.op("scatter", operands, x.dtype, [all_of], axis=0, kind=kind), x.dims)


def _index_add(c: Call) -> Value | None:
    x, index, source = c.value("self"), c.value("index"), c.value("source")
    if x.rank == 0 or index.rank != 1 or source.dtype != x.dtype:
        return None
    axis = c.axis("dim", x.rank)
    if c["alpha"] != 1:
        source = c.b.binary("mul", source, c.operand(c["alpha"], x.dtype))
    column = [source.dims[axis] if i == axis else 1 for i in range(x.rank)]
    wide = c.b.expand(c.b.reshape(c.b.cast(index, "i64"), column), source.dims)
    return c.b.op("scatter", [x, wide, source], x.dtype, x.dims, axis=axis, kind="add")


def _argsort(c: Call) -> Value | None:
    x = c.value("self")
    if x.rank == 0:
        return None
    types = [(x.dtype, x.dims), ("i64", x.dims)]
    descending = int(bool(c["descending"]))
    return c.b.multi("sort", [x], types, axis=c.axis("dim", x.rank), descending=descending)[1]


def _cosine_similarity(c: Call) -> Value | None:
    """Each vector over its norm, or over eps where that is larger."""
    a, b = c.value("x1"), c.value("x2")
    if a.dtype != b.dtype or a.dtype not in ("f32", "f64") or a.rank != b.rank or a.rank == 0:
        return None
    axis = c.axis("dim", a.rank)

    def unit(x: Value) -> Value:
        squares = c.b.reduce("sum", c.b.binary("mul", x, x), [axis], True, x.dtype)
        norm = c.b.binary("maximum", c.b.unary("sqrt", squares), c.operand(c["eps"], x.dtype))
        return c.b.binary("div", x, norm)

    return c.b.reduce("sum", c.b.binary("mul", unit(a), unit(b)), [axis], False, a.dtype)


TABLE: dict[str, Handler] = {
    "flip.default": _flip,
    "diagonal.default": _diagonal,
    "diagonal_copy.default": _diagonal,
    "put.default": _put,
    "index_put.default": _index_put,
    "index_add.default": _index_add,
    "argsort.default": _argsort,
    "argsort.stable": _argsort,
    "cosine_similarity.default": _cosine_similarity,
    **{f"reflection_pad{n}d.default": _pad("reflect") for n in (1, 2, 3)},
    **{f"replication_pad{n}d.default": _pad("replicate") for n in (1, 2, 3)},
}
