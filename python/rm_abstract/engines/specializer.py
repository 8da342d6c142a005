"""What a compiled call needs of its engine: captures, programs and the gate of one module."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from rm_abstract.base.errors import ParityError
from rm_abstract.calls.call import FlatCall, ForwardParameters
from rm_abstract.engines.call_parts import Pattern
from rm_abstract.engines.context import Events
from rm_abstract.engines.module_weights import WeightVersions
from rm_abstract.engines.variant import Variant
from rm_abstract.verification.parity import Verdict
from rm_abstract.verification.policy import Policy


class Specializer(Protocol):
    """One engine and one module."""

    events: Events
    parameters: ForwardParameters
    measures: bool  # programs are timed against the original
    unsettled: set[Hashable]  # calls that did more than compute, once so far

    def module(self) -> torch.nn.Module:
        """Raises Decline when it no longer exists."""

    def module_versions(self) -> WeightVersions:
        """Differs from an earlier one when a weight of the module was replaced or written."""

    def on_original(self) -> AbstractContextManager[None]:
        """Nothing inside is routed."""

    @property
    def quantises(self) -> bool:
        """Programs are made with weights of fewer bits than the module's."""

    def cached_variant(
        self, call: FlatCall, pattern: Pattern, past: Sequence[bool]
    ) -> Variant | None:
        """From the cache, without capturing."""

    def make_variant(self, call: FlatCall, pattern: Pattern, past: Sequence[bool]) -> Variant:
        """Captures and compiles this call."""

    policy: Policy

    def compare(
        self,
        variant: Variant,
        call: FlatCall,
        tensors: list[torch.Tensor],
        expected: Any,
        comparable: Callable[[Any], Any],
    ) -> Verdict:
        """Runs the variant on `call`, whose caches it writes, and says whether it is right."""

    def kernels_compared(self, variant: Variant, kernels: int) -> bool:
        """Whether an earlier process compared what this set of kernels gives; accepts it then."""

    def accept_kernels(
        self, variant: Variant, tensors: list[torch.Tensor], verdict: Verdict
    ) -> None:
        """The kernels that a call of these tensors uses were compared: they may serve."""

    def quarantine(self, variant: Variant, detail: str) -> ParityError:
        """No process uses the program of this variant any more; returns what to tell the user."""

    def versions_of(self, variant: Variant) -> WeightVersions:
        """Differs from an earlier one when a weight of the variant was replaced or written."""

    @property
    def on_gpu(self) -> bool:
        """Programs run on a device that has its own memory, and calls return before it is done."""

    def wait(self) -> None:
        """Until the device has done what it was given: before a clock is read."""

    def read_weights_anew(self) -> bool:
        """Gives all programs the weights of now; False when one cannot take them."""

    def refresh(self, variant: Variant) -> bool:
        """Gives it the module's weights of now; False when they are of other types."""

    def runs_user_code(self) -> bool:
        """Whether forward reaches code that no installed package's version names."""

    def trusted(self, variant: Variant) -> bool:
        """The gate passed it before, on these weights. Raises ParityError when it failed."""

    def gate(
        self,
        variant: Variant,
        call: FlatCall,
        tensors: list[torch.Tensor],
        expected: Any,
        comparable: Callable[[Any], Any],
        versions: WeightVersions,
    ) -> None:
        """Compares a run with what the original gave on weights of these versions.

        Raises ParityError when the results differ, and WeightsChanged instead when the weights
        changed meanwhile.
        """

    def on_quantised_weights(self, variant: Variant, call: FlatCall) -> Any:
        """What the original gives on the weights the program has."""

    def slower(self, variant: Variant, eager_s: float) -> None:
        """A program lost against the original."""
