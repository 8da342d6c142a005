"""What decides whether a program may serve: a comparison with the original, now or earlier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rm_abstract.base.errors import ParityError
from rm_abstract.calls.call import FlatCall
from rm_abstract.engines.module_weights import WeightVersions
from rm_abstract.engines.variant import Record, Variant
from rm_abstract.verification.parity import Verdict


@dataclass(frozen=True)
class Comparison:
    """What one call shows of a variant: the call, and what the original gave for it."""

    variant: Variant
    call: FlatCall  # as it was before the original ran
    tensors: list[torch.Tensor]  # of `call`
    expected: Any  # the original's output, and the caches it left
    comparable: Callable[[Any], Any]  # takes out of results what may differ: what nothing reads


class Gate(Protocol):
    """The gate of one module's programs. `eager_gate.py` has the usual one."""

    def trusted(self, variant: Variant) -> bool:
        """Whether the variant passed before, on these weights. Raises ParityError when it
        failed."""

    def check(self, shown: Comparison, versions: WeightVersions) -> None:
        """Compares a new variant's run with what the original gave, and stores the verdict.

        `versions` are the weights' before anything read them. Raises ParityError when the results
        differ, and WeightsChanged instead when the weights changed meanwhile.
        """

    def compare(self, shown: Comparison) -> Verdict:
        """Runs the variant on the call, whose caches it writes, and says whether it is right."""

    def working_precision(self, record: Record, tensors: list[torch.Tensor]) -> torch.dtype:
        """The lowest one the model computes in."""

    def on_quantised_weights(self, variant: Variant, call: FlatCall) -> Any:
        """What the original gives for `call`, and its caches, on the weights the program has."""

    def kernels_compared(self, variant: Variant, kernels: int) -> bool:
        """Whether an earlier process compared what this set of kernels gives; accepts it then."""

    def accept_kernels(
        self, variant: Variant, tensors: list[torch.Tensor], verdict: Verdict
    ) -> None:
        """The kernels that a call of these tensors uses were compared just now: they may serve,
        here and in later processes."""

    def quarantine(self, variant: Variant, detail: str) -> ParityError:
        """No process uses the program of this variant any more; returns what to tell the user."""
