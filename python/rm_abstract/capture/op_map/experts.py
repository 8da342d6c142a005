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
        if c.b.for_training or c.b.on_gpu or not isinstance(ends, Value):
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

    A place as torch computes it, in the elements' type; what lies outside, and NaN, goes to a place
    behind the last.
    """
    b, x = c.b, c.value("self")
    low, high, bins = c["min"], c["max"], c["bins"]
    if b.for_training or b.on_gpu or x.dtype not in ("f32", "f64"):
        return None
    if not all(isinstance(n, (int, float)) for n in (low, high)) or not low < high:
        return None  # equal: the range is that of the elements
    x = b.reshape(x, [product(x.dims)])

    def number(value: float) -> Value:
        return b.scalar(x.dtype, value)

    above = b.binary("ge", x, number(low), "bool")
    inside = b.binary("and", above, b.binary("le", x, number(high), "bool"))
    scaled = b.binary("mul", b.binary("sub", x, number(low)), number(bins))
    place = b.binary("div", scaled, b.binary("sub", number(high), number(low)))
    place = b.binary("minimum", b.unary("floor", place), number(bins - 1))
    place = b.cast(b.where(inside, place, number(bins)), "i64")
    none, one = b.expand(number(0), [bins + 1]), b.expand(number(1), x.dims)
    counts = b.op("scatter", [none, place, one], x.dtype, [bins + 1], axis=0, kind="add")
    return b.slice(counts, 0, 0, bins)


TABLE: dict[str, Handler] = {
    "_grouped_mm.default": _grouped("self", "mat2"),
    "transformers.grouped_mm_fallback.default": _grouped("input", "weight"),
    "histc.default": _histc,
}
