"""Matrix products, attention, normalisation, embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rm_abstract.capture.dims import Dim, product, times
from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call, Handler, promote


def _linear(c: Call) -> Value | None:
    x, w, bias = c.value("input"), c.value("weight"), c["bias"]
    if w.rank != 2:
        return None
    rows = x if x.rank > 1 else c.b.reshape(x, [1, *x.dims])
    operands = [rows, w] if bias is None else [rows, w, bias]
    y = c.b.op("linear", operands, c.dtype, [*rows.dims[:-1], w.dims[0]])
    return c.b.reshape(y, c.dims)


def matmul(c: Call, a: Value, b: Value, dims: Sequence[Dim]) -> Value:
    """a @ b with torch's rules for rank 1."""
    wide_a = c.b.reshape(a, [1, *a.dims]) if a.rank == 1 else a
    wide_b = c.b.reshape(b, [*b.dims, 1]) if b.rank == 1 else b
    full = list(dims)
    if b.rank == 1:
        full.append(1)
    if a.rank == 1:
        full.insert(len(full) - 1, 1)
    y = c.b.op("matmul", [wide_a, wide_b], a.dtype, full)
    return c.b.reshape(y, dims)


def _matmul(other: str) -> Handler:
    def handler(c: Call) -> Value | None:
        a, b = c.value("self"), c.value(other)
        if a.dtype != b.dtype or not a.is_float:
            return None
        return matmul(c, a, b, c.dims)

    return handler


def _scaled(c: Call, x: Value, factor: Any) -> Value:
    return x if factor in (None, 1) else c.b.binary("mul", x, c.b.scalar(x.dtype, factor))


def _addmm(a: str, b: str) -> Handler:
    def handler(c: Call) -> Value | None:
        half = c.dtype in ("bf16", "f16")
        if not c.value(a).is_float or (half and (c["alpha"], c["beta"]) != (1, 1)):
            return None
        y = _scaled(c, matmul(c, c.value(a), c.value(b), c.dims), c["alpha"])
        if c["beta"] == 0:
            return y
        return c.b.binary("add", y, _scaled(c, c.value("self"), c["beta"]))

    return handler


def _addbmm(c: Call) -> Value | None:
    """The sum of a batch of products: one product of the batch laid along the inner axis."""
    a, b = c.value("batch1"), c.value("batch2")
    if a.dtype not in ("f32", "f64"):
        return None
    batch, rows, inner = a.dims
    length = times(batch, inner)
    left = c.b.reshape(c.b.permute(a, [1, 0, 2]), [rows, length])
    y = matmul(c, left, c.b.reshape(b, [length, b.dims[2]]), [rows, b.dims[2]])
    y = _scaled(c, y, c["alpha"])
    if c["beta"] != 0:
        y = c.b.binary("add", y, _scaled(c, c.value("self"), c["beta"]))
    return c.finish(y)


def _bilinear(c: Call) -> Value | None:
    """y[o] = a W[o] b, by a product with all W[o] beside each other."""
    a, other, weight = c.value("input1"), c.value("input2"), c.value("weight")
    if a.dtype not in ("f32", "f64"):
        return None
    out, left, right = weight.dims
    rows = product(a.dims[:-1])
    wide = c.b.reshape(c.b.permute(weight, [1, 0, 2]), [left, times(out, right)])
    each = matmul(c, c.b.reshape(a, [rows, left]), wide, [rows, times(out, right)])
    each = c.b.reshape(each, [rows, out, right])
    y = matmul(c, each, c.b.reshape(other, [rows, right, 1]), [rows, out, 1])
    y = c.b.reshape(y, [rows, out])
    if c["bias"] is not None:
        y = c.b.binary("add", y, c.value("bias"))
    return c.b.reshape(y, c.dims)


def _layer_norm(c: Call) -> Value:
    x = c.value("input")
    operands = [x, c["weight"], c["bias"]]
    while operands[-1] is None:
        operands.pop()
    axes = len(c["normalized_shape"])
    wide = next((v.dtype for v in operands[1:] if v is not None), x.dtype)
    # Under autocast rows of bf16 meet weights of f32: computed in f32 and rounded once.
    operands = [None if v is None else c.b.cast(v, wide) for v in operands]
    y = c.b.op("layer_norm", operands, wide, x.dims, eps=float(c["eps"]), num_axes=axes)
    return c.b.cast(y, x.dtype)


def _native_layer_norm(c: Call) -> Sequence[Value | None]:
    """The norm, and what it took away and multiplied by."""
    x = c.value("input")
    kept, dims = c.types[1]
    axes = list(range(x.rank - len(c["normalized_shape"]), x.rank))
    wide = c.b.cast(x, kept)
    mean = c.b.reduce("mean", wide, axes, True, kept)
    centred = c.b.binary("sub", wide, mean)
    variance = c.b.reduce("mean", c.b.binary("mul", centred, centred), axes, True, kept)
    above = c.b.binary("add", variance, c.b.scalar(kept, float(c["eps"])))
    return [_layer_norm(c), c.b.expand(mean, dims), c.b.expand(c.b.unary("rsqrt", above), dims)]


def _batch_norm_terms(c: Call, x: Value) -> Value | None:
    """Inference batch norm as x·scale + shift; scale and shift are constant expressions."""
    mean, var = c["running_mean"], c["running_var"]
    if mean is None or var is None or mean.dtype != x.dtype:
        return None
    scale = c.b.unary("rsqrt", c.b.binary("add", var, c.b.scalar(x.dtype, c["eps"])))
    if c["weight"] is not None:
        scale = c.b.binary("mul", scale, c["weight"])
    shift = c.b.unary("neg", c.b.binary("mul", mean, scale))
    if c["bias"] is not None:
        shift = c.b.binary("add", c["bias"], shift)
    channels = [*mean.dims, *([1] * (x.rank - 2))]
    y = c.b.binary("mul", x, c.b.reshape(scale, channels))
    return c.b.binary("add", y, c.b.reshape(shift, channels))


def _batch_norm(c: Call) -> Value | None:
    return None if c["training"] else _batch_norm_terms(c, c.value("input"))


def _batch_norm_no_training(c: Call) -> Sequence[Value | None] | None:
    y = _batch_norm_terms(c, c.value("input"))
    return None if y is None else [y, None, None]


def _batch_norm_in_training(c: Call) -> Sequence[Value | None] | None:
    """[y, -, -, running mean, running variance]: the batch's own mean and variance, and running
    values that moved towards them, the variance with n - 1."""
    x, mean, var = c.value("input"), c["running_mean"], c["running_var"]
    count = math.prod(d for i, d in enumerate(x.dims) if i != 1 and isinstance(d, int))
    static = all(isinstance(d, int) for d in x.dims)
    if not c.b.for_training or not c["training"] or not static or count < 2:
        return None
    if {v.dtype for v in (mean, var)} != {x.dtype} or x.dtype not in ("f32", "f64"):
        return None
    b, axes = c.b, [i for i in range(x.rank) if i != 1]

    def number(value: float) -> Value:
        return b.scalar(x.dtype, value)

    batch_mean = b.reduce("mean", x, axes, True, x.dtype)
    centred = b.binary("sub", x, batch_mean)
    batch_var = b.reduce("mean", b.binary("mul", centred, centred), axes, True, x.dtype)
    y = b.binary("mul", centred, b.unary("rsqrt", b.binary("add", batch_var, number(c["eps"]))))
    channels = [1, *mean.dims, *([1] * (x.rank - 2))]
    for name, operator in (("weight", "mul"), ("bias", "add")):
        if c[name] is not None:
            y = b.binary(operator, y, b.reshape(c[name], channels))
    sample = b.binary("mul", batch_var, number(count / (count - 1)))
    moved = []
    for running, value in ((mean, batch_mean), (var, sample)):
        kept = b.binary("mul", running, number(1.0 - c["momentum"]))
        new = b.binary("mul", b.reshape(value, list(running.dims)), number(c["momentum"]))
        moved.append(b.binary("add", kept, new))
    return [y, None, None, *moved]


def _rms_norm(c: Call) -> Value | None:
    x, weight, eps = c.value("input"), c["weight"], c["eps"]
    if len(c["normalized_shape"]) != 1:
        return None
    if eps is None:  # torch: the machine epsilon of the type
        eps = {"f32": 2.0**-23, "f64": 2.0**-52, "f16": 2.0**-10, "bf16": 2.0**-7}[x.dtype]
    wide = x.dtype if weight is None else promote(x, weight)  # autocast leaves weights in f32
    x = c.b.cast(x, wide)
    operands = [x] if weight is None else [x, c.b.cast(weight, wide)]
    y = c.b.op("rms_norm", operands, wide, x.dims, eps=float(eps), weight_offset=0.0)
    return c.b.cast(y, c.dtype)


def _embedding(c: Call) -> Value:
    table, ids = c.value("weight"), c.value("indices")
    never = c["padding_idx"]  # a row that is not trained
    attrs = (
        {"padding_idx": int(never)}
        if c.b.for_training and isinstance(never, int) and never >= 0
        else {}
    )
    return c.b.op("embedding", [table, ids], table.dtype, c.dims, **attrs)


def _sdpa(c: Call) -> Value | None:
    q, k, v, mask = c.value("query"), c.value("key"), c.value("value"), c["attn_mask"]
    if q.rank not in (3, 4) or c["dropout_p"] not in (None, 0, 0.0):
        return None
    if mask is not None and mask.dtype not in ("bool", q.dtype):
        return None
    scale = c["scale"]
    if scale is None:
        if not isinstance(q.dims[-1], int):
            return None
        scale = q.dims[-1] ** -0.5
    if q.rank == 3:
        q, k, v = (c.b.reshape(t, [t.dims[0], 1, *t.dims[1:]]) for t in (q, k, v))
        if mask is not None and mask.rank == 3:
            mask = c.b.reshape(mask, [mask.dims[0], 1, *mask.dims[1:]])
    operands = [q, k, v] if mask is None else [q, k, v, mask]
    y = c.b.op(
        "sdpa",
        operands,
        c.dtype,
        [*q.dims[:-1], v.dims[-1]],
        scale=float(scale),
        is_causal=int(bool(c["is_causal"])),
    )
    return c.b.reshape(y, c.dims)


TABLE: dict[str, Handler] = {
    "linear.default": _linear,
    "matmul.default": _matmul("other"),
    "__matmul__.default": _matmul("other"),
    "mm.default": _matmul("mat2"),
    "bmm.default": _matmul("mat2"),
    "mv.default": _matmul("vec"),
    "dot.default": _matmul("tensor"),
    "addmm.default": _addmm("mat1", "mat2"),
    "baddbmm.default": _addmm("batch1", "batch2"),
    "addbmm.default": _addbmm,
    "bilinear.default": _bilinear,
    "layer_norm.default": _layer_norm,
    "native_layer_norm.default": _native_layer_norm,
    "batch_norm.default": _batch_norm,
    "_native_batch_norm_legit_no_training.default": _batch_norm_no_training,
    "_native_batch_norm_legit_functional.default": _batch_norm_in_training,
    "rms_norm.default": _rms_norm,
    "embedding.default": _embedding,
    "scaled_dot_product_attention.default": _sdpa,
}
