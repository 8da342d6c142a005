"""One call structure of a module: its variants, and the size patterns that stay eager."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.decline import Decline, Deferred
from rm_abstract.base.entry_report import EntryReport
from rm_abstract.base.errors import Error
from rm_abstract.calls.call import CallSpec, call_module
from rm_abstract.calls.step_call import StepCall
from rm_abstract.engines.call_parts import Pattern, everything, reported, unfold
from rm_abstract.engines.specializer import Specializer
from rm_abstract.engines.variant import Variant
from rm_abstract.kv import kv_cache

MAX_VARIANTS = 8  # captures of one call structure and size pattern


class CallState:
    """What serving a call and compiling it share."""

    max_variants = MAX_VARIANTS
    reads = staticmethod(kv_cache.read)  # how a call looks at its caches

    def __init__(self, engine: Specializer, spec: CallSpec) -> None:
        self.engine = engine
        self.spec = spec
        self.step = StepCall.of(spec)
        self.direct = _core.router.DirectPrograms()  # of variants that the router runs itself
        self.variants: dict[Pattern, list[Variant]] = {}
        self.refused: dict[Pattern, Decline] = {}
        self.waiting: dict[Pattern, list[Variant]] = {}  # compiled for weights that have changed
        self.lock = threading.Lock()

    def prepared(self, flat_inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The leaves as the program takes them: a generation step completes its own."""
        return self.step.prepare(flat_inputs) if self.step else flat_inputs

    def unfolded(self, leaves: tuple[Any, ...]) -> tuple[list[torch.Tensor], Pattern, list[bool]]:
        return unfold(leaves, self.reads)

    def comparable(self, leaves: tuple[Any, ...]) -> Callable[[Any], Any]:
        """Takes out of an output what may differ: values that nothing ever reads."""
        return self.step.comparable(leaves) if self.step else everything

    def original(self, flat_inputs: tuple[Any, ...]) -> Callable[[], Any]:
        """The module's own forward on the arguments of this call."""
        module, names = self.engine.module(), self.engine.parameters.positional
        return lambda: call_module(module._call_impl, self.spec, list(flat_inputs), names)

    def refuse(
        self, error: Exception, pattern: Pattern, flat_inputs: tuple[Any, ...]
    ) -> Error | Decline:
        """The pattern stays eager for `error`, which comes back as policy and report know it."""
        failure = reported(error)
        self.refused[pattern] = Decline(failure.code or "RM306", str(failure))
        if isinstance(failure, Deferred):
            failure.pending.then(lambda: self.refused.pop(pattern, None))
        if self.step is not None:
            self.step.refuse(flat_inputs)
        return failure

    def all_variants(self) -> list[Variant]:
        return [v for group in self.variants.values() for v in group]

    def report(self) -> EntryReport:
        """The newest variant's record; `reports` of the engine lists all."""
        variants = self.all_variants()
        if not variants:
            return EntryReport(signature=", ".join(self.spec.names), engine="native", device="")
        return variants[-1].full_report()
