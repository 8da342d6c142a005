"""Elementary functions without an instruction of their own, from those that have one.

Each keeps relative accuracy near its zeros (expm1, log1p), and does not overflow before its result
does. Inverse trigonometry is a polynomial good for f32; f64 is left to the bridge.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rm_abstract.capture.ir_builder import IrBuilder, Value
from rm_abstract.capture.op_map.call import Call, Handler


class Maths:
    """Formulas over one element type: numbers are operands too."""

    def __init__(self, builder: IrBuilder, dtype: str) -> None:
        self.b, self.dtype = builder, dtype

    def operand(self, x: Value | float) -> Value:
        return x if isinstance(x, Value) else self.b.scalar(self.dtype, x)

    def __getattr__(self, name: str) -> Callable[..., Value]:
        def call(*operands: Value | float) -> Value:
            first, *second = (self.operand(x) for x in operands)
            return self.b.binary(name, first, second[0]) if second else self.b.unary(name, first)

        return call

    def choose(self, a: Value, low: float, below: Value, above: Value) -> Value:
        """`below` where a < low."""
        less = self.b.binary("lt", a, self.operand(low), "bool")
        return self.b.where(less, below, above)

    def signed(self, magnitude: Value, x: Value) -> Value:
        """The magnitude with x's sign; x where it is 0, so that -0 stays."""
        zero = self.b.binary("eq", x, self.operand(0), "bool")
        return self.b.where(zero, x, self.mul(self.sign(x), magnitude))


Formula = Callable[[Maths, Value], Value]


def handler_of(formula: Formula, double: bool = True) -> Handler:
    def handler(c: Call) -> Value | None:
        x = c.value("self" if "self" in c.args else "x")
        if c.dtype == "f64" and not double:
            return None
        wide = "f64" if c.dtype == "f64" else "f32"
        return c.finish(formula(Maths(c.b, wide), c.b.cast(x, wide)))

    return handler


def _tan(m: Maths, x: Value) -> Value:
    return m.div(m.sin(x), m.cos(x))


def _sinh(m: Maths, x: Value) -> Value:
    a = m.abs(x)
    grown = m.expm1(m.minimum(a, 1.0))
    small = m.mul(0.5, m.add(grown, m.div(grown, m.add(grown, 1.0))))
    root = m.exp(m.mul(a, 0.5))  # its square may overflow only where the result does
    large = m.sub(m.mul(m.mul(0.5, root), root), m.div(m.div(0.5, root), root))
    return m.signed(m.choose(a, 1.0, small, large), x)


def _cosh(m: Maths, x: Value) -> Value:
    root = m.exp(m.mul(m.abs(x), 0.5))
    return m.add(m.mul(m.mul(0.5, root), root), m.div(m.div(0.5, root), root))


def _asinh(m: Maths, x: Value) -> Value:
    a = m.abs(x)
    near = m.minimum(a, 1e9)
    square = m.mul(near, near)
    small = m.log1p(m.add(near, m.div(square, m.add(1.0, m.sqrt(m.add(square, 1.0))))))
    return m.signed(m.choose(a, 1e9, small, m.add(m.log(a), math.log(2.0))), x)


def _acosh(m: Maths, x: Value) -> Value:
    above = m.sub(m.minimum(x, 1e9), 1.0)
    root = m.mul(m.sqrt(above), m.sqrt(m.add(above, 2.0)))  # NaN below 1
    small = m.log1p(m.add(above, root))
    return m.choose(x, 1e9, small, m.add(m.log(x), math.log(2.0)))


def _atanh(m: Maths, x: Value) -> Value:
    a = m.abs(x)
    return m.signed(m.mul(0.5, m.log1p(m.div(m.mul(2.0, a), m.sub(1.0, a)))), x)


def arc_tangent(m: Maths, x: Value) -> Value:
    """Reduced to |t| <= tan(pi/8) by atan(a) = pi/2 + atan(-1/a) and pi/4 + atan((a-1)/(a+1));
    the polynomial is the Taylor series of atan to t^17, whose rest is below 1e-9 there."""
    a = m.abs(x)
    middle, far = math.tan(math.pi / 8), math.tan(3 * math.pi / 8)
    inner = m.div(m.sub(a, 1.0), m.add(a, 1.0))
    t = m.choose(a, middle, a, m.choose(a, far, inner, m.div(-1.0, a)))
    start = m.choose(
        a, middle, m.mul(0.0, t), m.choose(a, far, m.operand(math.pi / 4), m.operand(math.pi / 2))
    )
    square = m.mul(t, t)
    total = m.operand(1 / 17)
    for n in range(15, 0, -2):
        total = m.sub(1 / n, m.mul(square, total))
    return m.signed(m.add(start, m.mul(t, total)), x)


def _asin(m: Maths, x: Value) -> Value:
    return arc_tangent(m, m.div(x, m.sqrt(m.mul(m.sub(1.0, x), m.add(1.0, x)))))


def _acos(m: Maths, x: Value) -> Value:
    return m.mul(2.0, arc_tangent(m, m.sqrt(m.div(m.sub(1.0, x), m.add(1.0, x)))))


TABLE: dict[str, Handler] = {
    "tan.default": handler_of(_tan),
    "sinh.default": handler_of(_sinh),
    "cosh.default": handler_of(_cosh),
    "asinh.default": handler_of(_asinh),
    "acosh.default": handler_of(_acosh),
    "atanh.default": handler_of(_atanh),
    "exp2.default": handler_of(lambda m, x: m.pow(2.0, x)),
    "atan.default": handler_of(arc_tangent, double=False),
    "asin.default": handler_of(_asin, double=False),
    "acos.default": handler_of(_acos, double=False),
}
