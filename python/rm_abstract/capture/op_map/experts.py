"""Mixtures of experts: rows sorted by expert, how many each has, and their products with matrices
of their own.
"""

from __future__ import annotations

from rm_abstract.capture.dims import product
from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call, Handler


def _grouped(x: str, w: str) -> Handler:
    """Rows [S,K] in groups that end at offs [E], each times its matrix of [E,K,N]."""

    def handler(c: Call) -> Value | None:
        rows, matrices, ends = c.value(x), c.value(w), c["offs"]
        if c.b.for_training or not isinstance(ends, Value):
            return None
        if (rows.rank, matrices.rank, ends.rank) != (2, 3, 1) or c["bias"] is not None:
            return None
        if ends.dtype not in ("i32", "i64") or not rows.dtype == matrices.dtype == c.dtype:
            return None
        if rows.dtype not in ("f32", "bf16", "f16"):  # PyTorch is faster in f64
            return None
        dims = [rows.dims[0], matrices.dims[2]]
        return c.b.op("grouped_gemm", [rows, matrices, ends], rows.dtype, dims)

    return handler


def _histc(c: Call) -> Value | None:
    """How many elements lie in each of equal parts of [min, max]; the last part is closed.

    A place as torch computes it, in the elements' type (integers, which only its GPU kernel counts,
    in 64 bits); what lies outside, and NaN, goes to a place behind the last.
    """
    b, x = c.b, c.value("self")
    low, high, bins = c["min"], c["max"], c["bins"]
    if b.for_training or x.dtype not in ("f32", "f64", "i64", "i32", "i16", "i8", "u8"):
        return None
    if not all(isinstance(n, (int, float)) for n in (low, high)) or not low < high:
        return None  # equal: the range is that of the elements
    floats = x.dtype in ("f32", "f64")
    counted = x.dtype if floats else "i64"
    if not floats:
        low, high = int(low), int(high)  # torch drops what is behind the point
        if not low < high or (high - low) * bins >= 1 << 62:
            return None
    x = b.cast(b.reshape(x, [product(x.dims)]), counted)

    def number(value: float) -> Value:
        return b.scalar(counted, value)

    above = b.binary("ge", x, number(low), "bool")
    inside = b.binary("and", above, b.binary("le", x, number(high), "bool"))
    scaled = b.binary("mul", b.binary("sub", x, number(low)), number(bins))
    width = b.binary("sub", number(high), number(low))
    if floats:
        place = b.unary("floor", b.binary("div", scaled, width))
    else:
        place = b.binary("floor_div", scaled, width)
    place = b.binary("minimum", place, number(bins - 1))
    place = b.cast(b.where(inside, place, number(bins)), "i64")
    none, one = b.expand(number(0), [bins + 1]), b.expand(number(1), x.dims)
    counts = b.op("scatter", [none, place, one], counted, [bins + 1], axis=0, kind="add")
    return b.cast(b.slice(counts, 0, 0, bins), c.dtype)


TABLE: dict[str, Handler] = {
    "_grouped_mm.default": _grouped("self", "mat2"),
    "transformers.grouped_mm_fallback.default": _grouped("input", "weight"),
    "histc.default": _histc,
}
