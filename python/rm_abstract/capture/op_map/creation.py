"""Operators that make tensors from sizes and numbers."""

from __future__ import annotations

from typing import Any

from rm_abstract.capture.dims import as_dim
from rm_abstract.capture.ir_builder import FLOATS, Value
from rm_abstract.capture.op_map.call import Call, Handler


def _arange(c: Call) -> Value | None:
    start: Any = c["start"] if c["start"] is not None else 0
    step: Any = c["step"] if c["step"] is not None else 1
    if isinstance(start, float) and start.is_integer():
        start = int(start)
    if isinstance(step, float) and step.is_integer():
        step = int(step)
    size = c.dims[0]
    if not isinstance(start, float) and isinstance(step, int):
        dtype = c.dtype if c.dtype not in FLOATS and c.dtype != "bool" else "i64"
        return c.b.cast(c.b.iota(size, as_dim(start), step, dtype), c.dtype)
    if isinstance(start, (int, float)) and isinstance(step, (int, float)):
        # torch computes start + i*step in double and rounds once.
        ramp = c.b.binary("mul", c.b.cast(c.b.iota(size), "f64"), c.b.scalar("f64", step))
        return c.b.cast(c.b.binary("add", ramp, c.b.scalar("f64", start)), c.dtype)
    return None


def _filled(argument: str | None, constant: int = 0) -> Handler:
    def handler(c: Call) -> Value:
        value = c[argument] if argument else constant
        if isinstance(value, (bool, int, float)):
            if not c.dims:
                return c.b.scalar(c.dtype, value)
            return c.b.full(c.dtype, c.dims, value)
        return c.finish(c.operand(value, c.dtype))

    return handler


def _eye(c: Call) -> Value:
    rows, cols = c.dims
    equal = c.b.binary("eq", c.b.reshape(c.b.iota(rows), [rows, 1]), c.b.iota(cols), "bool")
    return c.b.cast(equal, c.dtype)


TABLE: dict[str, Handler] = {
    "arange.default": _arange,
    "arange.start": _arange,
    "arange.start_step": _arange,
    "full.default": _filled("fill_value"),
    "full_like.default": _filled("fill_value"),
    "new_full.default": _filled("fill_value"),
    "fill.Scalar": _filled("value"),
    "fill.Tensor": _filled("value"),
    "scalar_tensor.default": _filled("s"),
    "eye.default": _eye,
    "eye.m": _eye,
}
for _prefix in ("", "new_"):
    TABLE[f"{_prefix}zeros.default"] = _filled(None, 0)
    TABLE[f"{_prefix}ones.default"] = _filled(None, 1)
TABLE["zeros_like.default"] = _filled(None, 0)
TABLE["ones_like.default"] = _filled(None, 1)
# Uninitialised memory has no value to keep; zeros make a program deterministic.
for _name in ("empty.memory_format", "empty_like.default", "new_empty.default"):
    TABLE[_name] = _filled(None, 0)
