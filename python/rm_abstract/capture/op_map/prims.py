"""torch's primitive operators, which its decompositions are written in: the forms of ATen operators
without promotion and broadcasting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rm_abstract.capture.dims import as_dim
from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call, Handler

_SAME = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh digamma erf erfc exp exp2 "
    "expm1 floor lgamma log log10 log1p log2 neg reciprocal round rsqrt sign signbit sin sinh sqrt "
    "tan tanh trunc atan2 fmax fmin hypot maximum minimum"
).split()
_OF_TENSORS = (
    "add sub mul div remainder eq ne lt le gt ge fmod bitwise_and bitwise_or bitwise_xor"
).split()
_RENAMED = {
    "bessel_i0": "i0.default",
    "bessel_i0e": "special_i0e.default",
    "bessel_i1": "special_i1.default",
    "bessel_i1e": "special_i1e.default",
    "bessel_j0": "special_bessel_j0.default",
    "bessel_j1": "special_bessel_j1.default",
    "spherical_bessel_j0": "special_spherical_bessel_j0.default",
    "erf_inv": "erfinv.default",
    "erfcx": "special_erfcx.default",
    "ndtri": "special_ndtri.default",
}


def _where(c: Call) -> Value:
    a, b = c.value("self"), c.value("other")
    return c.finish(c.b.where(c.value("pred"), a, b))


def _pow(c: Call) -> Value:
    a, b = c.operand(c["self"], c.dtype), c.operand(c["other"], c.dtype)
    return c.finish(c.b.binary("pow", a, b))


def _convert(c: Call) -> Value:
    return c.b.cast(c.value("a"), c.dtype)


def _isfinite(c: Call) -> Value:
    x = c.value("self")
    if not x.is_float:
        return c.b.full("bool", x.dims, 1)
    infinity = c.b.scalar(x.dtype, float("inf"))
    return c.b.binary("lt", c.b.unary("abs", x), infinity, "bool")


def _broadcast(c: Call) -> Value:
    x, places = c.value("a"), list(c["broadcast_dimensions"])
    dims = [x.dims[places.index(i)] if i in places else 1 for i in range(len(c.dims))]
    return c.b.expand(c.b.reshape(x, dims), c.dims)


def _iota(c: Call) -> Value | None:
    start, step = c["start"], c["step"]
    if not isinstance(step, int) or c.dtype not in ("i64", "i32"):
        return None
    return c.b.iota(c.dims[0], as_dim(start), step, c.dtype)


def _reduce(kind: str) -> Handler:
    def handler(c: Call) -> Value | None:
        x = c.value("inp")
        axes = [int(a) for a in c["dims"]]
        if not axes or (kind in ("sum", "prod") and (x.dtype != c.dtype or not x.is_float)):
            return None
        return c.b.reduce(kind, x, axes, False, c.dtype)

    return handler


def table(others: Mapping[str, Handler]) -> dict[str, Handler]:
    """By `prims.name.overload`; `others` are the handlers of ATen operators."""
    made: dict[str, Any] = {
        "where": _where,
        "pow": _pow,
        "convert_element_type": _convert,
        "isfinite": _isfinite,
        "broadcast_in_dim": _broadcast,
        "iota": _iota,
        **{name: _reduce(kind) for name, kind in (("sum", "sum"), ("prod", "prod"))},
        **{name: _reduce(kind) for name, kind in (("amax", "max"), ("amin", "min"))},
        **{name: others[f"{name}.default"] for name in _SAME},
        **{name: others[f"{name}.Tensor"] for name in _OF_TENSORS},
        **{name: others[overload] for name, overload in _RENAMED.items()},
    }
    return {f"prims.{name}.default": handler for name, handler in made.items()}
