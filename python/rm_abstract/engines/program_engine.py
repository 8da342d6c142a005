"""The engine of all compilers of programs: captures calls, keeps records, serves by what passed.

What makes the programs is a `compiler.ProgramCompiler`, what decides about them its gate. One
engine serves one module, which it holds weakly. Torch is not touched before the first call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rm_abstract import _core
from rm_abstract.base.decline import Decline
from rm_abstract.base.entry_report import EntryReport
from rm_abstract.base.errors import CompileError, from_core
from rm_abstract.base.reasons import group_of
from rm_abstract.calls.call import CallSpec, FlatCall, flatten_call
from rm_abstract.calls.tensors import call_tensors
from rm_abstract.engines.base import MOST_EARLIER
from rm_abstract.engines.call_parts import Pattern
from rm_abstract.engines.call_text import call_key, containers
from rm_abstract.engines.capturer import Capturer
from rm_abstract.engines.compiled_call import CompiledCall
from rm_abstract.engines.compiler import ProgramCompiler
from rm_abstract.engines.engine_module import EngineModule
from rm_abstract.engines.module_weights import WeightVersions, kinds_of
from rm_abstract.engines.placement import device_of
from rm_abstract.engines.variant import BAD_CALL, Record, Variant
from rm_abstract.engines.weight_digests import digest_of
from rm_abstract.verification.policy import Policy

if TYPE_CHECKING:
    from rm_abstract.engines.deferrals import Deferrals

# A module that lost against the original is left alone for good when its calls are so short that
# even the router shows, or so simple that other sizes will hardly be another matter.
_SHORT_S = 50e-6
_SIMPLE_NODES = 3


@dataclass(frozen=True)
class _Aside:
    """What is compiled for another state of the module than the present one."""

    entries: dict[CallSpec, CompiledCall]
    stale: dict[CallSpec, CompiledCall]
    known: tuple[Any, ...]  # EngineModule.known
    identity: str


class ProgramEngine:
    """Implements base.Engine, base.Keeping, base.Traceable and specializer.Specializer."""

    def __init__(self, module: EngineModule, compiler: ProgramCompiler) -> None:
        self._own, self.compiler = module, compiler
        settings = module.context.settings
        self.name = compiler.name
        self.gate = compiler.gate
        self.module, self.on_original = module.get, module.on_original
        self.parameters, self.artefacts = module.parameters, module.artefacts
        self.events = module.context.events
        self.policy = Policy.of(settings.text("verify"))
        self.measures = (
            compiler.uses_core
            and settings.text("when_slower") == "eager"
            and settings.fallback_for(group_of("RM111")) != "error"
        )
        self._compares_contents = settings.text("guard") == "strict"
        self.unsettled: set[Hashable] = set()
        self._capturer = Capturer(module)
        self._defers = compiler.uses_core and module.context.captures is not None
        self._deferrals: Deferrals | None = None  # made for the first capture in the background
        self._entries: dict[CallSpec, CompiledCall] = {}
        self._stale: dict[CallSpec, CompiledCall] = {}
        self._earlier: dict[str, dict[CallSpec, CompiledCall]] = {}  # by the module's identity then
        self._aside: dict[int, _Aside] = {}  # states of the module whose guards are kept
        self._changes = 0  # of the module that made entries useless
        self._changing, self._refreshing = threading.RLock(), threading.Lock()

    # ---- the engine --------------------------------------------------------------------------

    def signature_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | Decline:
        call = flatten_call(self.parameters, args, kwargs)
        if isinstance(call, Decline):
            return call
        placement = self._own.placement
        if placement.on_gpu:
            placement.check_call(device_of(self.module(), call.leaves), call.spec)
        return call.spec

    def flatten(self, kwargs: dict[str, Any]) -> FlatCall | Decline:
        """A call by keywords, taken apart."""
        return flatten_call(self.parameters, (), kwargs)

    def first_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], run_eager: Callable[[], Any]
    ) -> Any:
        call = flatten_call(self.parameters, args, kwargs)
        if isinstance(call, Decline):
            raise call
        self.compiler.admit(call)
        self._take_up_earlier()
        entry = self._stale.get(call.spec) or self.compiler.new_call(self, call.spec)
        change = self._changes

        def original() -> Any:
            nonlocal change
            output = run_eager()
            change = self._changes  # it may change the module: programs are made from what it left
            return output

        try:
            output = entry.first(tuple(call.leaves), original, containers(args, kwargs))
        finally:
            self.artefacts.digests.forget()
        with self._changing:
            if change == self._changes:  # else it is for a module that is another one by now
                self._stale.pop(call.spec, None)
                self._entries[call.spec] = entry
        return output

    def entry(self, signature: Hashable) -> CompiledCall | None:
        return self._entries.get(signature)  # type: ignore[call-overload,no-any-return]

    def weights(self) -> list[tuple[dict[str, Any], str, Any]]:
        found: dict[str, tuple[dict[str, Any], str, Any]] = {}
        for variant in self.variants():
            for name in variant.record.weights:
                if name not in found:
                    owner, key = self._own.weights.owner(name)
                    found[name] = (owner, key, owner[key])
        return list(found.values())

    def invalidate(self, what: str, where: str) -> None:
        with self._changing:
            self._changes += 1
            entries = {**self._stale, **self._entries}
            self._entries, self._stale = {}, {}
            if self._deferrals is not None:
                self._deferrals.forget()
            identity = self.artefacts.identity
            stands = self._own.changed(what)
            if not entries or not (stands or identity):
                return
            waiting = {spec: self._waiting(spec, e) for spec, e in entries.items()}
            if stands:
                self._stale = waiting
                return
            self._earlier.pop(identity, None)
            self._earlier[identity] = waiting
            while len(self._earlier) > MOST_EARLIER:
                del self._earlier[next(iter(self._earlier))]

    def set_aside(self, number: int) -> bool:
        if self._compares_contents:  # in part at each check: no guard holds that was not asked
            return False
        with self._changing:
            if not self._entries and not self._stale:
                return False
            aside = _Aside(self._entries, self._stale, self._own.known, self.artefacts.identity)
            self._changes += 1
            self._aside[number] = aside
            self._entries, self._stale = {}, {}
            if self._deferrals is not None:
                self._deferrals.forget()
            self._own.changed("structure")
        return True

    def take_back(self, number: int, present: int) -> bool:
        with self._changing:
            aside = self._aside.pop(number, None)
            if aside is None:
                return False
            if not self.set_aside(present):  # nothing is compiled for the present state
                self._changes += 1
                self._own.changed("structure")
            self._entries, self._stale = aside.entries, aside.stale
            self._own.known = aside.known
        return True

    def forget_aside(self, number: int) -> None:
        self._aside.pop(number, None)

    def _take_up_earlier(self) -> None:
        """What was compiled for the module when it last was what it is now waits for a call, though
        its guard does not hold: weights were written since (decision 0242)."""
        if not self._earlier and not self._aside:
            return
        with self._changing:
            self._own.identify()
            identity = self.artefacts.identity
            self._stale.update(self._earlier.pop(identity, {}))
            alike = [
                n for n, aside in self._aside.items() if identity and aside.identity == identity
            ]
            for aside in map(self._aside.pop, alike):
                entries = {**aside.stale, **aside.entries}
                self._stale.update({spec: self._waiting(spec, e) for spec, e in entries.items()})

    def _waiting(self, spec: CallSpec, entry: CompiledCall) -> CompiledCall:
        """An entry whose variants wait for new weights."""
        fresh = self.compiler.new_call(self, spec)
        for pattern in {*entry.variants, *entry.waiting}:
            kept = entry.variants.get(pattern, []) + entry.waiting.get(pattern, [])
            for variant in kept:  # the entry that ran it directly is gone
                variant.end_direct()
            fresh.waiting[pattern] = kept
        return fresh

    def reports(self) -> list[EntryReport]:
        return [variant.full_report() for variant in self.variants()]

    def programs(self) -> list[tuple[str, Any]]:
        """None of a compiler whose programs have no steps of ours."""
        if not self.compiler.uses_core:
            return []
        return [(variant.report.signature, variant.program) for variant in self.variants()]

    def captured(self) -> dict[str, str]:
        return {variant.report.signature: variant.record.ir for variant in self.variants()}

    def variants(self) -> list[Variant]:
        return [v for entry in self._entries.values() for v in entry.all_variants()]

    def close(self) -> None:
        self._entries.clear()
        self._stale.clear()
        self._earlier.clear()
        self._aside.clear()

    # ---- making variants ---------------------------------------------------------------------

    def cached_variant(
        self, call: FlatCall, pattern: Pattern, past: Sequence[bool]
    ) -> Variant | None:
        started = time.perf_counter()
        self._own.identify()  # every variant is looked for before it is made
        key = call_key(call, pattern)
        record = self.artefacts.find_record(self.module(), key, call_tensors(call), past)
        if record is None or not self._own.weights.has(record):
            return None
        variant = self._compile(record, call, past, started)
        variant.report.cache = variant.report.cache or "hit"
        variant.record.capture_ms = 0.0
        return variant

    def make_variant(
        self, call: FlatCall, pattern: Pattern, past: Sequence[bool], whole: bool = False
    ) -> Variant:
        """Captures and compiles this call, and stores both; a record with layers that were not
        traced when it has `passed`. Raises Deferred where that happens in the background."""
        started = time.perf_counter()
        key = call_key(call, pattern)
        if self._defers:
            self._in_background().defer(call, pattern, key)
        record = self._capturer.record(call, pattern, whole)
        variant = self._compile(record, call, past, started)
        if not record.extended:
            self.artefacts.store_record(self.module(), key, record)
        bypass = self.artefacts.bypass or ("large constants" if record.constants else "")
        if bypass:
            variant.report.cache = f"bypass: {bypass}"
        variant.report.cache = variant.report.cache or "miss"
        return variant

    def passed(self, variant: Variant, call: FlatCall, pattern: Pattern) -> None:
        if variant.record.extended:
            self.artefacts.store_record(self.module(), call_key(call, pattern), variant.record)

    def store(self, call: FlatCall, pattern: Pattern) -> None:
        """Captures and compiles this call for other processes; nothing here can run it."""
        record = self._capturer.record(call, pattern, whole=True)  # nothing compares it here
        if record.constants:
            raise Decline("RM211", "its program holds large constants, which the cache does not")
        self.artefacts.program(record.ir)
        self.artefacts.store_record(self.module(), call_key(call, pattern), record)

    def _compile(
        self, record: Record, call: FlatCall, past: Sequence[bool], started: float
    ) -> Variant:
        variant = self.compiler.compile(record, call, past)
        variant.report.engine = self.name
        variant.report.device = self._own.context.device.name
        variant.report.compile_ms = (time.perf_counter() - started) * 1e3
        variant.until_sample = self.policy.first_sample()
        return variant

    def _in_background(self) -> Deferrals:
        from rm_abstract.engines.deferrals import Deferrals  # warm processes need none

        with self._changing:
            if self._deferrals is None:
                self._deferrals = Deferrals(self._own, self._capturer)
            return self._deferrals

    # ---- what a compiled call asks -----------------------------------------------------------

    @property
    def changes(self) -> int:
        return self._changes

    @property
    def quantises(self) -> bool:
        return self.artefacts.weight_bits > 0

    @property
    def on_gpu(self) -> bool:
        return self._own.placement.on_gpu

    def wait(self) -> None:
        self._own.placement.wait()

    def runs_user_code(self) -> bool:
        return self._own.runs_user_code()

    def module_versions(self) -> WeightVersions:
        return self._own.versions()

    def versions_of(self, variant: Variant) -> WeightVersions:
        return WeightVersions(self._own.weights.of(variant.record).values())

    def standing_of(self, variant: Variant) -> object:
        if self.runs_user_code():  # which may ask whether one tensor is another
            return None
        if self._compares_contents:  # what they find is in no version
            return None
        try:
            beside = [digest_of(t) for t in self._own.weights.beside(variant.record)]
            return self.versions_of(variant), beside, kinds_of(self.module())
        except (CompileError, AttributeError):  # a weight is gone
            return None

    def refresh(self, variant: Variant) -> bool:
        try:
            # One at a time: weights read earlier than another thread's never replace those.
            with self._refreshing:
                weights = self._own.weights.of(variant.record)
                variant.program.update_weights(
                    self._own.placement.weights(weights), self._own.shared.of(weights)
                )
        except _core.CoreError as error:
            if error.code in BAD_CALL:
                return False
            raise from_core(error, CompileError) from error
        return True

    def read_weights_anew(self) -> bool:
        self._own.forget_weights()
        return all([self.refresh(variant) for variant in self.variants()])

    def slower(self, variant: Variant, eager_s: float) -> None:
        if len(self.variants()) > 1:
            return
        if eager_s > _SHORT_S and variant.full_report().nodes > _SIMPLE_NODES:
            return
        self.events.detach()
