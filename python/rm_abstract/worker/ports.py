"""The inputs and outputs of a program, as vendors' compilers ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rm_abstract.worker import ir_text


@dataclass(frozen=True)
class Port:
    """One input or output. ``name`` is an identifier, and unique among its kind."""

    name: str
    dtype: str  # "f32", as in the program's text
    shape: tuple[int, ...]

    def example(self) -> Any:
        """A torch.Tensor of zeros, on the CPU: indices of a table are valid ones."""
        import torch

        from rm_abstract.worker.dtypes import DTYPES

        return torch.zeros(self.shape, dtype=DTYPES[self.dtype])


def of_text(text: str) -> tuple[list[Port], list[Port], list[Port]]:
    """Inputs, outputs and states of a static program in rm.ir/1: a state is neither an input nor,
    with its new content, an output. Raises ValueError."""
    program = ir_text.parse(text)
    plain = [value for value in program.inputs if value not in program.donated]
    kept = [value for value in program.inputs if value in program.donated]
    names = _unique([program.names.get(value, "") for value in plain], "input", len(plain))
    outputs = program.output_types[: len(program.outputs) - len(kept)]
    return (
        _ports(names, [program.types[value] for value in plain]),
        _ports(_unique([], "output", len(outputs)), outputs),
        _ports(_unique([], "state", len(kept)), [program.types[value] for value in kept]),
    )


def of_onnx(code: bytes) -> tuple[list[Port], list[Port], list[Port]]:
    """Inputs and outputs of a ModelProto's bytes, which has no states. Needs the package onnx."""
    import onnx

    graph = onnx.load_model_from_string(code).graph
    weights = {initializer.name for initializer in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    outputs = [_onnx_port(value) for value in graph.output]
    return [_onnx_port(value) for value in inputs], outputs, []


def _onnx_port(value: Any) -> Port:
    import onnx

    kind = value.type.tensor_type
    dtype = _ONNX[onnx.TensorProto.DataType.Name(kind.elem_type)]
    return Port(value.name, dtype, tuple(int(d.dim_value) for d in kind.shape.dim))


_ONNX = {
    "FLOAT": "f32", "DOUBLE": "f64", "BFLOAT16": "bf16", "FLOAT16": "f16", "INT64": "i64",
    "INT32": "i32", "INT16": "i16", "INT8": "i8", "UINT8": "u8", "BOOL": "bool",
}  # fmt: skip


def _ports(names: Sequence[str], types: Sequence[ir_text.Type]) -> list[Port]:
    return [Port(name, kind.dtype, kind.shape) for name, kind in zip(names, types, strict=True)]


def _unique(names: Sequence[str], otherwise: str, count: int) -> list[str]:
    """These names where all are identifiers and different, else numbered ones."""
    if len(set(names)) == count and all(name.isidentifier() for name in names):
        return list(names)
    return [f"{otherwise}{i}" for i in range(count)]
