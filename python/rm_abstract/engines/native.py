"""The native engine: capture with torch.export, compile with the core, gate against eager.

One engine serves one module, which it holds weakly. Torch is not touched before the first call.
"""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rm_abstract import _core
from rm_abstract.base.decline import Decline
from rm_abstract.base.entry_report import EntryReport
from rm_abstract.base.errors import CompileError, ParityError, from_core, internal
from rm_abstract.base.reasons import group_of
from rm_abstract.base.scope import disabled_var
from rm_abstract.calls.call import (
    CallSpec,
    FlatCall,
    ForwardParameters,
    call_module,
    flatten_call,
    rebuild_args,
)
from rm_abstract.calls.tensors import call_tensors
from rm_abstract.capture.errors import CaptureError
from rm_abstract.engines.artefacts import Artefacts
from rm_abstract.engines.call_parts import Pattern, snapshot
from rm_abstract.engines.call_text import call_key, containers, readable
from rm_abstract.engines.compiled_call import CompiledCall
from rm_abstract.engines.context import EngineContext
from rm_abstract.engines.derived import SharedWeights
from rm_abstract.engines.module_weights import (
    ModuleWeights,
    WeightsChanged,
    WeightVersions,
    sizes,
    ties_of,
)
from rm_abstract.engines.placement import device_of, placement_of
from rm_abstract.engines.variant import BAD_CALL, Record, Variant
from rm_abstract.guards import sources, torch_state
from rm_abstract.kv import kv_cache
from rm_abstract.verification import parity
from rm_abstract.verification.policy import Policy
from rm_abstract.verification.quantised import OnQuantisedWeights, QuantisedWeight

if TYPE_CHECKING:
    from rm_abstract.capture.export import Captured
    from rm_abstract.engines.deferrals import Deferrals

# A module that lost against the original is left alone for good when its calls are so short that
# even the router shows, or so simple that other sizes will hardly be another matter.
_SHORT_S = 50e-6
_SIMPLE_NODES = 3
# Reasons for which a capture fails that hold for the same code in every process.
_LASTING = frozenset({"RM201", "RM203", "RM207", "RM208"})


def create_engine(module: torch.nn.Module, context: EngineContext) -> NativeEngine:
    """The factory the engine registry calls."""
    return NativeEngine(module, context)


class NativeEngine:
    """Implements engines.base.Engine."""

    name = "native"
    call_type: type[CompiledCall] = CompiledCall

    def __init__(self, module: torch.nn.Module, context: EngineContext) -> None:
        self._module = weakref.ref(module)
        self._context = context
        self.events = context.events
        self.parameters = ForwardParameters.of(module)
        self.artefacts = Artefacts(context)
        self._entries: dict[CallSpec, CompiledCall] = {}
        self._stale: dict[CallSpec, CompiledCall] = {}
        self._changes = 0  # of the module that made entries useless
        self._changing, self._refreshing = threading.RLock(), threading.Lock()
        self.module_weights = ModuleWeights(self.module)
        self._shared = SharedWeights()
        self.placement = placement_of(context.device)
        self.measures = (  # programs against the original (trial.py)
            context.settings.text("when_slower") == "eager"
            and context.settings.fallback_for(group_of("RM111")) != "error"
        )
        self._ties: frozenset[tuple[str, ...]] | None = None  # when the first entry was made
        self._user_code: bool | None = None  # runs_user_code(), once it was found out
        self.policy = Policy.of(context.settings.text("verify"))
        self.unsettled: set[Hashable] = set()  # calls that did more than compute, once so far
        self._defers = context.captures is not None  # captures happen in the background
        self._background: Deferrals | None = None  # made by the first of them

    # ---- the protocol ------------------------------------------------------------------------

    def signature_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | Decline:
        call = flatten_call(self.parameters, args, kwargs)
        if isinstance(call, Decline):
            return call
        if self.placement.on_gpu:
            self.placement.check_call(device_of(self.module(), call.leaves), call.spec)
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
        self.admit(call)
        entry = self._stale.get(call.spec) or self.call_type(self, call.spec)
        change = self._changes

        def original() -> Any:
            nonlocal change
            output = run_eager()
            change = self._changes  # it may change the module: programs are made from what it left
            return output

        output = entry.first(tuple(call.leaves), original, containers(args, kwargs))
        with self._changing:
            if change == self._changes:  # else it is for a module that is another one by now
                self._stale.pop(call.spec, None)
                self._entries[call.spec] = entry
        return output

    def admit(self, call: FlatCall) -> None:
        """Raises Decline for a call that this engine never takes."""

    def entry(self, signature: Hashable) -> CompiledCall | None:
        return self._entries.get(signature)  # type: ignore[call-overload,no-any-return]

    def weights(self) -> list[tuple[dict[str, Any], str, Any]]:
        found: dict[str, tuple[dict[str, Any], str, Any]] = {}
        for variant in self._variants():
            for name in variant.record.weights:
                if name not in found:
                    owner, key = self.module_weights.owner(name)
                    found[name] = (owner, key, owner[key])
        return list(found.values())

    def invalidate(self, what: str, where: str) -> None:
        with self._changing:
            self._changes += 1
            self._invalidate(what)

    def _invalidate(self, what: str) -> None:
        entries = {**self._stale, **self._entries}
        self._entries = {}
        self._stale = {}
        self.artefacts.forget_module()
        self.placement.forget()
        self._user_code = None
        if self._background is not None:
            self._background.forget()
        ties, self._ties = self._ties, None
        if what != "weights" or ties not in (None, ties_of(self.module())):
            return
        self._ties = ties
        for spec, entry in entries.items():
            fresh = self.call_type(self, spec)
            for pattern in {*entry.variants, *entry.waiting}:
                kept = entry.variants.get(pattern, []) + entry.waiting.get(pattern, [])
                for variant in kept:  # the entry that ran it directly is gone
                    variant.end_direct()
                fresh.waiting[pattern] = kept
            self._stale[spec] = fresh

    def reports(self) -> list[EntryReport]:
        return [variant.full_report() for variant in self._variants()]

    def programs(self) -> list[tuple[str, Any]]:
        return [(variant.report.signature, variant.program) for variant in self._variants()]

    def captured(self) -> dict[str, str]:
        return {variant.report.signature: variant.record.ir for variant in self._variants()}

    def close(self) -> None:
        self._entries.clear()
        self._stale.clear()

    # ---- making variants ---------------------------------------------------------------------

    def module(self) -> torch.nn.Module:
        module = self._module()
        if module is None:
            raise Decline("RM108", "the module no longer exists")
        return module

    @contextmanager
    def on_original(self) -> Iterator[None]:
        """Nothing inside is routed: captures and gates see the user's own modules."""
        token = disabled_var.set("compiling")
        try:
            yield
        finally:
            disabled_var.reset(token)

    def cached_variant(
        self, call: FlatCall, pattern: Pattern, past: Sequence[bool]
    ) -> Variant | None:
        """The variant of this call from the cache, without capturing; None when there is none."""
        started = time.perf_counter()
        shapes = [t.shape for t in call_tensors(call)]
        key = call_key(call, pattern)
        if self._ties is None:  # every variant is looked for before it is made
            self._ties = ties_of(self.module())
            found = sources.of_module(self.module())  # takes milliseconds: once for both
            self._user_code = found.user_code
            self.artefacts.identify(self.module(), found)
        record = self.artefacts.find_record(self.module(), key, shapes, past)
        if record is None or not self.module_weights.has(record):
            return None
        variant = self._compile(record, call, past, started)
        variant.report.cache = "hit"
        variant.record.capture_ms = 0.0
        return variant

    def make_variant(self, call: FlatCall, pattern: Pattern, past: Sequence[bool]) -> Variant:
        """Captures and compiles this call, and stores both. Raises Deferred where that happens in
        the background."""
        started = time.perf_counter()
        if self._defers:
            self._deferrals().ask(self, call, pattern, call_key(call, pattern))
        record = self._record(call, pattern)
        variant = self._compile(record, call, past, started)
        self.artefacts.store_record(self.module(), call_key(call, pattern), record)
        bypass = self.artefacts.bypass or ("large constants" if record.constants else "")
        variant.report.cache = f"bypass: {bypass}" if bypass else "miss"
        return variant

    def _deferrals(self) -> Deferrals:
        from rm_abstract.engines.deferrals import Deferrals  # warm processes need none

        with self._changing:
            if self._background is None:
                self._background = Deferrals(self._context)
            return self._background

    def store(self, call: FlatCall, pattern: Pattern) -> None:
        """Captures and compiles this call for other processes; nothing here can run it."""
        record = self._record(call, pattern)
        if record.constants:
            raise Decline("RM211", "its program holds large constants, which the cache does not")
        self.artefacts.program(record.ir)
        self.artefacts.store_record(self.module(), call_key(call, pattern), record)

    def _record(self, call: FlatCall, pattern: Pattern) -> Record:
        module = self.module()
        self._ask_dynamo(call)
        captured = self._captured(module, call, call_key(call, pattern))
        try:
            ir = _core.ir.canonical(captured.ir)
        except _core.CoreError as error:
            raise from_core(error, CompileError) from error
        return Record(
            ir=ir,
            weights=captured.weights,
            output=captured.output,
            caches=captured.caches,
            kept=dict(Counter(k.op for k in captured.kept)),
            capture_ms=captured.capture_ms,
            constants=captured.constants,
            repeated=captured.repeated,
            torch_state=call.torch_state,
        )

    def raise_refusal(
        self, module: torch.nn.Module, key: str, shapes: Sequence[Sequence[int]]
    ) -> None:
        """Raises CaptureError when an earlier process could not capture this call."""
        known = self.artefacts.find_refusal(module, key, shapes)
        if known is not None:
            code, message = known
            message += " (found by an earlier capture; RM_CACHE_MODE=refresh tries again)"
            raise CaptureError(message, code=code)

    def _captured(self, module: torch.nn.Module, call: FlatCall, key: str) -> Captured:
        """Captures a call, unless an earlier process found that it cannot be captured."""
        shapes = [t.shape for t in call_tensors(call)]
        self.raise_refusal(module, key, shapes)
        from rm_abstract.capture import budget
        from rm_abstract.capture.export import capture_flat  # torch.export: 0.2 s to import

        try:
            asked = self._context.settings.fallback_for("capture") == "error"
            return capture_flat(module, call, self.parameters, budget.PATIENCE if asked else 1)
        except CaptureError as error:
            if error.code in _LASTING and not error.passing:
                self.artefacts.store_refusal(module, key, shapes, error.code, str(error))
            raise
        except (Decline, MemoryError):
            raise
        except Exception as error:  # a defect of ours fails in every process, until it is mended
            failure = internal(error, "capture")
            self.artefacts.store_refusal(module, key, shapes, failure.code, str(failure))
            raise failure from error

    def _compile(
        self, record: Record, call: FlatCall, past: Sequence[bool], started: float
    ) -> Variant:
        try:
            text, artefact, _ = self.artefacts.program(record.ir)
            weights = self.module_weights.of(record)
            program = self._program(text, weights, call, record.repeated)
            forms = [QuantisedWeight(*row) for row in _core.ir.quantised_weights(text)]
        except _core.CoreError as error:
            raise from_core(error, CompileError) from error
        variant = Variant(record, program, past, forms)
        variant.timed = not self.placement.on_gpu  # a call on a GPU returns before it is done
        variant.compares_kernels = self.policy.kernels
        self._reported(variant, readable(call), artefact, started)
        variant.report.quantised = sizes(forms, weights)
        return variant

    def _program(
        self,
        text: str,
        weights: dict[str, torch.Tensor],
        call: FlatCall,
        repeated: list[list[int]],
    ) -> Any:
        model_device = device_of(self.module(), call.leaves)
        self.placement.check(model_device)
        program = _core.Program(
            text,
            self.placement.weights(weights),
            self.artefacts.backends(),
            self._context.settings.text("force_kernel"),
            packing=self._packing(call),
            shared=self._shared.of(weights),
            repeated=repeated,
            checks=self._context.kernel_checks(),
            device=self.placement.index,
        )
        return self.placement.placed(program, model_device)

    def _reported(self, variant: Variant, signature: str, artefact: str, started: float) -> Variant:
        variant.report = EntryReport(
            signature=signature,
            engine=self.name,
            device=self._context.device.name,
            artefact=artefact,
            compile_ms=(time.perf_counter() - started) * 1e3,
            precision=self.artefacts.precision_said,
        )
        variant.until_sample = self.policy.first_sample()
        return variant

    def _packing(self, call: FlatCall) -> str:
        """Generation reads its weights where they lie: memory for one copy of them, not two.

        Those that lie across their rows (GPT-2's) would make every token several times slower.
        """
        wanted = self._context.settings.text("pack_weights")
        if wanted != "auto":
            return wanted
        cached = any(kv_cache.device_part(leaf) is not None for leaf in call.leaves)
        return "spare" if cached else "later"

    def trusted(self, variant: Variant) -> bool:
        """True when the gate passed this program on these very weights before.

        Never for a module that runs code of the user's: the verdict is about the program, and that
        this module still is what the program was made from is known by comparing only.

        Raises ParityError when it failed: the artefact is quarantined.
        """
        if self.runs_user_code():
            return False
        weights = self.module_weights.of(variant.record)
        verdict = self.artefacts.verdict(variant.report.artefact, weights)
        if verdict is None:
            return False
        variant.report.max_error = verdict.get("max_error")
        if verdict.get("passed") is not True:
            raise self._parity_error(f"{verdict.get('detail')} (stored verdict)")
        variant.report.parity = "stored verdict"
        return True

    def _ask_dynamo(self, call: FlatCall) -> None:
        """Raises Decline where dynamo sees a user's forward read what the guard does not watch."""
        if not self.runs_user_code() or not all(isinstance(x, torch.Tensor) for x in call.leaves):
            return
        from rm_abstract.guards import oracle

        module = self.module()
        args, kwargs = rebuild_args(call.spec, call.leaves, self.parameters.positional)
        missing = oracle.uncovered(module, args, kwargs, sources.of_module(module))
        if missing:
            raise Decline("RM210", f"{missing}, which torch's dynamo sees it read")

    def runs_user_code(self) -> bool:
        """Whether forward reaches a class or function that no installed package's version names."""
        if self._user_code is None:
            self._user_code = sources.of_module(self.module()).user_code
        return self._user_code

    def refresh(self, variant: Variant) -> bool:
        """Gives a variant the weights the module has now; False when they are of other types."""
        try:
            # One at a time: weights read earlier than another thread's never replace those.
            with self._refreshing:
                weights = self.module_weights.of(variant.record)
                variant.program.update_weights(
                    self.placement.weights(weights), self._shared.of(weights)
                )
        except _core.CoreError as error:
            if error.code in BAD_CALL:
                return False
            raise from_core(error, CompileError) from error
        return True

    @property
    def quantises(self) -> bool:
        """True when programs are made with weights of fewer bits than the module's."""
        return self.artefacts.weight_bits > 0

    def on_quantised_weights(self, variant: Variant, call: FlatCall) -> Any:
        """What the original gives for `call`, and its caches, on the weights the program has.

        The caches of `call` are written; nothing else is.
        """
        weights = self.module_weights.of(variant.record)
        positional = self.parameters.positional
        with (
            torch.no_grad(),
            self.on_original(),
            OnQuantisedWeights(weights, variant.quantised),
        ):
            output = call_module(self.module()._call_impl, call.spec, list(call.leaves), positional)
        return output, _caches(call)

    def gate(
        self,
        variant: Variant,
        call: FlatCall,
        tensors: list[torch.Tensor],
        expected: Any,
        comparable: Callable[[Any], Any],
        versions: WeightVersions,
    ) -> None:
        """`compare` for a new variant. Raises ParityError when it differs; stores the verdict.

        `versions` are the weights' before anything read them. A difference behind a change of them
        is no verdict: raises WeightsChanged.
        """
        verdict = self.compare(variant, call, tensors, expected, comparable)
        self._note(variant, variant.report.artefact, verdict, versions)
        if not verdict.passed:
            raise self._parity_error(verdict.detail)
        self.accept_kernels(variant, tensors, verdict)

    def compare(
        self,
        variant: Variant,
        call: FlatCall,
        tensors: list[torch.Tensor],
        expected: Any,
        comparable: Callable[[Any], Any] = lambda value: value,
    ) -> parity.Verdict:
        """Runs the variant on the call `expected` came from and compares.

        What a quantised variant is expected to give comes from `on_quantised_weights`: rounding
        weights may change outputs a lot, a right program differs from eager on the rounded weights
        as little as any other does. Where it rounds activations to 8 bits, that is asked of the
        same program on the same quantised weights without that rounding, and the variant must be as
        near to it as rounding allows. `comparable` takes out what may differ: values nothing ever
        reads.
        """
        bits = 16
        try:
            exact = self._keeping_activations(variant, call)
            if exact is not None:
                trial = snapshot(call.spec, tuple(call.leaves))
                output = exact.run(call_tensors(trial), trial.leaves)
                verdict = self._verdict(
                    exact, trial, tensors, comparable(expected), output, comparable
                )
                if not verdict.passed:
                    return verdict
                expected, bits = (output, _caches(trial)), 8
            output = variant.run(tensors, call.leaves)
        except _core.CoreError as error:
            raise from_core(error, CompileError) from error
        return self._verdict(variant, call, tensors, comparable(expected), output, comparable, bits)

    # ---- comparing later calls ----------------------------------------------------------------

    def accept_kernels(
        self, variant: Variant, tensors: list[torch.Tensor], verdict: parity.Verdict
    ) -> None:
        """Kernels whose results were compared just now may serve, here and in later processes."""
        variant.report.compared += 1
        if not variant.compares_kernels:
            return
        program: Any = variant.program
        kernels = program.kernel_set(tensors)
        program.accept_kernels(kernels)
        self.artefacts.store_kernels(variant.report.artefact, kernels, verdict)

    def kernels_compared(self, variant: Variant, kernels: int) -> bool:
        if not self.artefacts.kernels_passed(variant.report.artefact, kernels):
            return False
        program: Any = variant.program
        program.accept_kernels(kernels)
        return True

    def quarantine(self, variant: Variant, detail: str) -> ParityError:
        variant.report.parity = f"failed: {detail}"
        self.artefacts.quarantine(
            variant.report.artefact, self.module_weights.of(variant.record), detail
        )
        return self._parity_error(detail, "RM502")

    def versions_of(self, variant: Variant) -> WeightVersions:
        return WeightVersions(self.module_weights.of(variant.record).values())

    def module_versions(self) -> WeightVersions:
        module = self.module()
        return WeightVersions([*module.parameters(), *module.buffers()])

    @property
    def on_gpu(self) -> bool:
        return self.placement.on_gpu

    def wait(self) -> None:
        self.placement.wait()

    def read_weights_anew(self) -> bool:
        self.placement.forget()
        return all([self.refresh(variant) for variant in self._variants()])

    def _keeping_activations(self, variant: Variant, call: FlatCall) -> Variant | None:
        """The variant without rounding activations to 8 bits; None when it does not round them."""
        if not variant.quantised:
            return None
        text, _, _ = self.artefacts.program(variant.record.ir)
        kept = _core.ir.keep_activations(text)
        if kept == text:
            return None
        exact = copy.copy(variant)
        exact.program = self._program(
            kept, self.module_weights.of(variant.record), call, variant.record.repeated
        )
        exact.direct = None
        exact.report = EntryReport(signature="", engine=self.name, device=self._context.device.name)
        return exact

    def _verdict(
        self,
        variant: Variant,
        call: FlatCall,
        tensors: list[torch.Tensor],
        expected: Any,
        output: Any,
        comparable: Callable[[Any], Any],
        activation_bits: int = 16,
    ) -> parity.Verdict:
        """What the run that gave `output` and left the caches of `call` is worth."""
        precision = self.working_precision(variant.record, tensors)
        if precision is torch.float32 and variant.record.torch_state.get(torch_state.TF32):
            precision = torch.float16  # products of as many bits, here and in the original
        return parity.compare(
            expected,
            comparable((output, _caches(call))),
            precision,
            activation_bits if variant.quantised else 0,
        )

    def _note(
        self, variant: Variant, artefact: str, verdict: parity.Verdict, versions: WeightVersions
    ) -> None:
        """Stores a verdict and says it in the report; the gate's runs are no calls."""
        if not verdict.passed and versions != self.module_versions():
            raise WeightsChanged
        variant.report.calls = 0
        variant.report.max_error = verdict.max_error
        variant.report.parity = "passed" if verdict.passed else f"failed: {verdict.detail}"
        variant.report.artefact = artefact
        if not self.runs_user_code():  # another verdict is never asked for
            self.artefacts.store_verdict(artefact, self.module_weights.of(variant.record), verdict)

    def working_precision(self, record: Record, tensors: list[torch.Tensor]) -> torch.dtype:
        """The lowest one the model computes in."""
        weights = [t for t in self.module_weights.of(record).values() if t.is_floating_point()]
        return parity.working_precision([*weights, *tensors])

    def _parity_error(self, detail: str, code: str = "RM501") -> ParityError:
        return ParityError(
            f"[parity] expected {type(self.module()).__name__} compiled to match eager, got "
            f"{detail}; try RM_DUMP_IR to inspect the program, or report it",
            code=code,
        )

    def slower(self, variant: Variant, eager_s: float) -> None:
        """A program lost against the original."""
        if len(self._variants()) > 1:
            return
        if eager_s > _SHORT_S and variant.full_report().nodes > _SIMPLE_NODES:
            return
        self.events.detach()

    # ---- weights -----------------------------------------------------------------------------

    def _variants(self) -> list[Variant]:
        return [v for entry in self._entries.values() for v in entry.all_variants()]


def _caches(call: FlatCall) -> list[Any]:
    return [leaf for leaf in call.leaves if not isinstance(leaf, torch.Tensor)]
