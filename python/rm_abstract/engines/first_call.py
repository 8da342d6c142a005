"""The first call of a kind: the original serves it, and a program is made and compared with it.

A program of the cache that the gate passed in an earlier process serves the call itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import ParityError
from rm_abstract.calls.call import FlatCall, objects_in
from rm_abstract.calls.tensors import call_tensors
from rm_abstract.engines.call_parts import Pattern, snapshot, unfold, wants_gradients
from rm_abstract.engines.call_state import CallState
from rm_abstract.engines.call_text import argument_names
from rm_abstract.engines.gate import Comparison
from rm_abstract.engines.module_weights import WeightsChanged, WeightVersions
from rm_abstract.engines.trial import Trial
from rm_abstract.engines.variant import Variant
from rm_abstract.guards import torch_state
from rm_abstract.guards.purity import Effects, can_watch

MOST_BY_VALUES = 4  # captures of one call that hold for the values of an input alone

# serves a call by a variant: (variant, pattern, tensors, leaves)
Serve = Callable[[Variant, Pattern, list[torch.Tensor], tuple[Any, ...]], Any]


class FirstCall:
    """One such call.

    With `raises` an error of ours propagates (after `run_eager` ran), else it is reported and the
    pattern stays eager: the call was served already and must not be replayed.
    """

    def __init__(
        self,
        state: CallState,
        serve: Serve,
        flat_inputs: tuple[Any, ...],
        run_eager: Callable[[], Any],
        raises: bool,
        containers: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._state = state
        self._engine = state.engine
        self._serve = serve
        self._inputs = flat_inputs
        self._run_eager = run_eager
        self._raises = raises
        self._containers = containers

    def serve(self) -> Any:
        """The call's output. Raises Decline while another thread compiles a call of this kind."""
        if not self._state.lock.acquire(blocking=False):
            raise Decline("RM112", "another thread compiles this call")
        try:
            return self._served()
        finally:
            self._state.lock.release()

    def _served(self) -> Any:
        state = self._state
        leaves = state.prepared(self._inputs)
        self._tensors, self._pattern, self._past = state.unfolded(leaves)
        found = state.variants.setdefault(self._pattern, [])
        if any(v.fits(self._tensors) for v in found):
            return self._run_eager()  # another thread was faster
        if len(found) >= state.max_variants:
            raise Decline("RM115", f"more than {state.max_variants} captures of one call")
        read = {number for v in found for number in v.record.read_values}
        if len([v for v in found if v.record.read_values]) >= MOST_BY_VALUES:
            names = ", ".join(argument_names(state.spec, leaves, sorted(read)))
            raise Decline("RM121", f"more than {MOST_BY_VALUES} different values of {names}")
        if (kept := self._kept()) is not None:
            found.append(kept)
            return self._serve(kept, self._pattern, self._tensors, self._inputs)
        before = snapshot(state.spec, leaves)
        versions = self._engine.module_versions()  # before anything reads a weight
        again = snapshot(state.spec, self._inputs) if self._engine.quantises else None
        known = None if state.waiting.get(self._pattern) else self._cached(before)
        settled = known is not None and known.report.parity
        if not settled and self._engine.runs_user_code() and not can_watch():
            raise Decline("RM210", "a profiler is on: what the forward does cannot be watched")
        if known is not None and settled:
            self._admit(known, versions)
            return self._serve(known, self._pattern, self._tensors, self._inputs)
        spare = None  # for a second comparison, when the first was with a program of another model
        if known is None or (again is None and self._engine.runs_user_code()):
            spare = snapshot(state.spec, leaves)
        return self._compiled(versions, leaves, before, again, spare, known)

    def _compiled(
        self,
        versions: WeightVersions,
        leaves: tuple[Any, ...],
        before: FlatCall,
        again: FlatCall | None,
        spare: FlatCall | None,
        known: Variant | None,
    ) -> Any:
        """The original's output, after a variant was made and gave the same."""
        shown = call_tensors(before)
        comparable = self._state.comparable(leaves)
        started = time.perf_counter()
        with Effects(self._engine.module(), self._containers) as effects:
            output = self._run_eager()
            self._engine.wait()
        eager_s = time.perf_counter() - started
        if not self._raises:  # called by an entry, whose calls count as routed
            self._engine.events.served_by_original()
        if effects.found or wants_gradients(output):
            return self._impure(effects, output)
        before.torch_state = torch_state.answers(effects.state_reads, self._tensors)
        if spare is not None:
            spare.torch_state = before.torch_state
        if question := torch_state.not_as_captured(before.torch_state):
            return self._left(f"reads {torch_state.described(question)}", output, "RM209")
        after = [leaf for leaf in self._inputs if not isinstance(leaf, torch.Tensor)]
        try:
            if self._state.step and self._state.step.reshaped(self._inputs, before.leaves):
                self._tensors, self._pattern, self._past = unfold(tuple(before.leaves))
                shown, known = self._tensors, None
                spare = snapshot(self._state.spec, tuple(before.leaves))
                spare.torch_state = before.torch_state
            if known is not None and versions != self._engine.module_versions():
                # The guard's snapshot, which was taken behind the run of the original, knows the
                # weights of now and not those that the record's program got before it.
                known = known if self._engine.refresh(known) else None
            variant = self._refreshed() or known
            variant = variant or self._engine.make_variant(before, self._pattern, self._past)
            expected = (output, after)
            if again is not None and variant.quantised:
                expected = self._engine.gate.on_quantised_weights(variant, again)
            try:
                seen = Comparison(variant, before, shown, expected, comparable)
                self._engine.gate.check(seen, versions)
            except ParityError:
                if spare is None or not (variant is known or variant.record.extended):
                    raise
                # A record of the cache that is not this module's: something decides that no record
                # names. Or layers that are not alike: what they do depends on more than they hold.
                variant = self._engine.make_variant(spare, self._pattern, self._past, True)
                shown = call_tensors(spare)
                seen = Comparison(variant, spare, shown, expected, comparable)
                self._engine.gate.check(seen, versions)
            self._engine.passed(variant, before, self._pattern)
        except WeightsChanged as change:  # the next call tries again
            if self._raises:
                raise
            self._engine.events.failed(change)
            return output
        except Exception as error:  # the call was served: whatever we did wrong, it stays so
            failure = self._state.refuse(error, self._pattern, self._inputs)
            if self._raises and failure is error:
                raise
            if self._raises:
                raise failure from error
            self._engine.events.failed(failure)
            return output
        variant.eager_s = eager_s
        self._admit(variant, versions)
        return output

    def _admit(self, variant: Variant, versions: WeightVersions) -> None:
        """It serves from now on. `versions` are those of before it was made."""
        standing = self._engine.standing_of(variant)
        variant.standing = standing if versions == self._engine.module_versions() else None
        self._state.variants.setdefault(self._pattern, []).append(variant)
        self._on_trial(variant)

    def _kept(self) -> Variant | None:
        """A variant made before tensors of the module changed that its results do not depend on:
        Qwen2-VL keeps one for each text that it generates."""
        waiting = self._state.waiting.get(self._pattern, [])
        for variant in [v for v in waiting if v.fits(self._tensors)]:
            standing = variant.standing
            if standing is not None and standing == self._engine.standing_of(variant):
                waiting.remove(variant)
                return variant
        return None

    def _cached(self, call: FlatCall) -> Variant | None:
        """A variant from the cache; one the gate passed before carries its verdict.

        Raises for one that failed the gate: the original serves this call and later ones.
        """
        try:
            variant = self._engine.cached_variant(call, self._pattern, self._past)
            if variant is not None:
                self._engine.gate.trusted(variant)
        except Exception as error:  # nothing of the user's runs here
            failure = self._state.refuse(error, self._pattern, self._inputs)
            if self._raises and failure is error:
                raise
            if self._raises:
                raise failure from error
            self._engine.events.failed(failure)
            raise self._state.refused[self._pattern] from error
        return variant if variant is not None and variant.fits(self._tensors) else None

    def _refreshed(self) -> Variant | None:
        """A variant compiled for earlier weights that takes the ones the module has now."""
        waiting = self._state.waiting.get(self._pattern, [])
        for variant in [v for v in waiting if v.fits(self._tensors)]:
            waiting.remove(variant)
            if self._engine.refresh(variant):
                return variant
        return None

    def _on_trial(self, variant: Variant) -> None:
        """A program that may be slower than the original: measured when it has served some."""
        state = self._state
        plain = not objects_in(state.spec)
        if plain and state.step is None and self._engine.measures and not variant.quantised:
            variant.trial = Trial(self._engine.wait if self._engine.on_gpu else None)

    def _impure(self, effects: Effects, output: Any) -> Any:
        """A program would not do what this forward does: seen for sure or twice, it stays eager."""
        seen, this = self._engine.unsettled, (self._state.spec, self._pattern)
        if effects.found and effects.settles and this not in seen:
            seen.add(this)  # changed state is a change of the module: the entry may be another then
            return output
        if effects.found:
            return self._left(effects.found, output, effects.code)
        return self._left(
            "an output requires gradients although they are disabled", output, "RM117"
        )

    def _left(self, why: str, output: Any, code: str) -> Any:
        """Leaves calls like this one to the original, which served it."""
        decline = self._state.refused[self._pattern] = Decline(code, why)
        if self._raises:
            raise decline
        self._engine.events.failed(decline)
        return output
