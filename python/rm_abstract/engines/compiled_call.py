"""One call structure of a module (a router key) and its compiled variants.

The router tells calls apart by structure only; sizes 0 and 1, an empty or a filled cache, and sizes
that break a capture's guards make further variants, compiled on their first call like the first.
A variant serves only after it gave what the original gave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.decline import Decline
from rm_abstract.calls.call import rebuild_args
from rm_abstract.calls.tensors import call_tensors
from rm_abstract.engines.call_parts import Pattern, snapshot, unfold
from rm_abstract.engines.call_state import CallState
from rm_abstract.engines.first_call import FirstCall
from rm_abstract.engines.gate import Comparison
from rm_abstract.engines.trial import Trial
from rm_abstract.engines.variant import Variant

MOST_DIFFERENCES = 1  # in a row, after which a program is not used any more


class CompiledCall(CallState):
    """The entry bound into the router."""

    def run(self, flat_inputs: tuple[Any, ...]) -> Any:
        """Serves a call; a size pattern seen for the first time is compiled and served by eager."""
        leaves = self.step.prepare(flat_inputs) if self.step else flat_inputs
        tensors, pattern, _ = unfold(leaves, self.reads)
        for variant in self.variants.get(pattern, ()):
            if variant.fits(tensors):
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
                    self.original(flat_inputs),
                    self.engine.events.served_by_original,
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
            output = variant.run(tensors, flat_inputs, True)
            if variant.may_be_direct() and self._only_tensors(flat_inputs):
                variant.make_direct(self.direct, tensors)
            return output
        except _core.NewKernels as new:
            kernels = int(new.args[0])
        if self.engine.gate.kernels_compared(variant, kernels):
            return variant.run(tensors, flat_inputs)
        return self._compared(variant, pattern, flat_inputs)

    def _only_tensors(self, flat_inputs: tuple[Any, ...]) -> bool:
        """Whether calls like this one reach a program as they are."""
        return self.step is None and all(isinstance(x, torch.Tensor) for x in flat_inputs)

    def _compared(self, variant: Variant, pattern: Pattern, flat_inputs: tuple[Any, ...]) -> Any:
        """The original serves this call; the program runs it on copies and is compared.

        A difference may come from weights that changed unseen: the program reads them anew, and the
        next call is compared too. If that differs again the program is not used any more.
        """
        engine, started = self.engine, time.perf_counter()
        leaves = self.prepared(flat_inputs)
        call = snapshot(self.spec, leaves)
        again = snapshot(self.spec, flat_inputs) if variant.quantised else None
        shown = call_tensors(call)
        comparable = self.comparable(leaves)
        versions = engine.versions_of(variant)
        with engine.on_original():
            output = self.original(flat_inputs)()
        engine.events.served_by_original()
        eager_s = time.perf_counter() - started
        if self.step and self.step.reshaped(flat_inputs, call.leaves):
            shown, _, _ = self.unfolded(tuple(call.leaves))
        if not variant.fits(shown):
            return output
        calls = variant.report.calls
        try:
            after = [leaf for leaf in flat_inputs if not isinstance(leaf, torch.Tensor)]
            expected = (output, after)
            if again is not None:
                expected = engine.gate.on_quantised_weights(variant, again)
            verdict = engine.gate.compare(Comparison(variant, call, shown, expected, comparable))
        except Decline:
            return output  # this call is none for the program
        except Exception as error:
            self._remove(variant, pattern)
            engine.events.failed(self.refuse(error, pattern, flat_inputs))
            return output
        finally:
            variant.report.calls = calls
        if versions != engine.versions_of(variant):
            return output  # another thread changes the weights: nothing was compared
        if verdict.passed:
            if variant.differed:
                variant.differed = 0
                engine.events.failed(Decline("RM504", "found when a call was compared"))
            took = time.perf_counter() - started
            # The best of its first calls: in this one the program ran on copies, under a watch.
            usual = eager_s if variant.best_s is None else variant.best_s
            variant.until_sample = engine.policy.next_sample(usual, took)
            engine.gate.accept_kernels(variant, shown, verdict)
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
        self.engine.events.failed(self.engine.gate.quarantine(variant, detail))

    def _remove(self, variant: Variant, pattern: Pattern) -> None:
        variant.end_direct()
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
        engine, calls = self.engine, variant.report.calls

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
        if self.step is None:
            return None
        prepared = self.step.prepare(leaves)
        tensors, pattern, _ = unfold(prepared)
        for variant in self.variants.get(pattern, ()):
            if variant.fits(tensors):
                return variant, tensors, self.step.roles(prepared)
        return None

    def _next(self, pattern: Pattern, flat_inputs: tuple[Any, ...]) -> Any:
        if pattern in self.refused:
            raise self.refused[pattern]
        with self.engine.on_original():
            return self._first(flat_inputs, self.original(flat_inputs), raises=False)

    def first(
        self,
        flat_inputs: tuple[Any, ...],
        run_eager: Callable[[], Any],
        containers: Sequence[tuple[str, Any]] = (),
    ) -> Any:
        """Serves the first call of a kind; raises what FirstCall does with `raises`."""
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
        call = FirstCall(self, self._run, flat_inputs, run_eager, raises, containers)
        return call.serve()
