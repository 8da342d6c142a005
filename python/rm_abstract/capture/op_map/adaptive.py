"""Adaptive pools, nearest and cubic resizing for any size: elements picked by computed places, one
axis at a time."""

from __future__ import annotations

from typing import Any

from rm_abstract.capture.dims import Dim, floordiv, plus
from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call, Handler
from rm_abstract.capture.op_map.functions import Maths


def _most(size: Dim, count: int) -> Dim:
    """No window is longer than ceil(size / count) + 1."""
    return floordiv(plus(size, 2 * count - 1), count)


def _along(c: Call, x: Value, axis: int, count: int, kind: str) -> Value:
    """Window o is the elements floor(o size / count) ... ceil((o + 1) size / count) - 1."""
    b, size = c.b, x.dims[axis]
    number, length = b.scalar("i64", count), b.dim_value(size)
    steps = b.binary("mul", b.reshape(b.iota(count), [count, 1]), length)
    begin = b.binary("floor_div", steps, number)
    ends = b.binary("add", steps, b.binary("add", length, b.scalar("i64", count - 1)))
    end = b.binary("floor_div", ends, number)
    place = b.binary("add", begin, b.iota(_most(size, count)))
    inside = b.binary("lt", place, end, "bool")
    place = b.binary("minimum", place, b.binary("sub", end, b.scalar("i64", 1)))
    dims = [*x.dims[:axis], *place.dims, *x.dims[axis + 1 :]]
    windows = b.op("index", [x, place], x.dtype, dims, axes=[axis])
    if kind == "max":  # an element that is met twice changes nothing
        return b.reduce("max", windows, [axis + 1], False, x.dtype)
    after = [1] * (x.rank - 1 - axis)
    live = b.reshape(inside, [*inside.dims, *after])
    total = b.where(live, windows, b.scalar(x.dtype, 0))
    total = b.reduce("sum", total, [axis + 1], False, x.dtype)
    of = b.cast(b.reshape(b.binary("sub", end, begin), [count, *after]), x.dtype)
    return b.binary("div", total, of)


def adaptive(c: Call, kind: str, axes: int) -> Value | None:
    """A pool to sizes that need not divide the image's."""
    x, wanted = c.value("self"), c.dims[len(c.dims) - axes :]
    if not all(isinstance(w, int) and w > 0 for w in wanted):
        return None
    y = c.b.cast(x, "f32") if x.dtype in ("bf16", "f16") else x
    for axis in range(x.rank - axes, x.rank):
        count = c.dims[axis]
        assert isinstance(count, int)
        y = _along(c, y, axis, count, kind)
    return c.finish(y)


def nearest(axes: int, half: float) -> Handler:
    """Element o of the result is element floor((o + half) size / count), in f32 as in torch."""

    def handler(c: Call) -> Value | None:
        b, factors = c.b, c["scale_factors"]
        y = c.value("input")
        if factors or c["output_size"] is None or y.rank != axes + 2:
            return None
        for axis in range(2, axes + 2):
            size, count = y.dims[axis], c.dims[axis]
            if not isinstance(count, int):
                return None
            length = b.dim_value(size)
            step = b.binary("div", b.cast(length, "f32"), b.scalar("f32", count))
            at = b.binary("add", b.cast(b.iota(count), "f32"), b.scalar("f32", half))
            place = b.cast(b.unary("floor", b.binary("mul", at, step)), "i64")
            place = b.binary("minimum", place, b.binary("sub", length, b.scalar("i64", 1)))
            dims: list[Any] = [*y.dims[:axis], count, *y.dims[axis + 1 :]]
            y = b.op("index", [y, place], y.dtype, dims, axes=[axis])
        return y

    return handler


def _cubic_along(c: Call, x: Value, axis: int, count: Dim, factor: Any, corners: bool) -> Value:
    """Element o is a sum of the four elements around its place, those outside being the edge's."""
    b, size, kind = c.b, x.dims[axis], x.dtype
    m = Maths(b, kind)
    length, wanted = (b.cast(b.dim_value(d), kind) for d in (size, count))
    steps = b.cast(b.iota(count), kind)
    if corners:  # one element of a result is the first
        at = m.mul(steps, m.div(m.sub(length, 1.0), m.maximum(m.sub(wanted, 1.0), 1.0)))
    else:
        step = m.operand(1.0 / factor) if factor else m.div(length, wanted)
        at = m.sub(m.mul(m.add(steps, 0.5), step), 0.5)
    low = m.floor(at)
    t = m.sub(at, low)
    taps = []
    for tap in (-1, 0, 1, 2):
        far = m.abs(m.sub(t, float(tap)))
        near = m.add(m.mul(m.mul(m.sub(m.mul(1.25, far), 2.25), far), far), 1.0)
        beyond = m.sub(m.mul(m.add(m.mul(m.sub(far, 5.0), far), 8.0), far), 4.0)
        outer = tap in (-1, 2)  # farther than one
        taps.append(b.reshape(m.mul(-0.75, beyond) if outer else near, [count, 1]))
    weights = b.concat(taps, 1, [count, 4])
    first = b.reshape(b.cast(low, "i64"), [count, 1])
    place = b.binary("add", first, b.iota(4, start=-1))
    place = b.binary("maximum", place, b.scalar("i64", 0))
    place = b.binary("minimum", place, b.dim_value(plus(size, -1)))
    dims = [*x.dims[:axis], count, 4, *x.dims[axis + 1 :]]
    seen = b.op("index", [x, place], kind, dims, axes=[axis])
    weights = b.reshape(weights, [count, 4, *([1] * (x.rank - 1 - axis))])
    return b.reduce("sum", b.binary("mul", seen, weights), [axis + 1], False, kind)


def cubic(names: tuple[str, ...] | None) -> Handler:
    """Bicubic resizing; `names` of the factors where they are arguments of their own."""

    def handler(c: Call) -> Value | None:
        x = c.value("self" if names else "input")
        factors = [c[name] for name in names] if names else c["scale_factors"] or [None, None]
        if x.rank != 4 or not x.is_float or c.b.for_training:
            return None
        y = x if x.dtype == "f64" else c.b.cast(x, "f32")
        for axis in (2, 3):
            corners = bool(c["align_corners"])
            y = _cubic_along(c, y, axis, c.dims[axis], factors[axis - 2], corners)
        return c.finish(y)

    return handler
