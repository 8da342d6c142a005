"""The native engine: programs of our own compiler, run by the core."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.entry_report import EntryReport
from rm_abstract.base.errors import CompileError, from_core
from rm_abstract.calls.call import CallSpec, FlatCall
from rm_abstract.engines.call_text import readable
from rm_abstract.engines.compiled_call import CompiledCall
from rm_abstract.engines.context import EngineContext
from rm_abstract.engines.eager_gate import EagerGate
from rm_abstract.engines.engine_module import EngineModule
from rm_abstract.engines.module_weights import sizes
from rm_abstract.engines.placement import device_of
from rm_abstract.engines.program_engine import ProgramEngine
from rm_abstract.engines.specializer import Specializer
from rm_abstract.engines.variant import Record, Variant
from rm_abstract.kv import kv_cache
from rm_abstract.verification.policy import Policy
from rm_abstract.verification.quantised import QuantisedWeight


def create_engine(module: torch.nn.Module, context: EngineContext) -> ProgramEngine:
    """The factory the engine registry calls."""
    own = EngineModule(module, context)
    return ProgramEngine(own, NativeCompiler(own))


class NativeCompiler:
    """Implements compiler.ProgramCompiler."""

    name = "native"
    uses_core = True

    def __init__(self, module: EngineModule) -> None:
        self._module = module
        self._settings = module.context.settings
        self.gate = EagerGate(module, self._unrounded)
        self._compares_kernels = Policy.of(self._settings.text("verify")).kernels

    def new_call(self, engine: Specializer, spec: CallSpec) -> CompiledCall:
        return CompiledCall(engine, spec)

    def admit(self, call: FlatCall) -> None:
        """All that the engine's signatures allow."""

    def compile(self, record: Record, call: FlatCall, past: Sequence[bool]) -> Variant:
        artefacts = self._module.artefacts
        try:
            text, artefact, _ = artefacts.program(record.ir)
            weights = self._module.weights.of(record)
            program = self._program(text, weights, call, record.repeated)
            forms = [QuantisedWeight(*row) for row in _core.ir.quantised_weights(text)]
        except _core.CoreError as error:
            raise from_core(error, CompileError) from error
        variant = Variant(record, program, past, forms)
        variant.timed = not self._module.placement.on_gpu  # a call there returns before it is done
        variant.compares_kernels = self._compares_kernels
        variant.may_refuse = " = check(" in text
        variant.report.signature = readable(call, record.torch_state)
        variant.report.artefact = artefact
        variant.report.precision = artefacts.precision_said
        variant.report.quantised = sizes(forms, weights)
        return variant

    def _program(
        self,
        text: str,
        weights: dict[str, torch.Tensor],
        call: FlatCall,
        repeated: list[list[int]],
    ) -> Any:
        placement = self._module.placement
        model_device = device_of(self._module.get(), call.leaves)
        placement.check(model_device)
        program = _core.Program(
            text,
            placement.weights(weights),
            self._module.artefacts.backends(),
            self._settings.text("force_kernel"),
            packing=self._packing(call),
            shared=self._module.shared.of(weights),
            repeated=repeated,
            checks=self._module.context.kernel_checks(),
            device=placement.index,
        )
        return placement.placed(program, model_device)

    def _packing(self, call: FlatCall) -> str:
        """Generation reads its weights where they lie: memory for one copy of them, not two.

        Transposed weights (GPT-2's) would make every token several times slower.
        """
        wanted = self._settings.text("pack_weights")
        if wanted != "auto":
            return wanted
        cached = any(kv_cache.device_part(leaf) is not None for leaf in call.leaves)
        return "spare" if cached else "later"

    def _unrounded(self, variant: Variant, call: FlatCall) -> Variant | None:
        """The variant without rounding activations to 8 bits; None when it does not round them."""
        if not variant.quantised:
            return None
        text, _, _ = self._module.artefacts.program(variant.record.ir)
        kept = _core.ir.keep_activations(text)
        if kept == text:
            return None
        exact = copy.copy(variant)
        weights = self._module.weights.of(variant.record)
        exact.program = self._program(kept, weights, call, variant.record.repeated)
        exact.direct = None
        exact.report = EntryReport(signature="", engine=self.name, device="")
        return exact
