"""One ATen call as the handlers see it: arguments by schema name, result types from the export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from rm_abstract.capture.dims import Dim, as_dim
from rm_abstract.capture.ir_builder import FLOATS, IrBuilder, Value

Result: TypeAlias = "Value | Sequence[Value | None] | None"
Handler: TypeAlias = "Callable[[Call], Result]"

_EXACT = {"bf16": 8, "f16": 11}  # bits of precision


def exact_in(dtype: str, number: float) -> bool:
    """True when `number` survives rounding to a half format (small integers, powers of two)."""
    if number != number or number in (float("inf"), float("-inf")):
        return True
    mantissa, exponent = abs(number).hex().split("p")
    digits = int(mantissa.replace("0x", "").replace(".", ""), 16)
    bits = digits.bit_length() - (len(bin(digits)) - len(bin(digits).rstrip("0"))) if digits else 0
    return bits <= _EXACT[dtype] and -14 <= int(exponent) <= 15


class Call:
    """Arguments are Values, dims, Python constants, or lists of them; None where absent.

    A handler returns the result, or None to say "not in this form": the importer then keeps the
    call as an `aten.*` node for the torch bridge.
    """

    def __init__(
        self, builder: IrBuilder, args: dict[str, Any], types: Sequence[tuple[str, tuple[Dim, ...]]]
    ) -> None:
        self.b = builder
        self.args = args
        self.types = types

    @property
    def dtype(self) -> str:
        return self.types[0][0]

    @property
    def dims(self) -> tuple[Dim, ...]:
        return self.types[0][1]

    def __getitem__(self, name: str) -> Any:
        return self.args.get(name)

    def value(self, name: str) -> Value:
        value = self.args[name]
        assert isinstance(value, Value)
        return value

    def axis(self, name: str, rank: int) -> int:
        """An axis argument made non-negative."""
        axis = int(self.args[name])
        return axis + max(rank, 1) if axis < 0 else axis

    def axes(self, name: str, rank: int) -> list[int]:
        """A list of axes made non-negative; None or [] means all."""
        given = self.args.get(name)
        if given is None or given == []:
            return list(range(rank))
        given = [given] if isinstance(given, int) else given
        return sorted({int(a) + rank if int(a) < 0 else int(a) for a in given})

    def operand(self, x: Any, dtype: str) -> Value:
        """A Value cast to `dtype`, or a Python number or size as a rank-0 value of it."""
        if isinstance(x, Value):
            return self.b.cast(x, dtype)
        if isinstance(x, (bool, int, float)):
            return self.b.scalar(dtype, x)
        return self.b.cast(self.b.dim_value(as_dim(x)), dtype)

    def compute_dtype(self, dtype: str, *operands: Any) -> str:
        """Where to compute: a half type with a number it cannot hold is computed in f32.

        That is what torch's CPU and CUDA kernels do with Python scalars.
        """
        if dtype in _EXACT:
            for x in operands:
                if isinstance(x, (int, float)) and not exact_in(dtype, float(x)):
                    return "f32"
        return dtype

    def finish(self, x: Value) -> Value:
        """Cast and shape to what the export says."""
        return self.b.expand(self.b.cast(x, self.dtype), self.dims)


def promote(a: Any, b: Any) -> str:
    """torch.result_type for Values and Python numbers, on IR dtype names."""
    values = [x for x in (a, b) if isinstance(x, Value)]

    def category(dtype: str) -> int:
        return 2 if dtype in FLOATS else 0 if dtype == "bool" else 1

    def scalar_category(x: Any) -> int:
        return 2 if isinstance(x, float) else 0 if isinstance(x, bool) else 1

    # Tensors with dims win over rank-0 tensors, which win over Python numbers, within a category.
    best: str | None = None
    top = -1
    for tier in ([v for v in values if v.rank > 0], [v for v in values if v.rank == 0]):
        tier_dtype: str | None = None
        for v in tier:
            tier_dtype = v.dtype if tier_dtype is None else _join(tier_dtype, v.dtype)
        if tier_dtype is not None and category(tier_dtype) > top:
            best, top = tier_dtype, category(tier_dtype)
    for x in (a, b):
        if not isinstance(x, Value) and scalar_category(x) > top:
            top = scalar_category(x)
            best = ("bool", "i64", "f32")[top]
    assert best is not None
    return best


_ORDER = ["bool", "u16", "u32", "u64", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64"]


def _join(a: str, b: str) -> str:
    if a == b:
        return a
    if {a, b} == {"u8", "i8"}:
        return "i16"
    if {a, b} == {"f16", "bf16"}:
        return "f32"
    return max(a, b, key=_ORDER.index)
