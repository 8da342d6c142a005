"""One call structure of a module (a router key) and its compiled variants.

The router tells calls apart by structure only; sizes 0 and 1, an empty or a filled cache, and sizes
that break a capture's guards make further variants, compiled on their first call like the first.
A variant serves only after it gave what the original gave.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from rm_abstract import _core
from rm_abstract.base.decline import Decline, Deferred
from rm_abstract.base.entry_report import EntryReport
from rm_abstract.base.errors import CompileError, Error, ParityError, from_core, internal
from rm_abstract.calls.call import CallSpec, FlatCall, ForwardParameters, call_module, rebuild_args
from rm_abstract.calls.step_call import StepCall
from rm_abstract.calls.tensors import call_tensors
from rm_abstract.capture import output_classes
from rm_abstract.engines.context import Events
from rm_abstract.engines.trial import Trial
from rm_abstract.engines.variant import Variant
from rm_abstract.guards import torch_state
from rm_abstract.guards.purity import Effects, can_watch
from rm_abstract.kv import kv_cache
from rm_abstract.verification.parity import Verdict
from rm_abstract.verification.policy import Policy

MOST_DIFFERENCES = 1  # in a row, after which a program is not used any more
MAX_VARIANTS = 8  # captures of one call structure and size pattern

Pattern = tuple[Any, ...]


def unfold(
    leaves: tuple[Any, ...], read: Callable[[Any], Any] = kv_cache.read
) -> tuple[list[torch.Tensor], Pattern, list[bool]]:
    """The IR's inputs of a call, what torch specialises on, and which inputs are a cache's past.

    Images with channels last are another pattern: outputs follow them in memory.

    Raises Decline for a cache that cannot be read as tensors.
    """
    tensors: list[torch.Tensor] = []
    pattern: list[Any] = []
    marks: list[bool] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            marks.append(False)
            sizes: Pattern = tuple([d if d < 2 else 2 for d in leaf.shape])
            if leaf.dim() == 4 and not leaf.is_contiguous():
                sizes += (leaf.is_contiguous(memory_format=torch.channels_last),)
            pattern.append(sizes)
            continue
        held = read(leaf)
        if isinstance(held, Decline):
            raise held
        marks[len(tensors) :] = kv_cache.past_marks(leaf, held)
        tensors += held
        pattern.append(kv_cache.size_pattern(leaf, held))
    return tensors, tuple(pattern), marks


def snapshot(spec: CallSpec, leaves: tuple[Any, ...]) -> FlatCall:
    """The call as it is now: caches copied by reference, so that running it moves nothing."""
    copies = [leaf if isinstance(leaf, torch.Tensor) else kv_cache.copied(leaf) for leaf in leaves]
    return FlatCall(spec, copies)


def _all(value: Any) -> Any:
    return value


def wants_gradients(output: Any) -> bool:
    """Whether a tensor of an output requires gradients: a program's never do."""
    if isinstance(output, torch.Tensor):
        return output.requires_grad
    if isinstance(output, dict):
        return any(map(wants_gradients, output.values()))
    if isinstance(output, (list, tuple)):
        return any(map(wants_gradients, output))
    parts = output_classes.take(output)
    return parts is not None and any(map(wants_gradients, parts.children))


def reported(error: Exception) -> Error | Decline:
    """An exception of ours as policy and report know it; another one becomes RM306."""
    if isinstance(error, (Error, Decline)):
        return error
    if isinstance(error, _core.CoreError):
        return from_core(error, CompileError)
    return internal(error, "compile")


class Specializer(Protocol):
    """What a compiled call needs of its engine: captures, programs and the gate of one module."""

    events: Events
    parameters: ForwardParameters
    measures: bool  # programs are timed against the original
    unsettled: set[Hashable]  # calls that did more than compute, once so far

    def module(self) -> torch.nn.Module:
        """Raises Decline when it no longer exists."""

    def module_stamp(self) -> Hashable:
        """Another one after a write to any weight of the module that anything shows."""

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

    def weights_stamp(self, variant: Variant) -> Hashable:
        """Another one after a write to the variant's weights that anything shows."""

    @property
    def away(self) -> bool:
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
        comparable: Callable[[Any], Any] = ...,
    ) -> None:
        """Compares a run with what the original gave. Raises ParityError."""

    def on_quantised_weights(self, variant: Variant, call: FlatCall) -> Any:
        """What the original gives on the weights the program has."""

    def slower(self, variant: Variant, eager_s: float) -> None:
        """A program lost against the original."""


class CompiledCall:
    """The entry bound into the router."""

    max_variants = MAX_VARIANTS
    reads = staticmethod(kv_cache.read)  # how a call looks at its caches

    def __init__(self, engine: Specializer, spec: CallSpec) -> None:
        self._engine = engine
        self.spec = spec
        self._step = StepCall.of(spec)
        self.variants: dict[Pattern, list[Variant]] = {}
        self.refused: dict[Pattern, Decline] = {}
        self.waiting: dict[Pattern, list[Variant]] = {}  # compiled for weights that have changed
        self._lock = threading.Lock()

    def run(self, flat_inputs: tuple[Any, ...]) -> Any:
        """Serves a call; a size pattern seen for the first time is compiled and served by eager."""
        leaves = self._step.prepare(flat_inputs) if self._step else flat_inputs
        tensors, pattern, _ = unfold(leaves, self.reads)
        for variant in self.variants.get(pattern, ()):
            if variant.takes(tensors):
                variant.until_sample -= 1
                if variant.until_sample < 0:
                    return self._compared(variant, pattern, flat_inputs)
                trial = variant.trial
                if trial is None:
                    return self._run(variant, pattern, tensors, flat_inputs)
                self._try(variant, trial, tensors, flat_inputs)
                return trial.in_turn(
                    tensors,
                    lambda: self._run(variant, pattern, tensors, flat_inputs),  # noqa: B023
                    self._original(flat_inputs),
                    self._engine.events.served_by_original,
                )
        return self._next(pattern, flat_inputs)

    def _run(
        self,
        variant: Variant,
        pattern: Pattern,
        tensors: list[torch.Tensor],
        flat_inputs: tuple[Any, ...],
    ) -> Any:
        """The program's output; kernels that were never compared are, on this very call."""
        try:
            return variant.run(tensors, flat_inputs, True)
        except _core.NewKernels as new:
            kernels = int(new.args[0])
        if self._engine.kernels_compared(variant, kernels):
            return variant.run(tensors, flat_inputs)
        return self._compared(variant, pattern, flat_inputs)

    def _compared(self, variant: Variant, pattern: Pattern, flat_inputs: tuple[Any, ...]) -> Any:
        """The original serves this call; the program runs it on copies and is compared.

        A difference may come from weights that changed unseen: the program reads them anew, and the
        next call is compared too. If that differs again the program is not used any more.
        """
        engine, started = self._engine, time.perf_counter()
        leaves = self._step.prepare(flat_inputs) if self._step else flat_inputs
        call = snapshot(self.spec, leaves)
        again = snapshot(self.spec, flat_inputs) if variant.quantised else None
        shown = call_tensors(call)
        comparable = self._step.comparable(leaves) if self._step else _all
        stamp = engine.weights_stamp(variant)
        with engine.on_original():
            output = self._original(flat_inputs)()
        engine.events.served_by_original()
        eager_s = time.perf_counter() - started
        if self._step and self._step.reshaped(flat_inputs, call.leaves):
            shown, _, _ = unfold(tuple(call.leaves), self.reads)
        if not variant.takes(shown):
            return output
        calls = variant.report.calls
        try:
            after = [leaf for leaf in flat_inputs if not isinstance(leaf, torch.Tensor)]
            expected = (output, after)
            if again is not None:
                expected = engine.on_quantised_weights(variant, again)
            verdict = engine.compare(variant, call, shown, expected, comparable)
        except Decline:
            return output  # this call is none for the program
        except Exception as error:
            self._remove(variant, pattern)
            engine.events.failed(self._refuse(error, pattern, flat_inputs))
            return output
        finally:
            variant.report.calls = calls
        if stamp != engine.weights_stamp(variant):
            return output  # another thread changes the weights: nothing was compared
        if verdict.passed:
            if variant.differed:
                variant.differed = 0
                engine.events.failed(Decline("RM504", "found when a call was compared"))
            took = time.perf_counter() - started
            # The best of its first calls: in this one the program ran on copies, under a watch.
            usual = eager_s if variant.best_s is None else variant.best_s
            variant.until_sample = engine.policy.next_sample(usual, took)
            engine.accept_kernels(variant, shown, verdict)
        elif variant.differed < MOST_DIFFERENCES and engine.read_weights_anew():
            variant.differed += 1
            variant.until_sample = 0
        else:
            self._withdraw(variant, pattern, verdict.detail)
        return output

    def _withdraw(self, variant: Variant, pattern: Pattern, detail: str) -> None:
        """The program gave something else than the original: nobody uses it again."""
        self._remove(variant, pattern)
        self.refused[pattern] = Decline("RM502", detail)
        self._engine.events.failed(self._engine.quarantine(variant, detail))

    def _remove(self, variant: Variant, pattern: Pattern) -> None:
        found = self.variants.get(pattern, [])
        if variant in found:  # another thread may have been faster
            found.remove(variant)

    def _try(
        self,
        variant: Variant,
        trial: Trial,
        tensors: list[torch.Tensor],
        flat_inputs: tuple[Any, ...],
    ) -> None:
        """Raises Decline where the original is faster."""
        if trial.running:
            return
        engine, calls = self._engine, variant.report.calls

        def both() -> tuple[Callable[[], Any], Callable[[], Any]]:
            module: Any = engine.module()
            args, kwargs = rebuild_args(self.spec, flat_inputs, engine.parameters.positional)
            return lambda: module(*args, **kwargs), lambda: module._call_impl(*args, **kwargs)

        slower = trial.verdict(tensors, both)
        if variant.report.calls != calls:  # measured just now: these were no calls of the user's
            engine.events.uncount(variant.report.calls - calls)
            variant.report.calls = calls
        if trial.won:
            variant.trial, variant.measured = None, trial.best
        elif slower:
            engine.slower(variant, trial.eager_s)
            raise Decline("RM111", slower)

    def decode_step(
        self, leaves: Sequence[Any]
    ) -> tuple[Variant, list[torch.Tensor], dict[str, int]] | None:
        """The program that serves this generation step, its tensors, and which of them is what
        (StepCall.roles); None when there is none, or none that the core's loop can run."""
        if self._step is None:
            return None
        prepared = self._step.prepare(leaves)
        tensors, pattern, _ = unfold(prepared)
        for variant in self.variants.get(pattern, ()):
            if variant.takes(tensors):
                return variant, tensors, self._step.roles(prepared)
        return None

    def _next(self, pattern: Pattern, flat_inputs: tuple[Any, ...]) -> Any:
        if pattern in self.refused:
            raise self.refused[pattern]
        with self._engine.on_original():
            return self._first(flat_inputs, self._original(flat_inputs), raises=False)

    def _original(self, flat_inputs: tuple[Any, ...]) -> Callable[[], Any]:
        """The module's own forward on the arguments of this call."""
        module, names = self._engine.module(), self._engine.parameters.positional
        return lambda: call_module(module._call_impl, self.spec, list(flat_inputs), names)

    def first(
        self,
        flat_inputs: tuple[Any, ...],
        run_eager: Callable[[], Any],
        containers: Sequence[tuple[str, Any]] = (),
    ) -> Any:
        """Serves the first call of a kind; raises what `_first` does with `raises`."""
        return self._first(self._complete(flat_inputs), run_eager, True, containers)

    def _complete(self, flat_inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The call's leaves as `_first` takes them."""
        return flat_inputs

    def _first(
        self,
        flat_inputs: tuple[Any, ...],
        run_eager: Callable[[], Any],
        raises: bool,
        containers: Sequence[tuple[str, Any]] = (),
    ) -> Any:
        """Compiles and gates the variant for this call; returns the original's output.

        With `raises` an error of ours propagates (after `run_eager` ran), else it is reported and
        the pattern stays eager: the call was served already and must not be replayed.
        """
        if not self._lock.acquire(blocking=False):
            raise Decline("RM112", "another thread compiles this call")
        try:
            leaves = self._step.prepare(flat_inputs) if self._step else flat_inputs
            tensors, pattern, past = unfold(leaves, self.reads)
            found = self.variants.setdefault(pattern, [])
            if any(v.takes(tensors) for v in found):
                return run_eager()  # another thread was faster
            if len(found) >= self.max_variants:
                raise Decline("RM115", f"more than {self.max_variants} captures of one call")
            before = snapshot(self.spec, leaves)
            again = snapshot(self.spec, flat_inputs) if self._engine.quantises else None
            known = None
            if not self.waiting.get(pattern):
                known = self._known(flat_inputs, before, pattern, past, raises)
                if known is not None and not known.takes(tensors):
                    known = None
            settled = known is not None and known.report.parity
            if not settled and self._engine.runs_user_code() and not can_watch():
                why = "a profiler is on: what the forward does cannot be watched"
                raise Decline("RM210", why)
            if known is not None and known.report.parity:
                found.append(known)
                self._on_trial(known)
                return self._run(known, pattern, tensors, flat_inputs)
            spare = None  # for a second comparison, when the first was with a stranger's program
            if known is not None and again is None and self._engine.runs_user_code():
                spare = snapshot(self.spec, leaves)
            shown = call_tensors(before)
            comparable = self._step.comparable(leaves) if self._step else _all
            moved = self._engine.module_stamp()
            started = time.perf_counter()
            with Effects(self._engine.module(), containers) as effects:
                output = run_eager()
                self._engine.wait()
            eager_s = time.perf_counter() - started
            if not raises:  # called by an entry, whose calls count as routed
                self._engine.events.served_by_original()
            if effects.found or wants_gradients(output):
                return self._impure(effects, pattern, output, raises)
            before.asked = torch_state.answers(effects.asked, tensors)
            if spare is not None:
                spare.asked = before.asked
            if question := torch_state.not_as_captured(before.asked):
                why = f"reads {torch_state.told(question)}"
                return self._left(why, pattern, output, raises, "RM209")
            after = [leaf for leaf in flat_inputs if not isinstance(leaf, torch.Tensor)]
            try:
                if self._step and self._step.reshaped(flat_inputs, before.leaves):
                    tensors, pattern, past = unfold(tuple(before.leaves))
                    found, shown = self.variants.setdefault(pattern, []), tensors
                    known = spare = None
                variant = self._refreshed(pattern, tensors) or known
                variant = variant or self._engine.make_variant(before, pattern, past)
                expected = (output, after)
                if again is not None and variant.quantised:
                    expected = self._engine.on_quantised_weights(variant, again)
                try:
                    self._engine.gate(variant, before, shown, expected, comparable)
                except ParityError as error:
                    if moved != self._engine.module_stamp():
                        why = "the weights changed while the program was compared"
                        raise Decline("RM107", why) from error
                    if spare is None or variant is not known:
                        raise
                    # A record of the cache that is not this module's: something decides that no
                    # record names.
                    variant = self._engine.make_variant(spare, pattern, past)
                    self._engine.gate(variant, spare, call_tensors(spare), expected, comparable)
            except Exception as error:  # the call was served: whatever we did wrong, it stays so
                failure = self._refuse(error, pattern, flat_inputs)
                if raises:
                    raise failure from error
                self._engine.events.failed(failure)
                return output
            variant.eager_s = eager_s
            found.append(variant)
            self._on_trial(variant)
            return output
        finally:
            self._lock.release()

    def _refuse(
        self, error: Exception, pattern: Pattern, flat_inputs: tuple[Any, ...]
    ) -> Error | Decline:
        """The pattern stays eager for `error`, which comes back as policy and report know it."""
        failure = reported(error)
        self.refused[pattern] = Decline(failure.code or "RM306", str(failure))
        if isinstance(failure, Deferred):
            failure.pending.then(lambda: self.refused.pop(pattern, None))
        if self._step is not None:
            self._step.refuse(flat_inputs)
        return failure

    def _on_trial(self, variant: Variant) -> None:
        """A program that may be slower than the original: measured when it has served some."""
        plain = all(s[0] not in ("cache", "bundle") for s in self.spec.specs)
        if plain and self._step is None and self._engine.measures and not variant.quantised:
            variant.trial = Trial(self._engine.wait if self._engine.away else None)

    def _refreshed(self, pattern: Pattern, tensors: list[torch.Tensor]) -> Variant | None:
        """A variant compiled for earlier weights that takes the ones the module has now."""
        waiting = self.waiting.get(pattern, [])
        for variant in [v for v in waiting if v.takes(tensors)]:
            waiting.remove(variant)
            if self._engine.refresh(variant):
                return variant
        return None

    def _impure(self, effects: Effects, pattern: Pattern, output: Any, raises: bool) -> Any:
        """A program would not do what this forward does: seen for sure or twice, it stays eager."""
        seen, this = self._engine.unsettled, (self.spec, pattern)
        if effects.found and effects.settles and this not in seen:
            seen.add(this)  # changed state is a change of the module: the entry may be another then
            return output
        if effects.found:
            return self._left(effects.found, pattern, output, raises, effects.code)
        why = "an output requires gradients although they are disabled"
        return self._left(why, pattern, output, raises, "RM101")

    def _left(
        self, why: str, pattern: Pattern, output: Any, raises: bool, code: str = "RM205"
    ) -> Any:
        """Leaves calls like this one to the original, which served it."""
        decline = self.refused[pattern] = Decline(code, why)
        if raises:
            raise decline
        self._engine.events.failed(decline)
        return output

    def _known(
        self,
        flat_inputs: tuple[Any, ...],
        call: FlatCall,
        pattern: Pattern,
        past: list[bool],
        raises: bool,
    ) -> Variant | None:
        """A variant from the cache; one the gate passed before carries its verdict.

        Raises for one that failed the gate: the original serves this call and later ones.
        """
        try:
            variant = self._engine.cached_variant(call, pattern, past)
            if variant is not None:
                self._engine.trusted(variant)
            return variant
        except Exception as error:  # nothing of the user's runs here
            failure = self._refuse(error, pattern, flat_inputs)
            if raises:
                raise failure from error
            self._engine.events.failed(failure)
            raise self.refused[pattern] from error

    def all_variants(self) -> list[Variant]:
        return [v for group in self.variants.values() for v in group]

    def report(self) -> EntryReport:
        """The newest variant's record; `reports` of the engine lists all."""
        variants = self.all_variants()
        if not variants:
            return EntryReport(signature=", ".join(self.spec.names), engine="native", device="")
        return variants[-1].full_report()
