"""Element-wise functions of one or two operands whose edges (signed zeros, NaN, infinities, ties)
need more than a formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call, Handler
from rm_abstract.capture.op_map.functions import Maths, arc_tangent


def _negative(c: Call, x: Value) -> Value:
    """Where x is below zero or is -0; a NaN counts as positive."""
    zero = c.b.scalar(x.dtype, 0)
    below = c.b.binary("lt", x, zero, "bool")
    if not x.is_float:
        return below
    return c.b.binary("or", below, c.b.binary("lt", c.b.unary("reciprocal", x), zero, "bool"))


def _signbit(c: Call) -> Value:
    return _negative(c, c.value("self"))


def _with_sign(c: Call, magnitude: Value, sign: Value) -> Value:
    """`magnitude`, which is not negative, with the sign of `sign`."""
    return c.b.where(_negative(c, sign), c.b.unary("neg", magnitude), magnitude)


def _both(c: Call, dtype: str) -> tuple[Value, Value]:
    return c.operand(c["self"], dtype), c.operand(c["other"], dtype)


def _of_floats(formula: Callable[[Call, Value, Value], Value], double: bool = True) -> Handler:
    """A function of two operands; half types are computed in f32 and rounded once."""

    def handler(c: Call) -> Value | None:
        if c.dtype not in ("f32", "bf16", "f16", "f64") or (c.dtype == "f64" and not double):
            return None
        wide = "f64" if c.dtype == "f64" else "f32"
        return c.finish(formula(c, *_both(c, wide)))

    return handler


def _copysign(c: Call, a: Value, b: Value) -> Value:
    return _with_sign(c, c.b.unary("abs", a), b)


def _fmod(c: Call, a: Value, b: Value) -> Value:
    """The remainder with the dividend's sign. That of two positive numbers is exact."""
    rest = c.b.binary("remainder", c.b.unary("abs", a), c.b.unary("abs", b))
    return _with_sign(c, rest, a)


def _numbers_win(name: str) -> Handler:
    def formula(c: Call, a: Value, b: Value) -> Value:
        chosen = c.b.where(c.b.unary("isnan", b, "bool"), a, c.b.binary(name, a, b))
        return c.b.where(c.b.unary("isnan", a, "bool"), b, chosen)

    return _of_floats(formula)


def _infinite(c: Call, x: Value) -> Value:
    return c.b.binary("eq", c.b.unary("abs", x), c.b.scalar(x.dtype, math.inf), "bool")


def hypotenuse(c: Call, a: Value, b: Value) -> Value:
    """Scaled by the larger operand, so that no square overflows; infinite beside a NaN, too."""
    m = Maths(c.b, a.dtype)
    a, b = m.abs(a), m.abs(b)
    large, small = m.maximum(a, b), m.minimum(a, b)
    ratio = m.div(small, large)
    length = m.mul(large, m.sqrt(m.add(m.mul(ratio, ratio), 1.0)))
    is_zero = c.b.binary("eq", large, c.b.scalar(a.dtype, 0), "bool")
    length = c.b.where(is_zero, large, length)
    infinite = c.b.binary("or", _infinite(c, a), _infinite(c, b))
    return c.b.where(infinite, c.b.scalar(a.dtype, math.inf), length)


def _atan2(c: Call, y: Value, x: Value) -> Value:
    m, b = Maths(c.b, y.dtype), c.b
    rise, run = m.abs(y), m.abs(x)
    ratio = m.div(rise, run)  # NaN for 0/0, which is an angle of 0, and inf/inf, which is pi/4
    zero = b.binary("eq", rise, b.scalar(y.dtype, 0), "bool")
    equal = b.binary("and", _infinite(c, y), _infinite(c, x))
    ratio = b.where(equal, b.scalar(y.dtype, 1), ratio)
    nothing = b.where(b.unary("isnan", x, "bool"), x, b.scalar(y.dtype, 0))
    ratio = b.where(zero, nothing, ratio)
    angle = arc_tangent(m, ratio)
    angle = b.where(_negative(c, x), m.sub(math.pi, angle), angle)
    return _with_sign(c, angle, y)


def _logarithm(base: float) -> Handler:
    """Computed in f64 and rounded, so that powers of the base give whole numbers, as in torch."""

    def handler(c: Call) -> Value | None:
        if c.dtype not in ("f32", "bf16", "f16"):
            return None
        log = c.b.unary("log", c.b.cast(c.value("self"), "f64"))
        return c.b.cast(c.b.binary("div", log, c.b.scalar("f64", math.log(base))), c.dtype)

    return handler


def _round_to(c: Call) -> Value | None:
    x, places = c.value("self"), int(c["decimals"])
    if x.dtype not in ("f32", "f64") or abs(places) > 30:
        return None
    scale = c.b.scalar(x.dtype, 10.0 ** abs(places))
    up, down = ("mul", "div") if places >= 0 else ("div", "mul")
    return c.b.binary(down, c.b.unary("round", c.b.binary(up, x, scale)), scale)


def _heaviside(c: Call) -> Value:
    x, at_zero = c.value("self"), c.operand(c["values"], c.dtype)
    zero, one = c.b.scalar(c.dtype, 0), c.b.scalar(c.dtype, 1)
    above = c.b.where(c.b.binary("gt", x, zero, "bool"), one, zero)
    return c.finish(c.b.where(c.b.binary("eq", x, zero, "bool"), at_zero, above))


def _angle(c: Call) -> Value | None:
    """0 or pi; a NaN stays one."""
    x = c.value("self")
    if not x.is_float:
        return None
    zero, pi = c.b.scalar(x.dtype, 0), c.b.scalar(x.dtype, math.pi)
    turn = c.b.where(c.b.binary("lt", x, zero, "bool"), pi, zero)
    return c.b.where(c.b.unary("isnan", x, "bool"), x, turn)


def _isclose(c: Call) -> Value | None:
    a, other = c.value("self"), c.value("other")
    if a.dtype != other.dtype or a.dtype not in ("f32", "f64"):
        return None
    m, b = Maths(c.b, a.dtype), c.b
    away = m.abs(m.sub(a, other))
    allowed = m.add(float(c["atol"]), m.abs(m.mul(float(c["rtol"]), other)))
    close = b.binary("le", away, allowed, "bool")
    finite = b.binary("lt", away, b.scalar(a.dtype, math.inf), "bool")
    close = b.binary("or", b.binary("eq", a, other, "bool"), b.binary("and", close, finite))
    if c["equal_nan"]:
        nans = b.binary("and", b.unary("isnan", a, "bool"), b.unary("isnan", other, "bool"))
        close = b.binary("or", close, nans)
    return b.expand(close, c.dims)


def _one_operand(c: Call) -> Any:
    return c.value("self")


TABLE: dict[str, Handler] = {
    **{f"{name}.default": _one_operand for name in ("positive", "real", "conj_physical")},
    "signbit.default": _signbit,
    "copysign.Tensor": _of_floats(_copysign),
    "copysign.Scalar": _of_floats(_copysign),
    "fmod.Tensor": _of_floats(_fmod),
    "fmod.Scalar": _of_floats(_fmod),
    "fmax.default": _numbers_win("maximum"),
    "fmin.default": _numbers_win("minimum"),
    "hypot.default": _of_floats(hypotenuse),
    "atan2.default": _of_floats(_atan2, double=False),
    "log2.default": _logarithm(2),
    "log10.default": _logarithm(10),
    "round.decimals": _round_to,
    "heaviside.default": _heaviside,
    "angle.default": _angle,
    "isclose.default": _isclose,
}
