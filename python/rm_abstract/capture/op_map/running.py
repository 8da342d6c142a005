"""Running products and extremes, and writes at places that combine with what was there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call, Handler

_KINDS = {
    "sum": "add",
    "add": "add",
    "prod": "mul",
    "multiply": "mul",
    "amax": "max",
    "amin": "min",
}
_STARTS = {"add": 0.0, "mul": 1.0, "max": float("-inf"), "min": float("inf")}


def _cumprod(c: Call) -> Value | None:
    x = c.value("self")
    narrow = c.dtype in ("i32", "i16", "i8", "u8")  # the low bits of a product wrap alike
    x = c.b.cast(x, "i64" if narrow else c.dtype)
    if x.rank == 0 or c.b.for_training:
        return x if x.rank == 0 and x.dtype == c.dtype else None
    axis = c.axis("dim", x.rank)
    return c.b.cast(c.b.op("scan", [x], x.dtype, x.dims, axis=axis, kind="prod"), c.dtype)


def _logcumsumexp(c: Call) -> Value | None:
    x = c.value("self")
    if c.b.for_training or not x.is_float:
        return None
    if x.rank == 0:
        return x
    return c.b.op("scan", [x], x.dtype, x.dims, axis=c.axis("dim", x.rank), kind="logsumexp")


def _extreme(kind: str) -> Handler:
    """The running extreme and where it stood last: the largest place so far that equals it."""

    def handler(c: Call) -> Sequence[Value] | None:
        x, b = c.value("self"), c.b
        if b.for_training:
            return None
        if x.rank == 0:
            return [x, b.scalar("i64", 0)]
        axis = c.axis("dim", x.rank)
        y = b.op("scan", [x], x.dtype, x.dims, axis=axis, kind=kind)
        found = b.binary("eq", x, y, "bool")
        if x.is_float:  # a NaN is the extreme of all that follow
            found = b.binary("or", found, b.unary("isnan", x, "bool"))
        line = [1] * x.rank
        line[axis] = x.dims[axis]
        place = b.reshape(b.iota(x.dims[axis]), line)
        place = b.expand(b.where(found, place, b.scalar("i64", 0)), x.dims)
        return [y, b.op("scan", [place], "i64", x.dims, axis=axis, kind="max")]

    return handler


def _written(c: Call, x: Value, index: Value, source: Value, axis: int) -> Value | None:
    """x with the source combined into it at the places of the index, of the source's shape."""
    b, how = c.b, c["reduce"]
    mean = how == "mean"
    kind = "add" if mean else _KINDS.get(how)
    if kind is None or b.for_training or source.dtype != x.dtype:
        return None
    fresh = c["include_self"] is False
    if (mean or fresh) and x.dtype not in ("f32", "f64"):
        return None

    def scattered(into: Value, what: Value, how: str) -> Value:
        return b.op("scatter", [into, index, what], into.dtype, into.dims, axis=axis, kind=how)

    ones = b.expand(b.scalar(x.dtype, 1), index.dims) if mean or fresh else None
    counts: Value | None = None
    if ones is not None:
        counts = scattered(b.expand(b.scalar(x.dtype, 0), x.dims), ones, "add")
    old = x
    if fresh and counts is not None:
        met = b.binary("gt", counts, b.scalar(x.dtype, 0), "bool")
        old = b.where(met, b.scalar(x.dtype, _STARTS[kind]), x)
    y = scattered(old, source, kind)
    if mean and counts is not None:
        one = b.scalar(x.dtype, 1)
        counts = b.binary("maximum", counts, one) if fresh else b.binary("add", counts, one)
        y = b.binary("div", y, counts)
    return y


def _scatter_reduce(c: Call) -> Value | None:
    x, index = c.value("self"), c.value("index")
    if x.rank == 0 or index.rank != x.rank or index.dtype != "i64":
        return None
    given: Any = c["src"] if c["src"] is not None else c["value"]
    source = c.operand(given, x.dtype)
    if source.rank == 0:
        source = c.b.expand(source, index.dims)
    else:
        for i, size in enumerate(index.dims):
            source = c.b.slice(source, i, 0, size)
    return _written(c, x, index, source, c.axis("dim", x.rank))


def _index_reduce(c: Call) -> Value | None:
    x, index, source = c.value("self"), c.value("index"), c.value("source")
    if index.rank != 1:
        return None
    if x.rank == 0:  # torch takes it for a line of one element
        x, source = c.b.reshape(x, [1]), c.b.reshape(source, list(index.dims))
        y = _written(c, x, c.b.cast(index, "i64"), source, 0)
        return None if y is None else c.b.reshape(y, [])
    axis = c.axis("dim", x.rank)
    column = [source.dims[axis] if i == axis else 1 for i in range(x.rank)]
    wide = c.b.expand(c.b.reshape(c.b.cast(index, "i64"), column), source.dims)
    return _written(c, x, wide, source, axis)


TABLE: dict[str, Handler] = {
    "cumprod.default": _cumprod,
    "logcumsumexp.default": _logcumsumexp,
    "cummax.default": _extreme("max"),
    "cummin.default": _extreme("min"),
    "scatter_reduce.two": _scatter_reduce,
    "scatter.reduce": _scatter_reduce,
    "scatter.value_reduce": _scatter_reduce,
    "index_reduce.default": _index_reduce,
}
