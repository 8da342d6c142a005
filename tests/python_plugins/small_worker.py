"""The worker's side of rm_backend_small.py: three operators in NumPy. SMALL_FAULT makes it
misbehave, SMALL_KIND gives other bytes for the same program."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from rm_abstract.plugin import Failure
from rm_abstract.worker import ir_text
from rm_abstract.worker.python_backend import Program
from rm_abstract.worker.tensors import Tensor


def fault(name: str) -> bool:
    return os.environ.get("SMALL_FAULT") == name


def linear(x: Any, weight: Any, bias: Any = 0.0) -> Any:
    return x @ weight.T + bias


OPERATORS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "relu": lambda x: numpy.maximum(x, 0),
    "tanh": numpy.tanh,
}


class Loaded:
    def __init__(self, text: str, weights: Mapping[str, Any], scale: float) -> None:
        self._program, self._weights, self._scale = ir_text.parse(text), weights, scale

    def execute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        if fault("run_error"):
            raise RuntimeError("the device said E77")
        if fault("run_crash"):
            os._exit(9)
        time.sleep(float(os.environ.get("SMALL_RUN_S", "0")))
        values = {number: self._weights[name] for number, name in self._program.weights.items()}
        values |= zip(self._program.inputs, [one.numpy() for one in inputs], strict=True)
        for node in self._program.nodes:
            operands = [values[i] for i in node.operands if i is not None]
            wrong = 1.05 if fault(f"wrong_{node.op}") else 1.0
            values[node.results[0]] = OPERATORS[node.op](*operands) * wrong
        for number, output in zip(self._program.outputs, outputs, strict=True):
            output.write((values[number] * self._scale).astype("float32"))


class Worker:
    def __init__(self, device: int) -> None:
        self._by_name: dict[str, Any] = {}

    def compile(
        self,
        program: Program,
        options: Mapping[str, str],
        progress: Callable[[float, str], None],
    ) -> bytes:
        if fault("compile_crash"):
            os._exit(9)
        kind = "wrong" if fault("compile_wrong") else os.environ.get("SMALL_KIND", "1")
        return kind.encode() + b" " + program.code

    def load(self, artefact: bytes, weights: Mapping[str, Tensor]) -> Loaded:
        refusing = os.environ.get("SMALL_REFUSE_ONCE")
        if refusing and os.path.exists(refusing):
            os.unlink(refusing)
            raise Failure("[small] expected an artefact of this firmware, got another's", "RM403")
        kind, _, code = artefact.partition(b" ")
        arrays = {name: tensor.numpy() for name, tensor in weights.items()}
        if fault("weights_by_name"):  # shared with programs of other weights
            arrays = {name: self._by_name.setdefault(name, arrays[name].copy()) for name in arrays}
        return Loaded(code.decode(), arrays, 1.05 if kind == b"wrong" else 1.0)
