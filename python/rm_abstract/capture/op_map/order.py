"""Places in an order: medians, quantiles, the k-th value; and elements put where a mask says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rm_abstract.capture.dims import Dim, plus, product
from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call, Handler


def _sorted(c: Call, x: Value, axis: int) -> list[Value]:
    """Values and indices in ascending order; NaN comes last."""
    types = [(x.dtype, x.dims), ("i64", x.dims)]
    return c.b.multi("sort", [x], types, axis=axis, descending=0, k=-1)


def _picked(c: Call, x: Value, at: Value, axis: int) -> Value:
    return c.b.op("gather", [x, at], x.dtype, at.dims, axis=axis)


def _kthvalue(c: Call) -> Sequence[Value] | None:
    x, k = c.value("self"), c["k"]
    if not isinstance(k, int):
        return None
    if x.rank == 0:
        return [x, c.b.scalar("i64", 0)]
    axis = c.axis("dim", x.rank)
    return [
        c.b.reshape(c.b.slice(part, axis, k - 1, 1), dims)
        for part, (_, dims) in zip(_sorted(c, x, axis), c.types, strict=True)
    ]


def _is_nan(c: Call, x: Value) -> Value:
    return c.b.unary("isnan", x, "bool") if x.is_float else c.b.full("bool", x.dims, 0)


def _numbers(c: Call, x: Value, axis: int) -> Value:
    """How many elements along the axis are no NaN, i64 of size 1 there."""
    return c.b.reduce("sum", c.b.unary("logical_not", _is_nan(c, x), "bool"), [axis], True, "i64")


def _median_of(c: Call, x: Value, axis: int, skip: bool) -> list[Value]:
    """The lower median along an axis and its index; a NaN wins unless it is to be skipped."""
    b, size = c.b, x.dims[axis]
    values, indices = _sorted(c, x, axis)
    one, two, zero = (b.scalar("i64", n) for n in (1, 2, 0))
    count = _numbers(c, x, axis)
    at = b.binary("maximum", b.binary("sub", count, one), zero)
    at = b.binary("floor_div", at, two)
    if not skip:  # the first NaN stands behind all numbers
        whole = b.binary("eq", count, b.dim_value(size), "bool")
        at = b.where(whole, at, count)
    return [_picked(c, values, at, axis), _picked(c, indices, at, axis)]


def _median(skip: bool) -> Handler:
    def handler(c: Call) -> Any:
        x = c.value("self")
        if not x.is_float:
            return None
        if x.rank == 0:
            return [x, c.b.scalar("i64", 0)] if "dim" in c.args else x
        if "dim" in c.args:
            found = _median_of(c, x, c.axis("dim", x.rank), skip)
            return [c.b.reshape(part, dims) for part, (_, dims) in zip(found, c.types, strict=True)]
        flat = c.b.reshape(x, [product(x.dims)])
        return c.b.reshape(_median_of(c, flat, 0, skip)[0], [])

    return handler


def _between(c: Call, low: Value, high: Value, weight: Value) -> Value:
    """As torch's lerp: from the nearer end."""
    b = c.b
    way = b.binary("sub", high, low)
    half, one = b.scalar(low.dtype, 0.5), b.scalar(low.dtype, 1)
    near = b.binary("lt", weight, half, "bool")
    from_low = b.binary("add", low, b.binary("mul", weight, way))
    from_high = b.binary("sub", high, b.binary("mul", way, b.binary("sub", one, weight)))
    return b.where(near, from_low, from_high)


def _rank(c: Call, x: Value, q: Value, skip: bool) -> Value:
    """Where the quantiles stand in the order, as numbers of x's type: [..., Q]."""
    b, axis = c.b, x.rank - 1
    count = _numbers(c, x, axis)
    one, zero = b.scalar("i64", 1), b.scalar("i64", 0)
    last = b.binary("sub", b.dim_value(x.dims[axis]), one)
    if skip:
        last = b.binary("maximum", b.binary("sub", count, one), zero)
    rank = b.binary("mul", q, b.cast(last, x.dtype))
    if skip:
        return rank
    whole = b.binary("eq", count, b.dim_value(x.dims[axis]), "bool")
    return b.where(whole, rank, b.cast(last, x.dtype))  # NaN, if any, is the last


def _quantile(skip: bool) -> Handler:
    def handler(c: Call) -> Value | None:
        x, b, how = c.value("self"), c.b, c["interpolation"]
        if x.rank == 0 or x.dtype not in ("f32", "f64"):
            return None
        q = c.operand(c["q"], x.dtype)
        many = q.rank == 1
        if c["dim"] is None:
            x = b.reshape(x, [product(x.dims)])
        else:
            axis = c.axis("dim", x.rank)
            x = b.permute(x, [*(i for i in range(x.rank) if i != axis), axis])
        lines: list[Dim] = list(x.dims[:-1])
        count: Dim = q.dims[0] if many else 1
        q = b.reshape(q, [*([1] * len(lines)), count])
        rank = b.expand(_rank(c, x, q, skip), [*lines, count])
        values, axis = _sorted(c, x, x.rank - 1)[0], x.rank - 1
        if how == "nearest":
            rank = b.unary("round", rank)
        below, above = b.unary("floor", rank), b.unary("ceil", rank)
        low = _picked(c, values, b.cast(below, "i64"), axis)
        if how in ("linear", "midpoint"):
            high = _picked(c, values, b.cast(above, "i64"), axis)
            weight = b.binary("sub", rank, below)
            if how == "midpoint":
                weight = b.scalar(x.dtype, 0.5)
            low = _between(c, low, high, weight)
        elif how == "higher":
            low = _picked(c, values, b.cast(above, "i64"), axis)
        if many:
            low = b.permute(low, [low.rank - 1, *range(low.rank - 1)])
        return b.reshape(low, c.dims)

    return handler


def _masked_scatter(c: Call) -> Value | None:
    """The n-th place that the mask marks takes the n-th element of the source."""
    x, mask, source = c.value("self"), c.value("mask"), c.value("source")
    b = c.b
    if mask.dtype != "bool" or source.dtype != x.dtype or not x.rank:
        return None
    x, mask = b.expand(x, c.dims), b.expand(mask, c.dims)
    count = product(c.dims)
    flat = b.cast(b.reshape(mask, [count]), "i64")
    place = b.op("cumsum", [flat], "i64", flat.dims, axis=0)
    place = b.binary("sub", place, b.scalar("i64", 1))
    # Places before the first mark have no element: what they read is not used.
    place = b.binary("maximum", place, b.scalar("i64", 0))
    line = b.reshape(source, [product(source.dims)])
    taken = b.op("index", [line, place], x.dtype, place.dims, axes=[0])
    return b.where(mask, b.reshape(taken, c.dims), x)


def _diagonal_scatter(c: Call) -> Value:
    """x with its diagonal (i, i + offset) of two axes replaced."""
    x, src, offset, b = c.value("self"), c.value("src"), int(c["offset"]), c.b
    first, second = c.axis("dim1", x.rank), c.axis("dim2", x.rank)
    order = [i for i in range(x.rank) if i not in (first, second)] + [first, second]
    turned = b.permute(x, order)
    rows, columns = turned.dims[-2:]
    row, column = b.iota(rows), b.iota(columns, start=-offset)
    hit = b.binary("eq", b.reshape(row, [rows, 1]), column, "bool")
    at = b.iota(rows, start=min(offset, 0))
    at = b.binary("maximum", at, b.scalar("i64", 0))
    at = b.binary("minimum", at, b.dim_value(plus(src.dims[-1], -1)))
    taken = b.op("index", [src, at], x.dtype, [*src.dims[:-1], rows], axes=[src.rank - 1])
    y = b.where(hit, b.reshape(taken, [*taken.dims, 1]), turned)
    return b.permute(y, [order.index(i) for i in range(x.rank)])


TABLE: dict[str, Handler] = {
    "kthvalue.default": _kthvalue,
    **{f"median.{kind}": _median(skip=False) for kind in ("default", "dim")},
    **{f"nanmedian.{kind}": _median(skip=True) for kind in ("default", "dim")},
    **{f"quantile.{kind}": _quantile(skip=False) for kind in ("default", "scalar")},
    **{f"nanquantile.{kind}": _quantile(skip=True) for kind in ("default", "scalar")},
    "masked_scatter.default": _masked_scatter,
    "diagonal_scatter.default": _diagonal_scatter,
}
