"""Fourier transforms as products with matrices of roots of unity.

A length that is known and has factors is transformed in two steps of shorter ones (Cooley and
Tukey), any other by one matrix: lengths of a call are sizes, and matrices follow from them. They
are constants of a shape, computed in f64.
"""

from __future__ import annotations

import math
from typing import Any

from rm_abstract.capture.dims import Dim, as_dim, floordiv, plus
from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call

TRANSFORMS = "fft ifft rfft irfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn".split()
_MOST_AT_ONCE = 64  # of a length that has factors; shorter ones are one product

Parts = tuple[Value, "Value | None"]  # real and imaginary part; None: all zero


class _UnknownForm(Exception):
    """A length whose difference from the axis is not known."""


def transformed(c: Call, name: str, real: Value, imag: Value | None) -> Parts | None:
    """A call of torch.fft; None where it is not in a form known here."""
    inverse = name.startswith("i")
    is_half = "rfft" in name
    rank = real.rank
    if name[-1] in "2n":
        if c["dim"] is None and c["s"] is not None:
            return None
        axes = list(range(rank)) if c["dim"] is None else [int(a) % rank for a in c["dim"]]
        lengths: list[Any] = [None] * len(axes) if c["s"] is None else list(c["s"])
    else:
        axes, lengths = [int(c["dim"]) % rank], [c["n"]]
    if not axes or len(set(axes)) != len(axes) or (is_half and not inverse and imag is not None):
        return None
    work = _Transform(c, inverse)
    others = list(zip(axes, lengths, strict=True))
    (last, length) = others[-1]
    found: Parts = (real, imag)
    try:
        if is_half:
            others.pop()
            found = found if inverse else work.along(real, None, last, length, half=True)
        for axis, size in reversed(others):
            found = work.along(*found, axis, size)
        if is_half and inverse:
            found = work.back_to_real(*found, last)
    except _UnknownForm:
        return None
    return work.scaled(found, c["norm"])


class _Transform:
    def __init__(self, c: Call, inverse: bool) -> None:
        self.c, self.b = c, c.b
        self.sign = 1.0 if inverse else -1.0
        self.count: list[Dim] = []  # lengths transformed

    # ---- matrices -------------------------------------------------------------------------------

    def roots(self, rows: Value, columns: Value, length: Dim) -> tuple[Value, Value]:
        """cos and sin of 2 pi r k / length, for all rows r and columns k, in f64."""
        b = self.b
        place = b.binary("mul", b.reshape(rows, [rows.dims[0], 1]), columns)
        place = b.binary("remainder", place, b.dim_value(length))
        turn = b.binary("div", b.cast(place, "f64"), b.cast(b.dim_value(length), "f64"))
        angle = b.binary("mul", turn, b.scalar("f64", 2 * math.pi))
        return b.unary("cos", angle), b.unary("sin", angle)

    def narrow(self, x: Value) -> Value:
        return self.b.cast(x, "f32")

    # ---- one axis -------------------------------------------------------------------------------

    def along(
        self, real: Value, imag: Value | None, axis: int, length: Any, half: bool = False
    ) -> Parts:
        """The transform of one axis; half: only frequencies up to the middle."""
        real, size = self.sized(real, axis, length)
        if imag is not None:
            imag, _ = self.sized(imag, axis, length)
        self.count.append(size)
        order = [*(i for i in range(real.rank) if i != axis), axis]
        back = [order.index(i) for i in range(real.rank)]
        real = self.b.permute(real, order)
        imag = None if imag is None else self.b.permute(imag, order)
        wanted = plus(floordiv(size, 2), 1) if half else size
        factor = _factor(size)
        if factor == 1:
            r, i = self.at_once(real, imag, size, wanted)
        else:
            assert isinstance(size, int)
            r, i = self.in_two(real, imag, factor, size // factor)
            r, i = (self.b.slice(part, part.rank - 1, 0, wanted) for part in (r, i))
        return self.b.permute(r, back), self.b.permute(i, back)

    def at_once(
        self, real: Value, imag: Value | None, size: Dim, wanted: Dim
    ) -> tuple[Value, Value]:
        """The last axis, by one matrix."""
        b = self.b
        cos, sin = self.roots(b.iota(size), b.iota(wanted), size)
        sin = sin if self.sign > 0 else b.unary("neg", sin)
        cos, sin = self.narrow(cos), self.narrow(sin)
        if imag is None:
            return self.product(real, cos), self.product(real, sin)
        both = b.concat([real, imag], real.rank - 1, [*real.dims[:-1], plus(size, size)])
        twice = [plus(size, size), wanted]
        to_real = b.concat([cos, b.unary("neg", sin)], 0, twice)
        to_imag = b.concat([sin, cos], 0, twice)
        return self.product(both, to_real), self.product(both, to_imag)

    def in_two(
        self, real: Value, imag: Value | None, first: int, second: int
    ) -> tuple[Value, Value]:
        """The last axis of first x second elements: columns, a turn of each element, rows."""
        b, lead, rank = self.b, list(real.dims[:-1]), real.rank
        swap = [*range(rank - 1), rank, rank - 1]

        def columns(x: Value) -> Value:
            return b.permute(b.reshape(x, [*lead, first, second]), swap)

        def whole(x: Value) -> Value:
            return b.reshape(b.permute(x, swap), [*lead, first * second])

        # [*, second, first]
        r, i = self.at_once(columns(real), None if imag is None else columns(imag), first, first)
        cos, sin = self.roots(b.iota(second), b.iota(first), first * second)
        sin = sin if self.sign > 0 else b.unary("neg", sin)
        cos, sin = self.narrow(cos), self.narrow(sin)
        turned = b.binary("sub", b.binary("mul", r, cos), b.binary("mul", i, sin))
        aside = b.binary("add", b.binary("mul", r, sin), b.binary("mul", i, cos))
        r, i = self.at_once(b.permute(turned, swap), b.permute(aside, swap), second, second)
        return whole(r), whole(i)

    def product(self, x: Value, matrix: Value) -> Value:
        rows = x if x.rank > 1 else self.b.reshape(x, [1, *x.dims])
        y = self.b.op("matmul", [rows, matrix], "f32", [*rows.dims[:-1], matrix.dims[1]])
        return self.b.reshape(y, [*x.dims[:-1], matrix.dims[1]])

    def back_to_real(self, real: Value, imag: Value | None, axis: int) -> Parts:
        """From frequencies up to the middle to as many real numbers as torch's result has."""
        b, size = self.b, self.c.dims[axis]
        kept = plus(floordiv(size, 2), 1)
        self.count.append(size)
        real, _ = self.sized(real, axis, kept)
        imag = b.expand(b.scalar("f32", 0), real.dims) if imag is None else imag
        imag, _ = self.sized(imag, axis, kept)
        order = [*(i for i in range(real.rank) if i != axis), axis]
        frequency = b.iota(kept)
        cos, sin = self.roots(frequency, b.iota(size), size)
        # All frequencies but the first, and the middle of an even number, stand for two.
        ends = b.binary("eq", frequency, b.scalar("i64", 0), "bool")
        middle = b.binary("mul", frequency, b.scalar("i64", 2))
        ends = b.binary("or", ends, b.binary("eq", middle, b.dim_value(size), "bool"))
        weight = b.where(ends, b.scalar("f64", 1), b.scalar("f64", 2))
        weight = b.reshape(weight, [kept, 1])
        to_real = self.narrow(b.binary("mul", cos, weight))
        to_imag = self.narrow(b.unary("neg", b.binary("mul", sin, weight)))
        last = real.rank - 1
        both = b.concat(
            [b.permute(real, order), b.permute(imag, order)],
            last,
            [*(real.dims[i] for i in order[:-1]), plus(kept, kept)],
        )
        y = self.product(both, b.concat([to_real, to_imag], 0, [plus(kept, kept), size]))
        return b.permute(y, [order.index(i) for i in range(y.rank)]), None

    # ---- sizes and scale ------------------------------------------------------------------------

    def sized(self, x: Value, axis: int, length: Any) -> tuple[Value, Dim]:
        """x cut, or followed by zeros, to a length along an axis."""
        size = x.dims[axis]
        by = 0 if length is None else plus(as_dim(length), -size)
        if not isinstance(by, int):
            raise _UnknownForm
        if by == 0:
            return x, size
        length = plus(size, by)
        return (self.b.slice(x, axis, 0, length), length) if by < 0 else self.longer(x, axis, by)

    def longer(self, x: Value, axis: int, by: int) -> tuple[Value, Dim]:
        dims = list(x.dims)
        dims[axis] = by
        edge = self.b.full(x.dtype, dims, 0)
        dims[axis] = plus(x.dims[axis], by)
        return self.b.concat([x, edge], axis, dims), dims[axis]

    def scaled(self, parts: Parts, norm: str | None) -> Parts:
        """Forward sums as they are, backward ones over their number; or as `norm` says."""
        b = self.b
        power = {None: 0.0, "backward": 0.0, "ortho": 0.5, "forward": 1.0}[norm]
        if self.sign > 0:
            power = 1.0 - power
        if power == 0.0:
            return parts
        factor = b.scalar("f64", 1)
        for size in self.count:
            factor = b.binary("mul", factor, b.cast(b.dim_value(size), "f64"))
        factor = b.unary("sqrt", factor) if power == 0.5 else factor
        factor = self.narrow(b.unary("reciprocal", factor))
        real, imag = parts
        return b.binary("mul", real, factor), None if imag is None else b.binary(
            "mul", imag, factor
        )


def _factor(size: Dim) -> int:
    """Of a length that is worth two steps, the factor nearest to its root; else 1."""
    if not isinstance(size, int) or size <= _MOST_AT_ONCE:
        return 1
    best = max((f for f in range(2, math.isqrt(size) + 1) if size % f == 0), default=1)
    return best if best >= 8 else 1
