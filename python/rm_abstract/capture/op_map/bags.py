"""Embedding bags of training steps: a look-up, and a sum or mean of the rows of each bag."""

from __future__ import annotations

from collections.abc import Sequence

from rm_abstract.capture.ir_builder import IrBuilder, Value
from rm_abstract.capture.op_map.call import Call

_SUM, _MEAN = 0, 1  # torch's numbers of the modes; 2 is max


def _bags_of(b: IrBuilder, offsets: Value, count: int) -> Value:
    """The bag of each of `count` ids, i64 [count, 1]: how many bags begin before it, less one."""
    place = b.reshape(b.iota(count), [count, 1])
    begun = b.binary("ge", place, b.cast(offsets, "i64"), "bool")
    number = b.reduce("sum", begun, [1], True, "i64")
    return b.binary("sub", number, b.scalar("i64", 1))


def _sum_by_bag(b: IrBuilder, rows: Value, bags: Value, count: int) -> Value:
    dims = [count, rows.dims[1]]
    index = b.expand(bags, rows.dims)
    zeros = b.full(rows.dtype, dims, 0.0)
    return b.op("scatter", [zeros, index, rows], rows.dtype, dims, axis=0, kind="add")


def embedding_bag(c: Call) -> Sequence[Value | None] | None:
    """weight [V,N], indices [n], offsets [B] -> [B,N]; an empty bag gives zeros."""
    table, ids, offsets = c.value("weight"), c.value("indices"), c.value("offsets")
    mode, shares = c["mode"] or _SUM, c["per_sample_weights"]
    count, bags = ids.dims[0], offsets.dims[0]
    if not c.b.for_training or mode not in (_SUM, _MEAN) or table.dtype not in ("f32", "f64"):
        return None
    if c["scale_grad_by_freq"] or c["sparse"] or c["include_last_offset"]:
        return None
    if ids.rank != 1 or not isinstance(count, int) or not isinstance(bags, int):
        return None
    never = c["padding_idx"]
    attrs = {"padding_idx": int(never)} if isinstance(never, int) and never >= 0 else {}
    rows = c.b.op("embedding", [table, ids], table.dtype, [count, table.dims[1]], **attrs)
    kept = c.b.full(table.dtype, [count, 1], 1.0)
    if attrs:  # rows that count for nothing
        real = c.b.binary("ne", ids, c.b.scalar(ids.dtype, int(never)), "bool")
        kept = c.b.cast(c.b.reshape(real, [count, 1]), table.dtype)
        rows = c.b.binary("mul", rows, kept)
    if shares is not None:
        rows = c.b.binary("mul", rows, c.b.reshape(shares, [count, 1]))
    number = _bags_of(c.b, offsets, count)
    y = _sum_by_bag(c.b, rows, number, bags)
    if mode == _MEAN:
        size = _sum_by_bag(c.b, kept, number, bags)
        y = c.b.binary("div", y, c.b.binary("maximum", size, c.b.scalar(size.dtype, 1.0)))
    return [y, None, None, None]


TABLE = {"embedding_bag.default": embedding_bag, "embedding_bag.padding_idx": embedding_bag}
