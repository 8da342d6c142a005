"""Complex numbers as pairs of real values: the IR has no complex type, a model may have them
between real inputs and real outputs (rotations by angles, Fourier transforms).

Handlers see a call whose result types are those of a part. What gives a complex tensor gives a
Pair; None says "not in this form", and the model is left to PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map import fourier
from rm_abstract.capture.op_map.call import Call, Handler
from rm_abstract.capture.op_map.pointwise import hypotenuse

PARTS = {"torch.complex64": "f32"}  # element types of complex tensors, and of their parts


@dataclass(frozen=True, slots=True)
class Pair:
    """Real and imaginary part, of one type and shape."""

    real: Value
    imag: Value


Result: TypeAlias = "Pair | Value | Sequence[Pair] | None"
PairHandler: TypeAlias = "Callable[[Call], Result]"


def holds_pair(arg: Any) -> bool:
    """Whether an argument is complex, or one in a list of it."""
    if isinstance(arg, (list, tuple)):
        return any(holds_pair(a) for a in arg)
    return isinstance(arg, Pair)


def _part(arg: Any, which: str) -> Any:
    if isinstance(arg, (list, tuple)):
        return [_part(a, which) for a in arg]
    return getattr(arg, which) if isinstance(arg, Pair) else arg


def _by_parts(c: Call, handler: Handler) -> Result:
    """What moves, chooses or adds elements does so in each part alone."""
    listed = c.args.get("tensors")
    if listed is not None and not all(isinstance(t, Pair) for t in listed):
        return None
    made = []
    for which in ("real", "imag"):
        args = {name: _part(arg, which) for name, arg in c.args.items()}
        result = handler(Call(c.b, args, c.types))
        if result is None:
            return None
        made.append([result] if isinstance(result, Value) else list(result))
        single = isinstance(result, Value)
    pairs = [Pair(a, b) for a, b in zip(*made, strict=True) if a is not None and b is not None]
    return pairs[0] if single else pairs


def _pair(c: Call, x: Any) -> Pair | None:
    """An operand as a pair: also a real tensor, or a number of Python."""
    if isinstance(x, Pair):
        return x
    if isinstance(x, Value):
        real = c.b.cast(x, c.dtype)
        return Pair(real, c.b.scalar(c.dtype, 0))
    if isinstance(x, (int, float, complex)):
        number = complex(x)
        return Pair(c.b.scalar(c.dtype, number.real), c.b.scalar(c.dtype, number.imag))
    return None


def _is_real(x: Any) -> bool:
    return isinstance(x, (Value, int, float))


def _expanded(c: Call, real: Value, imag: Value) -> Pair:
    return Pair(c.b.expand(real, c.dims), c.b.expand(imag, c.dims))


def _mul(c: Call) -> Result:
    b, x, y = c.b, _pair(c, c["self"]), _pair(c, c["other"])
    if x is None or y is None:
        return None
    if _is_real(c["other"]):
        return _expanded(c, b.binary("mul", x.real, y.real), b.binary("mul", x.imag, y.real))
    if _is_real(c["self"]):
        return _expanded(c, b.binary("mul", x.real, y.real), b.binary("mul", x.real, y.imag))
    real = b.binary("sub", b.binary("mul", x.real, y.real), b.binary("mul", x.imag, y.imag))
    imag = b.binary("add", b.binary("mul", x.real, y.imag), b.binary("mul", x.imag, y.real))
    return _expanded(c, real, imag)


def _div(c: Call) -> Result:
    x, y = _pair(c, c["self"]), _pair(c, c["other"])
    if x is None or y is None or not _is_real(c["other"]):
        return None
    b = c.b
    return _expanded(c, b.binary("div", x.real, y.real), b.binary("div", x.imag, y.real))


def _sum_of(op: str) -> PairHandler:
    def handler(c: Call) -> Result:
        x, y = _pair(c, c["self"]), _pair(c, c["other"])
        if x is None or y is None or c["alpha"] not in (None, 1):
            return None
        b = c.b
        return _expanded(c, b.binary(op, x.real, y.real), b.binary(op, x.imag, y.imag))

    return handler


def _neg(c: Call) -> Result:
    x = c["self"]
    return Pair(c.b.unary("neg", x.real), c.b.unary("neg", x.imag))


def _conj(c: Call) -> Result:
    x = c["self"]
    return Pair(x.real, c.b.unary("neg", x.imag)) if isinstance(x, Pair) else x


def _polar(c: Call) -> Result:
    size, angle = c.value("abs"), c.value("angle")
    b = c.b
    return _expanded(
        c,
        b.binary("mul", size, b.unary("cos", angle)),
        b.binary("mul", size, b.unary("sin", angle)),
    )


def _view_as_real(c: Call) -> Result:
    x, b = c["self"], c.b
    parts = [b.reshape(part, [*part.dims, 1]) for part in (x.real, x.imag)]
    return b.concat(parts, x.real.rank, c.dims)


def _view_as_complex(c: Call) -> Result:
    x, b = c.value("self"), c.b
    real, imag = (b.reshape(b.slice(x, x.rank - 1, i, 1), c.dims) for i in (0, 1))
    return Pair(real, imag)


def _transform(name: str) -> PairHandler:
    def handler(c: Call) -> Result:
        x = c["self"]
        parts = (x.real, x.imag) if isinstance(x, Pair) else (x, None)
        if parts[0].dtype != "f32" or c.b.for_training or c.b.on_gpu:
            return None
        found = fourier.transformed(c, name, *parts)
        if found is None:
            return None
        real, imag = found
        return real if imag is None else Pair(real, imag)

    return handler


_SINGLE: dict[str, PairHandler] = {
    "mul.Tensor": _mul,
    "div.Tensor": _div,
    "add.Tensor": _sum_of("add"),
    "sub.Tensor": _sum_of("sub"),
    "neg.default": _neg,
    "_conj.default": _conj,
    "conj.default": _conj,
    "conj_physical.default": _conj,
    "real.default": lambda c: c["self"].real if isinstance(c["self"], Pair) else c["self"],
    "imag.default": lambda c: c["self"].imag,
    "abs.default": lambda c: hypotenuse(c, c["self"].real, c["self"].imag),
    "polar.default": _polar,
    "complex.default": lambda c: _expanded(c, c.value("real"), c.value("imag")),
    "view_as_real.default": _view_as_real,
    "view_as_complex.default": _view_as_complex,
}
_SINGLE |= {f"fft_{name}.default": _transform(name) for name in fourier.TRANSFORMS}
_BY_PARTS = (
    "view.default reshape.default _unsafe_view.default flatten.using_ints unflatten.int "
    "unsqueeze.default squeeze.default squeeze.dim squeeze.dims permute.default transpose.int "
    "t.default movedim.int movedim.intlist expand.default select.int slice.Tensor narrow.default "
    "split.Tensor split_with_sizes.default chunk.default unbind.int cat.default stack.default "
    "contiguous.default clone.default alias.default detach.default resolve_conj.default "
    "resolve_neg.default to.dtype to.device to.dtype_layout to.other _to_copy.default "
    "index.Tensor index_select.default gather.default repeat.default roll.default flip.default "
    "sum.default sum.dim_IntList mean.default mean.dim"
).split()


def convert(name: str, c: Call, handlers: Mapping[str, Handler]) -> Result:
    """A call that takes or gives complex tensors; `handlers` are those of real ones."""
    if name in _SINGLE:
        return _SINGLE[name](c)
    if name in _BY_PARTS and name in handlers:
        return _by_parts(c, handlers[name])
    return None
