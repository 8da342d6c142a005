"""Activations without an instruction of their own: written out by their formulas."""

from __future__ import annotations

from typing import Any

from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call, Handler


def _clip(c: Call, x: Value, low: Any, high: Any) -> Value:
    y = c.b.binary("maximum", x, c.b.scalar(x.dtype, low))
    return c.b.binary("minimum", y, c.b.scalar(x.dtype, high))


def _wide(c: Call) -> Value:
    """torch computes these of half types in f32 and rounds once."""
    x = c.value("self")
    return c.b.cast(x, "f32") if x.dtype in ("bf16", "f16") else x


def _hardswish(c: Call) -> Value:
    x = _wide(c)
    gate = _clip(c, c.b.binary("add", x, c.b.scalar(x.dtype, 3)), 0, 6)
    product = c.b.binary("mul", x, gate)
    return c.finish(c.b.binary("mul", product, c.b.scalar(x.dtype, 1 / 6)))


def _hardsigmoid(c: Call) -> Value:
    x = _wide(c)
    gate = _clip(c, c.b.binary("add", x, c.b.scalar(x.dtype, 3)), 0, 6)
    return c.finish(c.b.binary("mul", gate, c.b.scalar(x.dtype, 1 / 6)))


def _hardtanh(c: Call) -> Value | None:
    x = c.value("self")
    if not x.is_float:
        return None
    wide = _wide(c)
    return c.finish(_clip(c, wide, c["min_val"], c["max_val"]))


def _relu6(c: Call) -> Value | None:
    return c.finish(_clip(c, _wide(c), 0, 6)) if c.value("self").is_float else None


def _exponential(c: Call, x: Value, alpha: float, scale: float, inner: float) -> Value:
    """scale * (x if x > 0 else alpha * (exp(inner * x) - 1))"""
    low = x if inner == 1 else c.b.binary("mul", x, c.b.scalar(x.dtype, inner))
    # Of positive x the exponential is not used: it must not overflow into 0 * Inf.
    low = c.b.unary("expm1", c.b.binary("minimum", low, c.b.scalar(x.dtype, 0)))
    if alpha * scale != 1:
        low = c.b.binary("mul", low, c.b.scalar(x.dtype, alpha * scale))
    high = x if scale == 1 else c.b.binary("mul", x, c.b.scalar(x.dtype, scale))
    positive = c.b.binary("gt", x, c.b.scalar(x.dtype, 0), "bool")
    return c.finish(c.b.where(positive, high, low))


def _elu(c: Call) -> Value:
    alpha, scale, inner = float(c["alpha"]), float(c["scale"]), float(c["input_scale"])
    return _exponential(c, _wide(c), alpha, scale, inner)


def _celu(c: Call) -> Value:
    alpha = float(c["alpha"])
    return _exponential(c, _wide(c), alpha, 1, 1 / alpha)


def _selu(c: Call) -> Value:
    return _exponential(c, _wide(c), 1.6732632423543772, 1.0507009873554805, 1)


def _mish(c: Call) -> Value:
    x = _wide(c)
    return c.finish(c.b.binary("mul", x, c.b.unary("tanh", c.b.unary("softplus", x))))


def _logsigmoid(c: Call) -> Value:
    """min(x, 0) - log1p(exp(-|x|))"""
    x = _wide(c)
    small = c.b.unary("exp", c.b.unary("neg", c.b.unary("abs", x)))
    low = c.b.binary("minimum", x, c.b.scalar(x.dtype, 0))
    return c.finish(c.b.binary("sub", low, c.b.unary("log1p", small)))


def _glu(c: Call) -> Value | None:
    x, axis = c.value("self"), c.axis("dim", c.value("self").rank)
    size = x.dims[axis]
    if not isinstance(size, int):
        return None
    a, b = (c.b.slice(x, axis, start, size // 2) for start in (0, size // 2))
    return c.finish(c.b.binary("mul", a, c.b.unary("sigmoid", b)))


def _prelu(c: Call) -> Value | None:
    x, weight = c.value("self"), c.value("weight")
    if x.rank == 0:
        weight = c.b.reshape(weight, [])
    elif x.rank >= 2 and weight.rank == 1 and weight.dims[0] != 1:
        weight = c.b.reshape(weight, [weight.dims[0], *([1] * (x.rank - 2))])
    low = c.b.binary("mul", x, weight)
    positive = c.b.binary("gt", x, c.b.scalar(x.dtype, 0), "bool")
    return c.finish(c.b.where(positive, x, low)) if weight.dtype == x.dtype else None


TABLE: dict[str, Handler] = {
    "hardswish.default": _hardswish,
    "hardsigmoid.default": _hardsigmoid,
    "hardtanh.default": _hardtanh,
    "relu6.default": _relu6,
    "elu.default": _elu,
    "celu.default": _celu,
    "selu.default": _selu,
    "mish.default": _mish,
    "log_sigmoid.default": _logsigmoid,
    "glu.default": _glu,
    "prelu.default": _prelu,
}
