"""The parity gate: a program serves after it gave what PyTorch gave on the same call.

The verdict is kept in the compile cache under program, weights and machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.errors import CompileError, ParityError, from_core
from rm_abstract.calls.call import FlatCall, call_module
from rm_abstract.calls.tensors import call_tensors
from rm_abstract.engines.call_parts import snapshot
from rm_abstract.engines.engine_module import EngineModule
from rm_abstract.engines.gate import Comparison
from rm_abstract.engines.module_weights import WeightsChanged, WeightVersions
from rm_abstract.engines.variant import Record, Variant
from rm_abstract.guards import torch_state
from rm_abstract.verification import parity
from rm_abstract.verification.quantised import OnQuantisedWeights
from rm_abstract.verification.wider import InWiderTypes

# A variant that does not round activations to 8 bits, for one that does; None for all others.
Unrounded = Callable[[Variant, FlatCall], Variant | None]


def rounds_nothing(variant: Variant, call: FlatCall) -> Variant | None:
    """`Unrounded` of a compiler whose programs never round activations."""
    return None


class EagerGate:
    """Implements gate.Gate."""

    def __init__(self, module: EngineModule, unrounded: Unrounded = rounds_nothing) -> None:
        self._module, self._artefacts = module, module.artefacts
        self._unrounded = unrounded

    def trusted(self, variant: Variant) -> bool:
        """As the protocol says.

        Never for a module that runs code of the user's: the verdict is about the program, and that
        this module still is what the program was made from is known by comparing only.
        """
        if self._module.runs_user_code():
            return False
        weights = self._module.weights.of(variant.record)
        verdict = self._artefacts.verdict(variant.report.artefact, weights)
        if verdict is None:
            return False
        variant.report.max_error = verdict.get("max_error")
        if verdict.get("passed") is not True:
            raise self._module.parity_error(f"{verdict.get('detail')} (stored verdict)")
        variant.report.parity = "stored verdict"
        return True

    def check(self, shown: Comparison, versions: WeightVersions) -> None:
        verdict = self.compare(shown)
        self.note(shown.variant, shown.variant.report.artefact, verdict, versions)
        if not verdict.passed:
            raise self._module.parity_error(verdict.detail)
        self.accept_kernels(shown.variant, shown.tensors, verdict)

    def compare(self, shown: Comparison) -> parity.Verdict:
        """As the protocol says.

        What a quantised variant is expected to give comes from `on_quantised_weights`: rounding
        weights may change outputs a lot, a right program differs from eager on the rounded weights
        as little as any other does. Where it rounds activations to 8 bits, that is asked of the
        same program on the same quantised weights without that rounding, and the variant must be as
        near to it as rounding allows.

        Roundings of a deep model in a half type may be farther apart than the tolerance. Then the
        original in wider types decides which of the two is nearer to what the model means.
        """
        variant, call, bits = shown.variant, shown.call, 16
        try:
            exact = self._unrounded(variant, call)
            if exact is not None:
                trial = snapshot(call.spec, tuple(call.leaves))
                output = exact.run(call_tensors(trial), trial.leaves)
                verdict = self.verdict(replace(shown, variant=exact, call=trial), output)
                if not verdict.passed:
                    return verdict
                shown, bits = replace(shown, expected=(output, _caches(trial))), 8
            spare = snapshot(call.spec, tuple(call.leaves)) if bits == 16 else None
            output = variant.run(shown.tensors, call.leaves)
        except _core.CoreError as error:
            raise from_core(error, CompileError) from error
        verdict = self.verdict(shown, output, bits)
        if verdict.rounding and spare is not None:
            return self._judged(shown, output, spare, verdict)
        return verdict

    def _judged(
        self, shown: Comparison, output: Any, spare: FlatCall, verdict: parity.Verdict
    ) -> parity.Verdict:
        """The verdict by the original in wider types; `verdict` where it does not run in them."""
        variant, precision = shown.variant, self._precision(shown)
        try:
            with InWiderTypes(precision):
                exact = self.on_quantised_weights(variant, spare)
        except Exception as error:  # an operator that has no kernel for the wider type, or memory
            verdict.detail += f" (and the original in wider types gave {type(error).__name__})"
            return verdict
        return parity.judge(
            shown.comparable(exact),
            shown.comparable(shown.expected),
            shown.comparable((output, _caches(shown.call))),
            precision,
            16 if variant.quantised else 0,
        )

    def working_precision(self, record: Record, tensors: list[torch.Tensor]) -> torch.dtype:
        weights = [t for t in self._module.weights.of(record).values() if t.is_floating_point()]
        return parity.working_precision([*weights, *tensors])

    def on_quantised_weights(self, variant: Variant, call: FlatCall) -> Any:
        """As the protocol says. The caches of `call` are written; nothing else is."""
        module, weights = self._module, self._module.weights.of(variant.record)
        with (
            torch.no_grad(),
            module.on_original(),
            OnQuantisedWeights(weights, variant.quantised),
        ):
            positional = module.parameters.positional
            output = call_module(module.get()._call_impl, call.spec, list(call.leaves), positional)
        return output, _caches(call)

    # ---- comparing later calls ----------------------------------------------------------------

    def kernels_compared(self, variant: Variant, kernels: int) -> bool:
        if not self._artefacts.kernels_passed(variant.report.artefact, kernels):
            return False
        program: Any = variant.program
        program.accept_kernels(kernels)
        return True

    def accept_kernels(
        self, variant: Variant, tensors: list[torch.Tensor], verdict: parity.Verdict
    ) -> None:
        variant.report.compared += 1
        if not variant.compares_kernels:
            return
        program: Any = variant.program
        kernels = program.kernel_set(tensors)
        program.accept_kernels(kernels)
        self._artefacts.store_kernels(variant.report.artefact, kernels, verdict)

    def quarantine(self, variant: Variant, detail: str) -> ParityError:
        variant.report.parity = f"failed: {detail}"
        weights = self._module.weights.of(variant.record)
        self._artefacts.quarantine(variant.report.artefact, weights, detail)
        return self._module.parity_error(detail, "RM502")

    # ---- what gates share ---------------------------------------------------------------------

    def verdict(self, shown: Comparison, output: Any, activation_bits: int = 16) -> parity.Verdict:
        """What the run that gave `output` and left the caches of the call is worth."""
        return parity.compare(
            shown.comparable(shown.expected),
            shown.comparable((output, _caches(shown.call))),
            self._precision(shown),
            activation_bits if shown.variant.quantised else 0,
        )

    def _precision(self, shown: Comparison) -> torch.dtype:
        precision = self.working_precision(shown.variant.record, shown.tensors)
        if precision is torch.float32 and shown.variant.record.torch_state.get(torch_state.TF32):
            return torch.float16  # products of as many bits, here and in the original
        return precision

    def note(
        self, variant: Variant, artefact: str, verdict: parity.Verdict, versions: WeightVersions
    ) -> None:
        """Stores a verdict and says it in the report; the gate's runs are no calls.

        A difference behind a change of the weights is no verdict: raises WeightsChanged.
        """
        if not verdict.passed and versions != self._module.versions():
            raise WeightsChanged
        variant.report.calls = 0
        variant.report.max_error = verdict.max_error
        variant.report.parity = "passed" if verdict.passed else f"failed: {verdict.detail}"
        variant.report.artefact = artefact
        if not self._module.runs_user_code():  # another verdict is never asked for
            weights = self._module.weights.of(variant.record)
            self._artefacts.store_verdict(artefact, weights, verdict)


def _caches(call: FlatCall) -> list[Any]:
    return [leaf for leaf in call.leaves if not isinstance(leaf, torch.Tensor)]
