"""Writes the text form of the IR (src/ir/text.hpp) node by node.

Values are append-only and immutable; weights and scalar literals are shared by name and content.
Operators that would do nothing (a reshape to the same shape, a cast to the same type) give back
their operand instead of a node.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rm_abstract.capture.dims import Dim, SymbolNames, broadcast, same_dims

DTYPES = {
    "torch.float32": "f32",
    "torch.float64": "f64",
    "torch.bfloat16": "bf16",
    "torch.float16": "f16",
    "torch.int64": "i64",
    "torch.int32": "i32",
    "torch.int16": "i16",
    "torch.int8": "i8",
    "torch.uint8": "u8",
    "torch.bool": "bool",
    "torch.uint16": "u16",
    "torch.uint32": "u32",
    "torch.uint64": "u64",
}
_PACK = {
    "f32": "<f",
    "f64": "<d",
    "f16": "<e",
    "i64": "<q",
    "i32": "<i",
    "i16": "<h",
    "i8": "<b",
    "u8": "<B",
    "bool": "<?",
    "u16": "<H",
    "u32": "<I",
    "u64": "<Q",
}
FLOATS = ("f32", "f64", "bf16", "f16")


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the graph: its number, element type and shape."""

    id: int
    dtype: str
    dims: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS


class Shape(tuple[Dim, ...]):
    """An attribute of the dims kind, printed <...>."""


Attr: TypeAlias = "int | float | str | list[int] | list[float] | Shape"


def _quote(text: str) -> str:
    out = []
    for byte in text.encode():
        if byte in b'"\\':
            out.append("\\" + chr(byte))
        elif byte < 0x20 or byte >= 0x7F:
            out.append(f"\\x{byte:02x}")
        else:
            out.append(chr(byte))
    return '"' + "".join(out) + '"'


def _float_text(value: float) -> str:
    if value != value:
        return "nan"
    if value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return value.hex()


def pack_scalar(dtype: str, value: float | int | bool) -> bytes:
    """One element in little-endian bytes; bf16 is rounded to nearest even."""
    if dtype == "bf16":
        bits = struct.unpack("<I", struct.pack("<f", float(value)))[0]
        if value != value:
            return struct.pack("<H", (bits >> 16) | 0x40)
        return struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    if dtype in FLOATS:
        return struct.pack(_PACK[dtype], float(value))
    if dtype == "bool":
        return struct.pack(_PACK[dtype], bool(value))
    return struct.pack(_PACK[dtype], int(value))


RANDOM = "@random"  # the weight that is a training step's random state


class IrBuilder:
    """Collects inputs, weights, literals and nodes; `text` gives the program."""

    def __init__(self) -> None:
        self.symbols = SymbolNames()
        self.inputs: list[Value] = []
        self.weight_names: dict[str, Value] = {}
        self._header: list[str] = []
        self._literals: dict[tuple[str, str, bytes], Value] = {}
        self._nodes: list[str] = []
        self._seen: dict[str, list[Value]] = {}
        self._next = 0
        self.draws = 0  # of random numbers
        self.for_training = False  # nodes carry what only their gradients depend on
        self.on_gpu = False  # tensors of the call or of the module lie on one
        self.asks_tf32 = False  # something depends on torch's switch for tf32 in convolutions

    def type_text(self, dtype: str, dims: Sequence[Dim]) -> str:
        return f"{dtype}[{','.join(self.symbols.text(d) for d in dims)}]"

    def _value(self, dtype: str, dims: Sequence[Dim]) -> Value:
        value = Value(self._next, dtype, tuple(dims))
        self._next += 1
        return value

    def input(self, name: str, dtype: str, dims: Sequence[Dim], donated: bool = False) -> Value:
        """An input; the program may write the memory of a `donated` one."""
        value = self._value(dtype, dims)
        mark = " donated" if donated else ""
        self._header.append(
            f"input %{value.id} {_quote(name)} : {self.type_text(dtype, dims)}{mark}"
        )
        self.inputs.append(value)
        return value

    def weight(self, name: str, dtype: str, dims: Sequence[int]) -> Value:
        if name not in self.weight_names:
            value = self._value(dtype, dims)
            self._header.append(
                f"weight %{value.id} {_quote(name)} : {self.type_text(dtype, dims)}"
            )
            self.weight_names[name] = value
        return self.weight_names[name]

    def literal(self, dtype: str, dims: Sequence[int], data: bytes) -> Value:
        key = (dtype, str(tuple(dims)), data)
        if key not in self._literals:
            value = self._value(dtype, dims)
            self._header.append(
                f"literal %{value.id} : {self.type_text(dtype, dims)} = {data.hex()}"
            )
            self._literals[key] = value
        return self._literals[key]

    def scalar(self, dtype: str, value: float | int | bool) -> Value:
        return self.literal(dtype, (), pack_scalar(dtype, value))

    def _attr(self, value: Attr) -> str:
        if isinstance(value, Shape):
            return "<" + ",".join(self.symbols.text(d) for d in value) + ">"
        if isinstance(value, str):
            return _quote(value)
        if isinstance(value, list):
            if value and isinstance(value[0], float):
                return "f[" + ",".join(_float_text(float(v)) for v in value) + "]"
            return "[" + ",".join(str(int(v)) for v in value) + "]"
        return _float_text(value) if isinstance(value, float) else str(int(value))

    def multi(
        self,
        op: str,
        operands: Sequence[Value | None],
        types: Sequence[tuple[str, Sequence[Dim]]],
        **attrs: Attr,
    ) -> list[Value]:
        """Appends a node; equal pure nodes are shared, which keeps repeated mask code small."""
        body = f"{op}({', '.join('_' if v is None else f'%{v.id}' for v in operands)})"
        if attrs:
            body += " {" + ", ".join(f"{k}={self._attr(attrs[k])}" for k in sorted(attrs)) + "}"
        body += " : " + ", ".join(self.type_text(d, s) for d, s in types)
        pure = not op.startswith("aten.")
        if pure and body in self._seen:
            return self._seen[body]
        results = [self._value(d, s) for d, s in types]
        self._nodes.append(", ".join(f"%{v.id}" for v in results) + " = " + body)
        if pure:
            self._seen[body] = results
        return results

    def op(
        self,
        op: str,
        operands: Sequence[Value | None],
        dtype: str,
        dims: Sequence[Dim],
        **attrs: Attr,
    ) -> Value:
        return self.multi(op, operands, [(dtype, dims)], **attrs)[0]

    def mark(self) -> int:
        """A place between the nodes so far and those to come."""
        return len(self._nodes)

    def operators_since(self, mark: int) -> set[str]:
        return {line.split(" = ", 1)[1].split("(", 1)[0] for line in self._nodes[mark:]}

    def forget_checks(self, mark: int) -> None:
        """Drops the checks among the nodes since then, which stay without users."""
        lost = [line for line in self._nodes[mark:] if " = check(" in line]
        self._nodes[mark:] = [line for line in self._nodes[mark:] if line not in lost]
        for line in lost:
            self._seen.pop(line.split(" = ", 1)[1], None)

    # ---- helpers every family uses -------------------------------------------------------------

    def draw(self, dims: Sequence[Dim]) -> Value:
        """Random numbers in [0,1), f32: the n-th call reads the state RANDOM plus n draws."""
        state = self.weight(RANDOM, "i64", [2])
        if self.draws:
            ahead = self.literal("i64", [2], struct.pack("<2q", 0, self.draws))
            state = self.binary("add", state, ahead)
        self.draws += 1
        return self.op("uniform", [state], "f32", dims)

    def cast(self, x: Value, dtype: str) -> Value:
        return x if x.dtype == dtype else self.op("cast", [x], dtype, x.dims)

    def reshape(self, x: Value, dims: Sequence[Dim]) -> Value:
        if same_dims(x.dims, dims):
            return x
        return self.op("reshape", [x], x.dtype, dims, shape=Shape(dims))

    def permute(self, x: Value, axes: Sequence[int]) -> Value:
        if list(axes) == list(range(x.rank)):
            return x
        return self.op("permute", [x], x.dtype, [x.dims[a] for a in axes], axes=list(axes))

    def expand(self, x: Value, dims: Sequence[Dim]) -> Value:
        if same_dims(x.dims, dims):
            return x
        return self.op("expand", [x], x.dtype, dims, shape=Shape(dims))

    def slice(self, x: Value, axis: int, start: Dim, size: Dim, step: int = 1) -> Value:
        """`size` elements of one axis from `start`, `step` apart."""
        if step == 1 and start == 0 and same_dims([size], [x.dims[axis]]):
            return x
        dims = list(x.dims)
        dims[axis] = size
        if isinstance(size, int) and size == 0:
            stop: Dim = start
        else:
            last: Dim = size if step == 1 else (size - 1) * step + 1
            stop = start + last
        return self.op(
            "slice",
            [x],
            x.dtype,
            dims,
            axis=axis,
            start=Shape([start]),
            stop=Shape([stop]),
            step=step,
        )

    def concat(self, values: Sequence[Value], axis: int, dims: Sequence[Dim]) -> Value:
        if len(values) == 1:
            return values[0]
        return self.op("concat", list(values), values[0].dtype, dims, axis=axis)

    def full(self, dtype: str, dims: Sequence[Dim], value: float | int | bool) -> Value:
        number = float(value) if dtype in FLOATS else int(value)
        return self.op("full", [], dtype, dims, value=number)

    def iota(self, size: Dim, start: Dim = 0, step: int = 1, dtype: str = "i64") -> Value:
        return self.op("iota", [], dtype, [size], start=Shape([start]), step=step)

    def dim_value(self, dim: Dim) -> Value:
        if isinstance(dim, int):
            return self.scalar("i64", dim)
        return self.op("dim_value", [], "i64", [], value=Shape([dim]))

    def unary(self, op: str, x: Value, dtype: str | None = None) -> Value:
        return self.op(op, [x], dtype or x.dtype, x.dims)

    def binary(self, op: str, a: Value, b: Value, dtype: str | None = None) -> Value:
        """Operands must already have one dtype; the shapes broadcast."""
        return self.op(op, [a, b], dtype or a.dtype, broadcast(a.dims, b.dims))

    def where(self, c: Value, a: Value, b: Value) -> Value:
        return self.op("where", [c, a, b], a.dtype, broadcast(c.dims, a.dims, b.dims))

    def reduce(self, kind: str, x: Value, axes: Sequence[int], keepdim: bool, dtype: str) -> Value:
        drop = set(axes)
        dims = [1 if i in drop else d for i, d in enumerate(x.dims) if keepdim or i not in drop]
        return self.op(
            "reduce", [x], dtype, dims, kind=kind, axes=sorted(drop), keepdim=int(keepdim)
        )

    def check(self, condition: Value, message: str = "") -> None:
        """The program refuses calls where the one element of `condition` is zero."""
        truth = self.reshape(self.cast(condition, "bool"), [])
        attrs: dict[str, Attr] = {"message": message} if message else {}
        self.op("check", [truth], "bool", [], **attrs)

    def check_all(self, conditions: Value, message: str) -> None:
        """The same for every element; nothing on GPUs, whose kernels check no values either."""
        if not self.on_gpu:
            axes = range(conditions.rank)
            self.check(self.reduce("all", conditions, axes, False, "bool"), message)

    def text(
        self,
        outputs: Sequence[Value],
        ranges: dict[str, tuple[int, int]],
        relations: Sequence[str] = (),
    ) -> str:
        """The whole program; `ranges` gives the bounds of each symbol, `relations` what else has to
        hold for sizes."""
        lines = ["rmir 1"]
        for name in sorted(self.symbols.names.values()):
            low, high = ranges.get(name, (0, 2**63 - 1))
            lines.append(f"sym {name} [{low},{high}]")
        order = ("input", "weight", "literal")
        for kind in order:
            lines += [line for line in self._header if line.startswith(kind)]
            if kind == "input":
                lines += [f"where {relation}" for relation in relations]
        lines += self._nodes
        lines.append(
            "return" + "".join((", " if i else " ") + f"%{v.id}" for i, v in enumerate(outputs))
        )
        return "\n".join(lines) + "\n"
