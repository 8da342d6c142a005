"""Special functions of f32 and half types, from series and asymptotic forms; f64 is left whole.

Results are good to about 1e-6 of the function's magnitude, of Bessel functions' amplitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map import series
from rm_abstract.capture.op_map.call import Call, Handler
from rm_abstract.capture.op_map.functions import Formula, Maths, handler_of


def _series(m: Maths, coefficients: Sequence[float], t: Value) -> Value:
    """Clenshaw's recurrence."""
    twice = m.mul(2.0, t)
    last, before = m.operand(coefficients[-1]), m.operand(0.0)
    for number in reversed(coefficients[1:-1]):
        last, before = m.add(m.sub(m.mul(twice, last), before), number), last
    return m.add(m.sub(m.mul(t, last), before), coefficients[0])


def _scaled_erfc(m: Maths, z: Value) -> Value:
    """exp(z²) erfc(z) for z >= 0."""
    t = m.sub(1.0, m.div(7.5, m.add(z, 3.75)))
    return m.div(_series(m, series.ERFCX, t), m.add(m.mul(2.0, z), 1.0))


def _erfc(m: Maths, x: Value) -> Value:
    a = m.abs(x)
    near = m.minimum(a, 20.0)  # beyond it the result is 0 and the product below no number
    tail = m.mul(m.exp(m.neg(m.mul(near, near))), _scaled_erfc(m, near))
    return m.choose(a, 0.5, m.sub(1.0, m.erf(x)), m.choose(x, 0.0, m.sub(2.0, tail), tail))


def _erfcx(m: Maths, x: Value) -> Value:
    above = _scaled_erfc(m, m.abs(x))
    below = m.sub(m.mul(2.0, m.exp(m.mul(x, x))), above)
    return m.choose(x, 0.0, below, above)


def _ndtr(m: Maths, x: Value) -> Value:
    return m.mul(0.5, _erfc(m, m.mul(x, -math.sqrt(0.5))))


def _log_ndtr(m: Maths, x: Value) -> Value:
    t = m.mul(x, math.sqrt(0.5))
    low = m.sub(m.log(m.mul(0.5, _erfcx(m, m.neg(t)))), m.mul(t, t))
    high = m.log1p(m.mul(-0.5, _erfc(m, t)))
    return m.choose(x, -1.0, low, high)


def _inverse(m: Maths, x: Value, product: Value) -> Value:
    """erfinv(x), given (1 - x)(1 + x)."""
    w = m.neg(m.log(product))
    near = _series(m, series.ERFINV_NEAR, m.sub(m.div(m.minimum(w, 5.0), 2.5), 1.0))
    root, low = m.sqrt(m.maximum(w, 5.0)), math.sqrt(5.0)
    t = m.sub(m.mul(m.sub(m.minimum(root, 10.0), low), 2.0 / (10.0 - low)), 1.0)
    far = _series(m, series.ERFINV_FAR, t)
    value = m.mul(x, m.choose(w, 5.0, near, far))
    infinite = m.b.binary("eq", product, m.operand(0.0), "bool")
    return m.b.where(infinite, m.mul(x, math.inf), value)


def _erfinv(m: Maths, x: Value) -> Value:
    return _inverse(m, x, m.mul(m.sub(1.0, x), m.add(1.0, x)))


def _ndtri(m: Maths, p: Value) -> Value:
    product = m.mul(m.mul(4.0, p), m.sub(1.0, p))  # of 2 p - 1: exact where p is small
    return m.mul(math.sqrt(2.0), _inverse(m, m.sub(m.mul(2.0, p), 1.0), product))


def _log_gamma_above(m: Maths, x: Value) -> Value:
    """For x > 0: Stirling's series behind a shift by eight."""
    shift = m.operand(1.0)
    for k in range(8):
        shift = m.mul(shift, m.add(m.minimum(x, 100.0), float(k)))
    far = m.choose(x, 100.0, m.add(x, 8.0), x)
    inverse = m.div(1.0, far)
    square = m.mul(inverse, inverse)
    rest = m.mul(inverse, m.sub(1 / 12, m.mul(square, m.sub(1 / 360, m.mul(square, 1 / 1260)))))
    main = m.sub(m.mul(m.sub(far, 0.5), m.log(far)), far)
    total = m.add(m.add(main, 0.5 * math.log(2 * math.pi)), rest)
    total = m.choose(x, 100.0, m.sub(total, m.log(shift)), total)
    infinite = m.b.binary("eq", x, m.operand(math.inf), "bool")
    return m.b.where(infinite, x, total)


def _lgamma(m: Maths, x: Value) -> Value:
    """Below 1/2 by reflection; infinite at 0, -1, -2, ..."""
    a = m.abs(x)
    part = m.sub(a, m.floor(a))
    sine = m.sin(m.mul(math.pi, m.minimum(part, m.sub(1.0, part))))
    below = m.sub(m.log(m.div(math.pi, sine)), _log_gamma_above(m, m.sub(1.0, x)))
    value = m.choose(x, 0.5, below, _log_gamma_above(m, x))
    poles = m.b.binary("eq", m.floor(x), x, "bool")
    poles = m.b.binary("and", poles, m.b.binary("le", x, m.operand(0.0), "bool"))
    return m.b.where(poles, m.operand(math.inf), value)


def _digamma_above(m: Maths, x: Value) -> Value:
    total = m.operand(0.0)
    for k in range(6):
        total = m.add(total, m.div(1.0, m.add(x, float(k))))
    far = m.add(x, 6.0)
    inverse = m.div(1.0, far)
    square = m.mul(inverse, inverse)
    rest = m.mul(square, m.sub(1 / 12, m.mul(square, m.sub(1 / 120, m.mul(square, 1 / 252)))))
    return m.sub(m.sub(m.sub(m.log(far), m.mul(0.5, inverse)), rest), total)


def _digamma(m: Maths, x: Value) -> Value:
    """Below 0 by reflection; NaN at -1, -2, ..., infinite at 0."""
    part = m.sub(x, m.round(x))
    angle = m.mul(math.pi, part)
    cotangent = m.mul(math.pi, m.div(m.cos(angle), m.sin(angle)))
    below = m.sub(_digamma_above(m, m.sub(1.0, x)), cotangent)
    value = m.choose(x, 0.0, below, _digamma_above(m, x))
    whole = m.b.binary("eq", part, m.operand(0.0), "bool")
    negative = m.b.binary("lt", x, m.operand(0.0), "bool")
    value = m.b.where(m.b.binary("and", whole, negative), m.operand(math.nan), value)
    zero = m.b.binary("eq", x, m.operand(0.0), "bool")
    return m.b.where(zero, m.neg(m.reciprocal(x)), value)


def _trigamma_above(m: Maths, x: Value) -> Value:
    total = m.operand(0.0)
    for k in range(8):
        inverse = m.reciprocal(m.add(x, float(k)))
        total = m.add(total, m.mul(inverse, inverse))
    inverse = m.reciprocal(m.add(x, 8.0))
    square = m.mul(inverse, inverse)
    rest = m.sub(1 / 6, m.mul(square, m.sub(1 / 30, m.mul(square, 1 / 42))))
    rest = m.add(m.add(1.0, m.mul(0.5, inverse)), m.mul(square, rest))
    return m.add(total, m.mul(inverse, rest))


def _trigamma(m: Maths, x: Value) -> Value:
    """Below 1/2 by reflection; infinite at 0, -1, -2, ..."""
    sine = m.sin(m.mul(math.pi, m.sub(x, m.round(x))))
    ratio = m.div(math.pi, sine)
    below = m.sub(m.mul(ratio, ratio), _trigamma_above(m, m.sub(1.0, x)))
    return m.choose(x, 0.5, below, _trigamma_above(m, x))


def _scaled_i(order: int) -> Formula:
    """exp(-|x|) I(x)."""
    near_terms, far_terms = ((series.I0_NEAR, series.I0_FAR), (series.I1_NEAR, series.I1_FAR))[
        order
    ]

    def formula(m: Maths, x: Value) -> Value:
        a = m.abs(x)
        near = _series(m, near_terms, m.sub(m.mul(m.minimum(a, 8.0), 0.25), 1.0))
        if order == 1:
            near = m.mul(m.minimum(a, 8.0), near)
        far = m.maximum(a, 8.0)
        far = m.div(_series(m, far_terms, m.sub(m.div(16.0, far), 1.0)), m.sqrt(far))
        value = m.choose(a, 8.0, near, far)
        return m.signed(value, x) if order == 1 else value

    return formula


def _i(order: int) -> Formula:
    """Overflows where exp does, as in torch."""
    return lambda m, x: m.mul(_scaled_i(order)(m, x), m.exp(m.abs(x)))


def _k(order: int, scaled: bool) -> Formula:
    near_terms, far_terms = ((series.K0_NEAR, series.K0_FAR), (series.K1_NEAR, series.K1_FAR))[
        order
    ]

    def formula(m: Maths, x: Value) -> Value:
        low, far = m.minimum(x, 2.0), m.maximum(x, 2.0)
        near = _series(m, near_terms, m.sub(m.mul(0.5, m.mul(low, low)), 1.0))
        logarithm = m.mul(m.log(m.mul(0.5, low)), _i(order)(m, low))
        near = m.sub(near, logarithm) if order == 0 else m.add(m.div(near, low), logarithm)
        above = m.div(_series(m, far_terms, m.sub(m.div(4.0, far), 1.0)), m.sqrt(far))
        if scaled:
            near = m.mul(near, m.exp(low))
        else:
            above = m.mul(above, m.exp(m.neg(far)))
        value = m.choose(x, 2.0, near, above)
        zero = m.b.binary("eq", x, m.operand(0.0), "bool")
        value = m.b.where(zero, m.operand(math.inf), value)
        return m.choose(x, 0.0, m.operand(math.nan), value)

    return formula


def _phase(m: Maths, x: Value, order: int) -> tuple[Value, Value, Value]:
    """For x >= 8: the amplitude, and P and Q with J = amplitude (P cos - Q sin)."""
    terms = ((series.P0, series.Q0), (series.P1, series.Q1))[order]
    inverse = m.div(8.0, x)
    t = m.sub(m.mul(2.0, m.mul(inverse, inverse)), 1.0)
    p, q = (_series(m, found, t) for found in terms)
    return m.div(math.sqrt(2.0 / math.pi), m.sqrt(x)), p, m.mul(inverse, q)


def _low(m: Maths, x: Value, terms: Sequence[float], order: int) -> Value:
    value = _series(m, terms, m.sub(m.mul(1 / 32, m.mul(x, x)), 1.0))
    return m.mul(x, value) if order == 1 else value


def _j(order: int) -> Formula:
    terms = (series.J0_NEAR, series.J1_NEAR)[order]

    def formula(m: Maths, x: Value) -> Value:
        a = m.abs(x)
        far = m.maximum(a, 8.0)
        amplitude, p, q = _phase(m, far, order)
        angle = m.sub(far, (2 * order + 1) * math.pi / 4)
        wave = m.sub(m.mul(p, m.cos(angle)), m.mul(q, m.sin(angle)))
        near = _low(m, m.minimum(a, 8.0), terms, order)
        value = m.choose(a, 8.0, near, m.mul(amplitude, wave))
        return m.signed(value, x) if order == 1 else value

    return formula


def _y(order: int) -> Formula:
    terms = (series.Y0_NEAR, series.Y1_NEAR)[order]

    def formula(m: Maths, x: Value) -> Value:
        low, far = m.minimum(x, 8.0), m.maximum(x, 8.0)
        amplitude, p, q = _phase(m, far, order)
        angle = m.sub(far, (2 * order + 1) * math.pi / 4)
        wave = m.add(m.mul(p, m.sin(angle)), m.mul(q, m.cos(angle)))
        main = m.mul(m.log(low), _j(order)(m, low))
        if order == 1:
            main = m.sub(main, m.reciprocal(low))
        near = m.add(m.mul(2.0 / math.pi, main), _low(m, low, terms, order))
        value = m.choose(x, 8.0, near, m.mul(amplitude, wave))
        zero = m.b.binary("eq", x, m.operand(0.0), "bool")
        value = m.b.where(zero, m.operand(-math.inf), value)
        return m.choose(x, 0.0, m.operand(math.nan), value)

    return formula


def _spherical_j0(m: Maths, x: Value) -> Value:
    """sin(x) / x, 1 at 0, and 0 at infinity."""
    zero = m.b.binary("eq", x, m.operand(0.0), "bool")
    value = m.b.where(zero, m.operand(1.0), m.div(m.sin(x), x))
    infinite = m.b.binary("eq", m.abs(x), m.operand(math.inf), "bool")
    return m.b.where(infinite, m.operand(0.0), value)


def _entr(m: Maths, x: Value) -> Value:
    """-x log x, 0 at 0, and -inf below."""
    zero = m.b.binary("eq", x, m.operand(0.0), "bool")
    value = m.b.where(zero, m.operand(0.0), m.neg(m.mul(x, m.log(x))))
    return m.choose(x, 0.0, m.operand(-math.inf), value)


def _in_double(formula: Formula) -> Callable[[Call], Value | None]:
    """For differences of large terms: computed in f64 and rounded once."""

    def handler(c: Call) -> Value | None:
        if c.dtype not in ("f32", "bf16", "f16"):
            return None
        return c.finish(formula(Maths(c.b, "f64"), c.b.cast(c.value("self"), "f64")))

    return handler


def _polygamma(c: Call) -> Value | None:
    formula = {0: _digamma, 1: _trigamma}.get(c["n"])
    return None if formula is None else _in_double(formula)(c)


_FORMULAS: dict[str, Formula] = {
    "erfc": _erfc,
    "special_erfcx": _erfcx,
    "special_ndtr": _ndtr,
    "special_log_ndtr": _log_ndtr,
    "erfinv": _erfinv,
    "special_ndtri": _ndtri,
    "special_entr": _entr,
    "i0": _i(0),
    "special_i1": _i(1),
    "special_i0e": _scaled_i(0),
    "special_i1e": _scaled_i(1),
    "special_modified_bessel_i0": _i(0),
    "special_modified_bessel_i1": _i(1),
    "special_modified_bessel_k0": _k(0, scaled=False),
    "special_modified_bessel_k1": _k(1, scaled=False),
    "special_scaled_modified_bessel_k0": _k(0, scaled=True),
    "special_scaled_modified_bessel_k1": _k(1, scaled=True),
    "special_bessel_j0": _j(0),
    "special_bessel_j1": _j(1),
    "special_bessel_y0": _y(0),
    "special_bessel_y1": _y(1),
    "special_spherical_bessel_j0": _spherical_j0,
}
TABLE: dict[str, Handler] = {
    f"{name}.default": handler_of(formula, double=False) for name, formula in _FORMULAS.items()
}
TABLE |= {
    "lgamma.default": _in_double(_lgamma),
    "digamma.default": _in_double(_digamma),
    "polygamma.default": _polygamma,
}
