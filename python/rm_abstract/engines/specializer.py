"""What a compiled call needs of its engine: programs of one module and their gate."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from rm_abstract.calls.call import FlatCall, ForwardParameters
from rm_abstract.engines.call_parts import Pattern
from rm_abstract.engines.context import Events
from rm_abstract.engines.gate import Gate
from rm_abstract.engines.module_weights import WeightVersions
from rm_abstract.engines.variant import Variant
from rm_abstract.verification.policy import Policy


class Specializer(Protocol):
    """One engine and one module."""

    events: Events
    gate: Gate
    policy: Policy
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

    def make_variant(
        self, call: FlatCall, pattern: Pattern, past: Sequence[bool], whole: bool = False
    ) -> Variant:
        """Captures and compiles this call; with ``whole``, every layer of the model is traced."""

    def passed(self, variant: Variant, call: FlatCall, pattern: Pattern) -> None:
        """The gate has compared a new variant, made from this call, with the original."""

    def versions_of(self, variant: Variant) -> WeightVersions:
        """Differs from an earlier one when a weight of the variant was replaced or written."""

    def standing_of(self, variant: Variant) -> object:
        """Equal to an earlier one when nothing has changed that the variant's results depend on;
        None where that is not known."""

    @property
    def changes(self) -> int:
        """How often the module was changed since the first call."""

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

    def slower(self, variant: Variant, eager_s: float) -> None:
        """A program lost against the original."""
