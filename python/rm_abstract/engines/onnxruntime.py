"""The engine that runs models with ONNX Runtime.

A program serves one set of sizes, is exported by torch.onnx from our own program at these sizes,
and is run by an InferenceSession. The exported bytes hold no weights and are kept in
the compile cache; a session is given the weights the module has.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.decline import Decline
from rm_abstract.base.entry_report import EntryReport
from rm_abstract.base.errors import CompileError, ExecutionError, from_core
from rm_abstract.calls.call import CallSpec, FlatCall
from rm_abstract.calls.tensors import call_tensors
from rm_abstract.engines.compiled_call import CompiledCall
from rm_abstract.engines.context import EngineContext
from rm_abstract.engines.device_parts import refuse_checks
from rm_abstract.engines.eager_gate import EagerGate
from rm_abstract.engines.engine_module import EngineModule
from rm_abstract.engines.onnxruntime_options import DEFAULT_PROVIDERS
from rm_abstract.engines.program_engine import ProgramEngine
from rm_abstract.engines.specializer import Specializer
from rm_abstract.engines.variant import Record, Variant
from rm_abstract.worker import onnx_program
from rm_abstract.worker.onnx_weights import LOCATION

_NUMPY = {  # what passes between torch and ONNX Runtime as NumPy arrays
    *(torch.float32, torch.float64, torch.float16, torch.bool, torch.uint8, torch.int8),
    *(torch.int16, torch.int32, torch.int64),
}


def create_engine(module: torch.nn.Module, context: EngineContext) -> ProgramEngine:
    """The factory the engine registry calls."""
    own = EngineModule(module, context)
    return ProgramEngine(own, OnnxRuntimeCompiler(own))


class OnnxRuntimeCall(CompiledCall):
    """A call structure; every set of sizes is a program of its own, compared on its own."""

    max_variants = 64

    def decode_step(self, leaves: Sequence[Any]) -> None:
        """The core's loop runs programs of our own compiler."""


class OnnxRuntimeCompiler:
    """Implements compiler.ProgramCompiler."""

    name = "onnxruntime"
    uses_core = False

    def __init__(self, module: EngineModule) -> None:
        self._module = module
        self.gate = EagerGate(module)
        text = module.context.settings.text("engine_options")
        self._options: dict[str, Any] = json.loads(text)

    def new_call(self, engine: Specializer, spec: CallSpec) -> CompiledCall:
        return OnnxRuntimeCall(engine, spec)

    def admit(self, call: FlatCall) -> None:
        if self._module.placement.on_gpu:
            raise Decline("RM332", "a device other than the CPU")

    def compile(self, record: Record, call: FlatCall, past: Sequence[bool]) -> Variant:
        tensors = call_tensors(call)
        weights = self._module.weights.of(record)
        for tensor in (*tensors, *weights.values()):
            if tensor.dtype not in _NUMPY:
                raise Decline("RM332", f"tensors of {tensor.dtype}")
        sizes = _sizes(record, [tuple(tensor.shape) for tensor in tensors])
        try:
            text = _core.ir.substitute(record.ir, sizes)
            refuse_checks("onnxruntime", text)
            code, artefact, source = self._exported(text, weights)
        except _core.CoreError as error:
            raise from_core(error, CompileError) from error
        except ValueError as error:  # an operator that has no words in torch
            raise CompileError(
                f"[onnxruntime] expected operators that torch.onnx exports, got {error}",
                code="RM304",
            ) from error
        program = OnnxProgram(code, weights, self._options, record.repeated)
        variant = OnnxVariant(record, program, past, sizes)
        shapes = " ".join(str(list(tensor.shape)) for tensor in tensors[:4])
        variant.report.signature = f"{shapes}, this shape only"
        variant.report.artefact = artefact
        variant.report.cache = "miss" if source == "compiled" else "hit"
        return variant

    def _exported(self, text: str, weights: dict[str, torch.Tensor]) -> tuple[bytes, str, str]:
        """(ModelProto without weights, what a verdict is about, where it came from)."""
        software = {
            "exporter": onnx_program.exporter().encode(),
            "onnxruntime": metadata.version("onnxruntime").encode(),
        }
        cache = self._module.artefacts.cache
        builder = cache.new_key("vendor")
        builder.set("program", text)
        builder.set("options", {"engine_options": json.dumps(self._options, sort_keys=True)})
        builder.set("backend", software)
        builder.set("target", "onnxruntime")
        key = builder.finish()

        def compile_part() -> dict[str, Any]:
            data = onnx_program.to_onnx(text, weights)
            return {"sections": {"artefact": data}, "producer": "torch.onnx", "compat": self.name}

        entry, source = cache.get_or_compile(key, compile_part, lambda _: "accept")
        code = bytes(entry.section("artefact"))
        return code, f"{key.hex}:{hashlib.sha256(code).hexdigest()[:16]}", source


class OnnxVariant(Variant):
    """Serves the sizes it was exported for."""

    def __init__(
        self, record: Record, program: OnnxProgram, is_past: Sequence[bool], sizes: dict[str, int]
    ) -> None:
        super().__init__(record, program, is_past)
        fits = self.serves

        def serves(shapes: Any) -> bool:
            return bool(fits(shapes)) and _sizes(record, shapes) == sizes

        self.serves = serves

    def full_report(self) -> EntryReport:
        report = super().full_report()
        report.kept = {}
        return report


def _sizes(record: Record, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """What the symbols of a program are in a call of these shapes."""
    found: dict[str, int] = {}
    for dims, shape in zip(record.input_dims, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            if str(dim).isidentifier():
                found.setdefault(str(dim), int(size))
    return found


class OnnxProgram:
    """Implements engines.variant.Program with one InferenceSession. Thread safe."""

    def __init__(
        self,
        code: bytes,
        weights: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        repeated: Sequence[Sequence[int]],
    ) -> None:
        self._code, self._options, self._repeated = code, options, repeated
        self._lock = threading.Lock()
        self._held: list[Any] = []
        self._session: Any = None
        self.update_weights(dict(weights))

    def update_weights(self, weights: dict[str, torch.Tensor], shared: Any = None) -> None:
        """Takes these values. ONNX Runtime reads them in place, or copies them to its liking."""
        import onnx

        ort = import_module("onnxruntime")
        model = onnx.load_model_from_string(self._code)
        names = [
            row.name
            for row in model.graph.initializer
            if any(part.value == LOCATION for part in row.external_data)
        ]
        arrays = [weights[name].detach().contiguous().numpy() for name in names]
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in arrays]
        given = ort.SessionOptions()
        given.log_severity_level = 3
        given.intra_op_num_threads = int(
            self._options.get("intra_op_num_threads", torch.get_num_threads())
        )
        if "inter_op_num_threads" in self._options:
            given.inter_op_num_threads = int(self._options["inter_op_num_threads"])
        level = self._options.get("graph_optimization_level", "all")
        given.graph_optimization_level = getattr(
            ort.GraphOptimizationLevel, f"ORT_{'DISABLE' if level == 'disable' else 'ENABLE'}_ALL"
            if level in ("all", "disable") else f"ORT_ENABLE_{level.upper()}",
        )  # fmt: skip
        if names:
            given.add_external_initializers(names, values)
        providers = list(self._options.get("providers", DEFAULT_PROVIDERS))
        try:
            session = ort.InferenceSession(self._code, given, providers=providers)
        except Exception as error:  # its exceptions have no common class
            raise CompileError(
                f"[onnxruntime] expected a model it can run, got {_first_line(error)}; try "
                "inference_engine='native'",
                code="RM331",
            ) from error
        with self._lock:
            self._session, self._held = session, [arrays, values]
            self._inputs = [int(row.name.removeprefix("input")) for row in session.get_inputs()]
            self._nodes = len(model.graph.node)
            self._providers = session.get_providers()

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Raises ExecutionError (RM331) where ONNX Runtime fails."""
        with self._lock:
            session, numbers = self._session, self._inputs
        given = {f"input{n}": inputs[n].detach().contiguous().numpy() for n in numbers}
        try:
            results = session.run(None, given)
        except Exception as error:
            raise ExecutionError(
                f"[onnxruntime] expected a result, got {_first_line(error)}; try "
                "inference_engine='native'",
                code="RM331",
            ) from error
        outputs = [torch.from_numpy(result) for result in results]
        for number, axes in enumerate(self._repeated):
            for axis in axes:
                whole = outputs[number]
                outputs[number] = whole.narrow(axis, 0, 1).expand(whole.shape)
        return outputs

    def report(self) -> dict[str, Any]:
        kernels = {f"onnxruntime {self._providers[0]}": self._nodes}
        return {"nodes": self._nodes, "native_nodes": 0, "kernels": kernels, "instances": 1}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
