"""Describe a call of an ATen operator as data, for the torch bridge.

``encode_call`` turns ``op(*args, **kwargs)`` into tensor operands and two attributes; the bridge
(``backends/torch``) decodes them in C++, and ``bind`` here for what torch's stable C interface
cannot carry.  Format 1 of ``schema_args``, a JSON object:

``{"v": 1, "args": [[type, value], ...], "returns": [type, ...]}``

One entry per schema argument in schema order, defaults filled in.  A type is a base (Tensor, int,
float, bool, str, Scalar, complex, ScalarType, Device, Layout, MemoryFormat, Generator) and its
wrappers from the inside out: ``?`` optional, ``[]`` list (``Tensor?[]`` is a list of optional
tensors).  A value is ``null``, a JSON bool, integer, float, string or list, or one of
``{"t": i}`` tensor operand i, ``{"s": k}`` integer k of the attribute ``sym_args``,
``{"f": "inf" | "-inf" | "nan"}``, ``{"c": [re, im]}``.  ScalarType, Layout, MemoryFormat and Device
are strings: "float32", "strided", "contiguous_format", "cuda:0".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["bind", "decode_call", "encode_call", "op_name"]

_BASES = {
    "TensorType": "Tensor",
    "IntType": "int",
    "SymIntType": "int",
    "FloatType": "float",
    "SymFloatType": "float",
    "BoolType": "bool",
    "SymBoolType": "bool",
    "StringType": "str",
    "NumberType": "Scalar",
    "ComplexType": "complex",
    "ScalarTypeType": "ScalarType",
    "DeviceObjType": "Device",
    "LayoutType": "Layout",
    "MemoryFormatType": "MemoryFormat",
    "GeneratorType": "Generator",
}


class UnsupportedCall(ValueError):
    """The call cannot be described: it mutates its arguments or takes something that is no data."""


def op_name(op: torch._ops.OpOverload) -> str:
    """``aten.topk.default``: how the IR and the bridge name an operator."""
    return f"{op.namespace}.{op._schema.name.split('::')[1]}.{op._overloadname}"


def encode_call(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> tuple[list[Any], dict[str, Any]]:
    """Operands and attributes of ``op(*args, **kwargs)``.

    Tensors and symbolic integers may be real ones or fx nodes (told apart by ``meta["val"]``).
    Returns the tensor operands in order (each once) and ``{"schema_args": str, "sym_args": list}``;
    ``sym_args`` holds the symbolic integers as they came and is absent when there are none.
    Raises ``UnsupportedCall``.
    """
    schema = op._schema
    if schema.is_mutable:
        raise UnsupportedCall(
            f"[{op}] expected a functional operator, got one that mutates its arguments"
        )
    encoder = _Encoder(str(op))
    given = dict(kwargs or {})
    entries = []
    for i, arg in enumerate(schema.arguments):
        if i < len(args) and not arg.kwarg_only:
            value = args[i]
        elif arg.name in given:
            value = given.pop(arg.name)
        elif arg.has_default_value():
            value = arg.default_value
        else:
            raise UnsupportedCall(f"[{op}] expected the argument {arg.name!r}, got none")
        type_name = _type_name(op, arg.real_type)
        length = getattr(arg, "N", None)
        if length is not None and isinstance(value, (bool, int, float)):
            value = [value] * length  # `int[2] x` may be written as one number
        entries.append([type_name, encoder.encode(type_name, value)])
    if given:
        raise UnsupportedCall(f"[{op}] expected arguments of its schema, got {sorted(given)}")
    returns = [_type_name(op, r.real_type) for r in schema.returns]
    if any(t not in ("Tensor", "Tensor[]") for t in returns):
        raise UnsupportedCall(f"[{op}] expected tensors as results, got {returns}")
    text = json.dumps({"v": 1, "args": entries, "returns": returns}, separators=(",", ":"))
    attrs: dict[str, Any] = {"schema_args": text}
    if encoder.symbols:
        attrs["sym_args"] = encoder.symbols
    return encoder.operands, attrs


def _type_name(op: Any, jit_type: Any) -> str:
    kind = jit_type.kind()
    if kind == "OptionalType":
        return _type_name(op, jit_type.getElementType()) + "?"
    if kind == "ListType":
        return _type_name(op, jit_type.getElementType()) + "[]"
    if kind not in _BASES:
        raise UnsupportedCall(
            f"[{op}] expected a schema of tensors and plain values, got {jit_type}"
        )
    return _BASES[kind]


class _Encoder:
    def __init__(self, where: str) -> None:
        self.where = where
        self.operands: list[Any] = []
        self.symbols: list[Any] = []

    def encode(self, type_name: str, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return self._node(value)
        if isinstance(value, torch.Tensor):
            return self._operand(value)
        if isinstance(value, torch.SymInt):
            return self._symbol(value)
        if isinstance(value, (list, tuple)):
            return [self.encode(type_name, item) for item in value]
        base = type_name.split("?")[0].split("[")[0]
        if base in _ENUM_DEFAULTS and isinstance(value, int):
            return self._enum_default(base, value)
        if base == "float" and isinstance(value, int):
            return float(value)
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"f": str(value)}
        if isinstance(value, complex):
            return {"c": [value.real, value.imag]}
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return _enum_name(value)
        if isinstance(value, torch.device):
            return str(value)
        raise UnsupportedCall(f"[{self.where}] expected data, got {type(value).__name__}")

    def _enum_default(self, base: str, number: int) -> str:
        name = _ENUM_DEFAULTS[base].get(number)
        if name is None:
            raise UnsupportedCall(f"[{self.where}] expected a known {base}, got number {number}")
        return name

    def _node(self, node: torch.fx.Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return self._operand(node)
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return self._symbol(node)
        raise UnsupportedCall(
            f"[{self.where}] expected a tensor or an integer, "
            f"got {node.name} of {type(value).__name__}"
        )

    def _operand(self, tensor: Any) -> dict[str, int]:
        for i, known in enumerate(self.operands):
            if known is tensor:
                return {"t": i}
        self.operands.append(tensor)
        return {"t": len(self.operands) - 1}

    def _symbol(self, symbol: Any) -> dict[str, int]:
        self.symbols.append(symbol)
        return {"s": len(self.symbols) - 1}


def _enum_name(value: torch.dtype | torch.layout | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")


# torch's numbers of enum values that appear as defaults in schemas (c10's ScalarType and
# MemoryFormat); a number that is not listed is an error, not a guess.
_ENUM_DEFAULTS: dict[str, dict[int, str]] = {
    "ScalarType": {4: "int64", 6: "float32", 11: "bool"},
    "MemoryFormat": {
        0: "contiguous_format",
        1: "preserve_format",
        2: "channels_last",
        3: "channels_last_3d",
    },
    "Layout": {0: "strided"},
}


def decode_call(
    schema_args: str, sym_args: Sequence[int], tensors: Sequence[torch.Tensor | None]
) -> tuple[list[Any], list[str]]:
    """The full argument list of a described call, and its return types."""
    call = json.loads(schema_args)
    if call.get("v") != 1:
        raise UnsupportedCall(f"expected schema_args of format 1, got {call.get('v')!r}")
    decoded = [_decode(type_name, value, sym_args, tensors) for type_name, value in call["args"]]
    return decoded, call["returns"]


def _decode(
    type_name: str, value: Any, sym_args: Sequence[int], tensors: Sequence[torch.Tensor | None]
) -> Any:
    if isinstance(value, list):
        return [_decode(type_name, item, sym_args, tensors) for item in value]
    if isinstance(value, dict):
        ((tag, content),) = value.items()
        if tag == "t":
            return tensors[content]
        if tag == "s":
            return sym_args[content]
        return float(content) if tag == "f" else complex(*content)
    base = type_name.split("?")[0].split("[")[0]
    if base in _ENUM_DEFAULTS and value is not None:
        return getattr(torch, value)
    return torch.device(value) if base == "Device" and value is not None else value


def bind(
    op: str, schema_args: str, sym_args: Sequence[int]
) -> Callable[[Sequence[Any]], list[Any]]:
    """A function from tensor handles to result handles, called by the bridge for each launch.

    Handles are capsules of owning ``at::Tensor`` pointers, ``None`` for an absent operand; the
    function takes over its inputs and gives its results away.
    """
    *spaces, name, overload = op.split(".")
    function = getattr(getattr(getattr(torch.ops, spaces[-1]), name), overload)
    arguments = function._schema.arguments
    positional = sum(not a.kwarg_only for a in arguments)
    take, give = _handles()
    # Decoded once, with a slot in the place of each tensor: a launch only fills the slots.
    slots = [_Slot(i) for i in range(_operand_count(schema_args))]
    template, returns = decode_call(schema_args, sym_args, slots)  # type: ignore[arg-type]
    # torch parses keywords slowly: leave out those that say what the schema says.
    keywords_of = {
        a.name: value
        for a, value in zip(arguments[positional:], template[positional:], strict=True)
        if not (a.has_default_value() and _same(a.default_value, value))
    }
    single = len(returns) == 1

    def run(handles: Sequence[Any]) -> list[Any]:
        present = iter(take([h for h in handles if h is not None]))
        tensors = [None if h is None else next(present) for h in handles]
        values = [_fill(value, tensors) for value in template[:positional]]
        keywords = {name: _fill(value, tensors) for name, value in keywords_of.items()}
        result = function(*values, **keywords)
        flat: list[torch.Tensor] = []
        for item in (result,) if single else result:
            flat.extend(item if isinstance(item, (list, tuple)) else (item,))
        return give(flat)

    return run


class _Slot:
    """Where tensor operand `index` goes."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _same(default: Any, value: Any) -> bool:
    return (
        type(default) is type(value)
        and isinstance(value, (type(None), bool, int, float, str))
        and (default == value)
    )


def _fill(value: Any, tensors: Sequence[torch.Tensor | None]) -> Any:
    if type(value) is _Slot:
        return tensors[value.index]
    if type(value) is list:
        return [_fill(item, tensors) for item in value]
    return value


def _operand_count(schema_args: str) -> int:
    def highest(value: Any) -> int:
        if isinstance(value, dict):
            return int(value.get("t", -1))
        return max(map(highest, value), default=-1) if isinstance(value, list) else -1

    return 1 + max((highest(v) for _, v in json.loads(schema_args)["args"]), default=-1)


def _handles() -> tuple[
    Callable[[list[Any]], list[torch.Tensor]], Callable[[list[torch.Tensor]], list[Any]]
]:
    """torch's own conversions between tensors and owning pointers."""
    aoti = torch._C._aoti
    return aoti.alloc_tensors_by_stealing_from_void_ptrs, aoti.unsafe_alloc_void_ptrs_from_tensors
