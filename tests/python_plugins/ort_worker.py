"""The worker's side of rm_backend_ort.py: the artefact is the exported model, without weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnxruntime

from rm_abstract.worker.onnx_weights import with_weights
from rm_abstract.worker.python_backend import Program
from rm_abstract.worker.tensors import Tensor


def session(model: Any) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


class Loaded:
    def __init__(self, running: onnxruntime.InferenceSession) -> None:
        self._session = running
        self._names = [row.name for row in running.get_inputs()]

    def execute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        given = {f"input{i}": tensor.numpy() for i, tensor in enumerate(inputs)}
        results = self._session.run(None, {name: given[name] for name in self._names})
        for result, output in zip(results, outputs, strict=True):
            output.write(result)


class OrtWorker:
    def __init__(self, device: int) -> None:
        self.device = device

    def compile(
        self,
        program: Program,
        options: Mapping[str, str],
        progress: Callable[[float, str], None],
    ) -> bytes:
        progress(0.1, "checking")
        session(program.onnx())  # it can be run: what a compiler would take
        progress(1.0, "done")
        return program.code

    def load(self, artefact: bytes, weights: Mapping[str, Tensor]) -> Loaded:
        return Loaded(session(with_weights(artefact, weights)))
