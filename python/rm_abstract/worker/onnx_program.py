"""A static program in ONNX, for devices whose compiler takes that (property program_format=onnx).

torch.onnx exports the program's torch module and onnxscript's optimiser runs on it. Weights are
inputs while that happens, so nothing is folded into them, and external initializers afterwards:
the bytes depend on the program alone. onnx and onnxscript are optional; see exporter().
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import metadata, util
from typing import Any

import torch

from rm_abstract.base.errors import CompileError
from rm_abstract.worker.dtypes import DTYPES
from rm_abstract.worker.ir_to_torch import IrModule, ir_to_torch
from rm_abstract.worker.onnx_weights import LOCATION

OPSET = 20  # the first with gelu
_NEEDED = ("onnx", "onnxscript")


def exporter() -> str:
    """The software that shapes the bytes: part of an artefact's key. Raises CompileError (RM401)
    naming the packages that are missing."""
    missing = [name for name in _NEEDED if util.find_spec(name) is None]
    if missing:
        raise CompileError(
            f"[onnx] expected {' and '.join(_NEEDED)} for a device that takes ONNX, got no "
            f"{' and no '.join(missing)}; try pip install 'rm_abstract[onnx]'",
            code="RM401",
        )
    versions = [f"{name}={metadata.version(name)}" for name in ("torch", *_NEEDED)]
    return ";".join([*versions, f"opset={OPSET}"])


class _WeightsAsInputs(torch.nn.Module):
    def __init__(self, module: IrModule, inputs: int) -> None:
        super().__init__()
        self._module, self._count = module, inputs

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._module.evaluate(values[: self._count], values[self._count :])


def to_onnx(text: str, weights: dict[str, torch.Tensor]) -> bytes:
    """The program as ModelProto bytes: inputs input0.., outputs output0.., weights by their names
    without values. Raises CompileError (RM304) for a program torch.onnx cannot say."""
    exporter()
    module = ir_to_torch(text, weights)
    program = module.program
    examples = [torch.zeros(t.shape, dtype=DTYPES[t.dtype]) for t in program.input_types]
    used = [weights[name] for name in program.weights.values()]
    inputs = [f"input{i}" for i in range(len(examples))]
    names = [f"weight{i}" for i in range(len(used))]
    outputs = [f"output{i}" for i in range(len(program.outputs))]
    try:
        with _quietly(), torch.no_grad():
            exported = torch.onnx.export(
                _WeightsAsInputs(module, len(examples)).eval(),
                (*examples, *(w.detach() for w in used)),
                input_names=[*inputs, *names],
                output_names=outputs,
                opset_version=OPSET,
                dynamo=True,
                optimize=True,
                verbose=False,
            )
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        raise CompileError(
            f"[onnx] expected a program torch.onnx exports, got {_cause(error)}; try another "
            "device for this model",
            code="RM304",
        ) from error
    assert exported is not None  # dynamo=True without a file gives the program
    model = exported.model_proto
    _as_initializers(model, dict(zip(names, program.weights.values(), strict=True)))
    return bytes(model.SerializeToString(deterministic=True))


def _cause(error: BaseException) -> str:
    """The first failure in one line; torch.onnx wraps it in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]}"


def _as_initializers(model: Any, weights: dict[str, str]) -> None:
    """Graph inputs that are weights become external initializers under the weights' own names."""
    import onnx

    graph = model.graph
    found = {value.name: value for value in graph.input if value.name in weights}
    kept = [value for value in graph.input if value.name not in weights]
    del graph.input[:]
    graph.input.extend(kept)
    for name, value in found.items():
        kind = value.type.tensor_type
        initializer = graph.initializer.add(name=weights[name], data_type=kind.elem_type)
        initializer.dims.extend(dim.dim_value for dim in kind.shape.dim)
        initializer.data_location = onnx.TensorProto.EXTERNAL
        initializer.external_data.add(key="location", value=LOCATION)
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name in weights:
                node.input[place] = weights[name]
    for output in graph.output:
        output.name = weights.get(output.name, output.name)


@contextmanager
def _quietly() -> Iterator[None]:
    """torch.onnx prints its steps; the user is told by our own progress."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
