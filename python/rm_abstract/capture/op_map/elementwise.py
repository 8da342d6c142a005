"""Elementwise operators: unary, binary with torch's promotion made explicit, where, clamp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rm_abstract.capture.ir_builder import FLOATS, Value
from rm_abstract.capture.op_map.call import Call, Handler, promote


def _unary(op: str) -> Handler:
    def handler(c: Call) -> Value:
        x = c.value("self")
        if op in ("isnan", "logical_not"):
            return c.b.unary(op, x, "bool")
        return c.b.unary(op, c.b.cast(x, c.dtype))

    return handler


def _integer_is_identity(op: str) -> Handler:
    def handler(c: Call) -> Value:
        x = c.value("self")
        return c.b.unary(op, x) if x.is_float else x

    return handler


def _gelu(c: Call) -> Value:
    return c.b.unary("gelu_tanh" if c["approximate"] == "tanh" else "gelu", c.value("self"))


def _softplus(c: Call) -> Value | None:
    if c["beta"] != 1 or c["threshold"] != 20:
        return None
    return c.b.unary("softplus", c.value("self"))


def _bitwise_not(c: Call) -> Value:
    x = c.value("self")
    if x.dtype == "bool":
        return c.b.unary("logical_not", x)
    return c.b.binary("xor", x, c.b.scalar(x.dtype, -1 if x.dtype != "u8" else 255))


def _arithmetic(c: Call, op: str, a: Any, b: Any) -> Value:
    dtype = c.compute_dtype(c.dtype, a, b)
    return c.finish(c.b.binary(op, c.operand(a, dtype), c.operand(b, dtype)))


def _binary(op: str, reverse: bool = False) -> Handler:
    def handler(c: Call) -> Value:
        a, b = c["self"], c["other"]
        return _arithmetic(c, op, b, a) if reverse else _arithmetic(c, op, a, b)

    return handler


def _add_sub(op: str, reverse: bool = False) -> Handler:
    def handler(c: Call) -> Value | None:
        a, b = c["self"], c["other"]
        alpha = c["alpha"]
        if reverse:
            a, b = b, a
        if alpha in (None, 1):
            if op == "sub" and c.dtype == "bool":
                return None
            if op == "add" and c.dtype == "bool":
                return _arithmetic(c, "or", a, b)
            return _arithmetic(c, op, a, b)
        if reverse or not isinstance(alpha, (int, float)):
            return None
        dtype = c.compute_dtype(c.dtype, a, b, alpha)
        scaled = c.b.binary("mul", c.operand(b, dtype), c.operand(alpha, dtype))
        return c.finish(c.b.binary(op, c.operand(a, dtype), scaled))

    return handler


def _mul(c: Call) -> Value:
    return _arithmetic(c, "and" if c.dtype == "bool" else "mul", c["self"], c["other"])


def _div(c: Call) -> Value | None:
    mode = c["rounding_mode"]
    if c.dtype not in FLOATS and mode in (None, "trunc"):  # None: as torch's primitives have it
        return _truncated(c)
    if mode is None:
        return _arithmetic(c, "div", c["self"], c["other"])
    if mode == "floor":
        return _arithmetic(c, "floor_div", c["self"], c["other"])
    return c.b.unary("trunc", _arithmetic(c, "div", c["self"], c["other"]))


def _truncated(c: Call) -> Value | None:
    """The quotient of integers towards zero: the floor, and one more where that is below zero and
    not the quotient."""
    if c.dtype in ("u64", "bool"):
        return None
    b, dtype = c.b, c.dtype
    x, y = c.operand(c["self"], dtype), c.operand(c["other"], dtype)
    floor = b.binary("floor_div", x, y)
    if dtype in ("u8", "u16", "u32"):
        return c.finish(floor)
    zero = b.scalar(dtype, 0)
    rest = b.binary("ne", b.binary("remainder", x, y), zero, "bool")
    signs = [b.binary("lt", v, zero, "bool") for v in (x, y)]
    below = b.binary("and", rest, b.binary("xor", signs[0], signs[1], "bool"))
    return c.finish(b.binary("add", floor, b.cast(below, dtype)))


def _pow(c: Call) -> Value:
    base = c["self"]
    return _arithmetic(c, "pow", base, c["exponent"])


def _compare(op: str) -> Handler:
    def handler(c: Call) -> Value:
        a, b = c["self"], c["other"]
        dtype = promote(a, b)
        dtype = c.compute_dtype(dtype, a, b)
        y = c.b.binary(op, c.operand(a, dtype), c.operand(b, dtype), "bool")
        return c.b.expand(y, c.dims)

    return handler


def _logical(op: str) -> Handler:
    def handler(c: Call) -> Value:
        return c.b.binary(op, c.operand(c["self"], "bool"), c.operand(c["other"], "bool"))

    return handler


def _where(c: Call) -> Value:
    condition = c.b.cast(c.value("condition"), "bool")
    a, b = c["self"], c["other"]
    return c.finish(c.b.where(condition, c.operand(a, c.dtype), c.operand(b, c.dtype)))


def _masked_fill(c: Call) -> Value:
    x = c.value("self")
    value = c.operand(c["value"], x.dtype)
    return c.finish(c.b.where(c.value("mask"), value, x))


def _clamp(c: Call) -> Value:
    y = c.b.cast(c.value("self"), c.dtype)
    if c["min"] is not None:
        y = c.b.binary("maximum", y, c.operand(c["min"], c.dtype))
    if c["max"] is not None:
        y = c.b.binary("minimum", y, c.operand(c["max"], c.dtype))
    return c.finish(y)


def _addcmul(op: str) -> Handler:
    def handler(c: Call) -> Value:
        dtype = c.compute_dtype(c.dtype, c["value"])
        a, b = c.operand(c["tensor1"], dtype), c.operand(c["tensor2"], dtype)
        y = c.b.binary(op, a, b)
        if c["value"] != 1:
            y = c.b.binary("mul", y, c.b.scalar(dtype, c["value"]))
        return c.finish(c.b.binary("add", c.operand(c["self"], dtype), y))

    return handler


def _square(c: Call) -> Value:
    x = c.value("self")
    return c.b.binary("mul", x, x)


def _leaky_relu(c: Call) -> Value:
    x = c.value("self")
    dtype = c.compute_dtype(c.dtype, c["negative_slope"])
    wide = c.b.cast(x, dtype)
    low = c.b.binary("mul", wide, c.b.scalar(dtype, c["negative_slope"]))
    positive = c.b.binary("gt", wide, c.b.scalar(dtype, 0), "bool")
    return c.finish(c.b.where(positive, wide, low))


def _to(c: Call) -> Value:
    return c.b.cast(c.value("self"), c.dtype)


def _identity(c: Call) -> Value:
    return c.value("self")


def _dropout(c: Call) -> Value | None:
    x, p = c.value("input"), c["p"]
    if not c["train"] or p == 0:
        return x
    static = all(isinstance(d, int) for d in x.dims)
    if not c.b.for_training or not static or p >= 1 or not x.is_float:
        return None
    keep = c.b.binary("ge", c.b.draw(x.dims), c.b.scalar("f32", p), "bool")
    wide = x if x.dtype == "f64" else c.b.cast(x, "f32")  # half types are rounded once
    scaled = c.b.binary("mul", wide, c.b.scalar(wide.dtype, 1.0 / (1.0 - p)))
    return c.b.cast(c.b.where(keep, scaled, c.b.scalar(wide.dtype, 0.0)), x.dtype)


def _native_dropout(c: Call) -> Sequence[Value | None] | None:
    y = _dropout(c)
    return None if y is None else [y, None]  # the mask: importing a use of it fails by name


def _lerp(c: Call) -> Value:
    a, b = c.operand(c["self"], c.dtype), c.operand(c["end"], c.dtype)
    weight = c.operand(c["weight"], c.dtype)
    return c.finish(c.b.binary("add", a, c.b.binary("mul", weight, c.b.binary("sub", b, a))))


TABLE: dict[str, Handler] = {}
for _name in (
    "neg abs exp log sqrt rsqrt sin cos tanh erf sigmoid relu silu logical_not reciprocal "
    "sign log1p expm1 isnan"
).split():
    TABLE[f"{_name}.default"] = _unary(_name)
for _name in ("floor", "ceil", "round", "trunc"):
    TABLE[f"{_name}.default"] = _integer_is_identity(_name)
for _name, _op in (("__and__", "and"), ("__or__", "or"), ("__xor__", "xor")):
    for _kind in ("Tensor", "Scalar"):
        TABLE[f"{_name}.{_kind}"] = _binary(_op)
        TABLE[f"bitwise_{_op}.{_kind}"] = _binary(_op)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    for _kind in ("Tensor", "Scalar"):
        TABLE[f"{_name}.{_kind}"] = _compare(_name)
for _name in ("and", "or", "xor"):
    TABLE[f"logical_{_name}.default"] = _logical(_name)
TABLE |= {
    "gelu.default": _gelu,
    "softplus.default": _softplus,
    "bitwise_not.default": _bitwise_not,
    "add.Tensor": _add_sub("add"),
    "add.Scalar": _add_sub("add"),
    "sub.Tensor": _add_sub("sub"),
    "sub.Scalar": _add_sub("sub"),
    "rsub.Tensor": _add_sub("sub", reverse=True),
    "rsub.Scalar": _add_sub("sub", reverse=True),
    "mul.Tensor": _mul,
    "mul.Scalar": _mul,
    "div.Tensor": _div,
    "div.Scalar": _div,
    "div.Tensor_mode": _div,
    "div.Scalar_mode": _div,
    "true_divide.Tensor": _div,
    "floor_divide.default": _binary("floor_div"),
    "floor_divide.Scalar": _binary("floor_div"),
    "remainder.Tensor": _binary("remainder"),
    "remainder.Scalar": _binary("remainder"),
    "pow.Tensor_Tensor": _pow,
    "pow.Tensor_Scalar": _pow,
    "pow.Scalar": _pow,
    "minimum.default": _binary("minimum"),
    "maximum.default": _binary("maximum"),
    "min.other": _binary("minimum"),
    "max.other": _binary("maximum"),
    "where.self": _where,
    "where.ScalarOther": _where,
    "where.ScalarSelf": _where,
    "where.Scalar": _where,
    "masked_fill.Scalar": _masked_fill,
    "masked_fill.Tensor": _masked_fill,
    "clamp.default": _clamp,
    "clamp.Tensor": _clamp,
    "clamp_min.default": _clamp,
    "clamp_max.default": _clamp,
    "addcmul.default": _addcmul("mul"),
    "addcdiv.default": _addcmul("div"),
    "square.default": _square,
    "leaky_relu.default": _leaky_relu,
    "lerp.Scalar": _lerp,
    "lerp.Tensor": _lerp,
    "to.dtype": _to,
    "to.device": _to,
    "to.dtype_layout": _to,
    "to.other": _to,
    "_to_copy.default": _to,
    "type_as.default": _to,
    "dropout.default": _dropout,
    "native_dropout.default": _native_dropout,
}
for _name in (
    "contiguous clone alias detach detach_ lift_fresh lift_fresh_copy lift _conj resolve_conj "
    "resolve_neg view_of"
).split():
    TABLE[f"{_name}.default"] = _identity
