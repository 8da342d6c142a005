"""The gate of buckets: beside the results, padding is proven harmless.

A bucket may be padded on either side; one that no side suits is compiled for the very shape of the
call.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rm_abstract import _core
from rm_abstract.base.errors import CompileError, from_core
from rm_abstract.calls.call import FlatCall
from rm_abstract.engines.call_parts import snapshot
from rm_abstract.engines.device_call import DeviceVariant, device_cache
from rm_abstract.engines.device_program import DeviceProgram
from rm_abstract.engines.eager_gate import EagerGate
from rm_abstract.engines.engine_module import EngineModule
from rm_abstract.engines.gate import Comparison
from rm_abstract.engines.module_weights import WeightVersions
from rm_abstract.engines.resident_program import ResidentProgram
from rm_abstract.engines.variant import Record, Variant


class PaddingGate(EagerGate):
    """Implements gate.Gate for DeviceVariants."""

    def __init__(self, module: EngineModule, rounds_to_bf16: bool) -> None:
        super().__init__(module)
        self._rounds_to_bf16 = rounds_to_bf16  # the device does, and the user allowed it
        self.no_padding: set[str] = set()  # captures whose results padding changes

    def trusted(self, variant: Variant) -> bool:
        """True when one way of padding passed on these very weights before."""
        assert isinstance(variant, DeviceVariant)
        program = variant.program
        weights = self._module.weights.of(variant.record)
        failed = ""
        for side in program.sides:
            program.side = side
            verdict = self._artefacts.verdict(program.artefact, weights)
            if verdict is None:
                program.side = program.sides[0]
                return False
            if verdict.get("passed") is True:
                program.compared = program.artefact
                variant.report.artefact = program.artefact
                variant.report.max_error = verdict.get("max_error")
                variant.report.parity = "stored verdict"
                return True
            failed = str(verdict.get("detail"))
        if program.is_short:
            return False  # the gate takes this very shape instead
        raise self._module.parity_error(f"{failed} (stored verdict)")

    def check(self, shown: Comparison, versions: WeightVersions) -> None:
        program = _device_variant(shown).program
        detail = program.compared = ""
        for side in program.sides:
            program.side = side
            detail = self._difference(shown, program, versions)
            if not detail:
                program.compared = program.artefact
                return
        if program.is_short:
            self.no_padding.add(shown.variant.record.ir)
            sizes = program.sizes_of([t.shape for t in shown.tensors])
            try:
                program.become_exact(sizes)
            except _core.CoreError as error:
                raise from_core(error, CompileError) from error
            detail = self._difference(shown, program, versions)
            if not detail:
                program.compared = program.artefact
                return
        raise self._module.parity_error(detail)

    def _difference(
        self, shown: Comparison, program: DeviceProgram, versions: WeightVersions
    ) -> str:
        """Why the variant as it is padded now differs from eager; empty when it does not."""
        variant, call, tensors = _device_variant(shown), shown.call, shown.tensors
        weights = self._module.weights.of(variant.record)
        stored = self._artefacts.verdict(program.artefact, weights)
        if stored is not None and stored.get("passed") is not True:  # quarantined
            return f"{stored.get('detail')} (stored verdict)"
        trial = snapshot(call.spec, tuple(call.leaves))
        try:
            output = variant.run(tensors, trial.leaves)
            ran = program.artefact
            inert = not program.is_short or _padding_is_inert(program, call, tensors)
        except _core.CoreError as error:
            raise from_core(error, CompileError) from error
        verdict = self.verdict(replace(shown, call=trial), output)
        if verdict.passed and not inert:
            verdict.fail("the values of padding reach the results")
        if verdict.passed and program.artefact != ran:
            verdict.fail("it was made again while it was compared")
            return verdict.detail
        self.note(variant, program.artefact, verdict, versions)
        variant.say_bucket()
        return verdict.detail

    def working_precision(self, record: Record, tensors: list[torch.Tensor]) -> torch.dtype:
        """The model's own, unless the user allowed the device's."""
        if self._rounds_to_bf16:
            return torch.bfloat16
        return super().working_precision(record, tensors)


def _device_variant(shown: Comparison) -> DeviceVariant:
    assert isinstance(shown.variant, DeviceVariant)
    return shown.variant


def _padding_is_inert(program: DeviceProgram, call: FlatCall, tensors: list[torch.Tensor]) -> bool:
    if not isinstance(program, ResidentProgram):
        return program.padding_is_inert(tensors)
    copy = device_cache(snapshot(call.spec, tuple(call.leaves)).leaves)
    return program.step_padding_is_inert(tensors, copy)
