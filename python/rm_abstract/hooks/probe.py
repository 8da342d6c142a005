"""Measures once, during a call of a model, which of its modules are called and how long they take.

A probe sits where a router would, for that one call, and runs the original. Invariant: the call
does what it would have done without, and every slot is as it was when it has ended.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.compiler import is_dynamo_compiling

from rm_abstract.hooks.fitness import why_unfit
from rm_abstract.hooks.host import SLOT
from rm_abstract.hooks.slot import Ours


@dataclass(frozen=True)
class Times:
    """What the calls of one module took, with all that they called."""

    calls: int
    seconds: float


class Probe(Ours):
    """What sits in the slot of one module meanwhile."""

    __slots__ = ("_module", "calls", "seconds")

    def __init__(self, module: Any) -> None:
        self._module = weakref.ref(module)
        self.calls, self.seconds = 0, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if is_dynamo_compiling():
            return module._call_impl(*args, **kwargs)  # type: ignore[union-attr]
        # A copy that forward makes of a module's dictionary shares the slot: whose call is it?
        caller = sys._getframe(1)
        if caller.f_code.co_name == "_wrapped_call_impl":
            module = caller.f_locals.get("self", module)
        started = time.perf_counter()
        try:
            return module._call_impl(*args, **kwargs)  # type: ignore[union-attr]
        finally:
            self.calls += 1
            self.seconds += time.perf_counter() - started

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())


class Measured:
    """The times of the modules below one, from one call of it."""

    def __init__(self) -> None:
        self.whole = 0.0  # seconds of the call
        self._times: dict[int, tuple[weakref.ref[Any], Times]] = {}

    def of(self, module: Any) -> Times | None:
        """None for a module that was not there, or could not be measured."""
        ref, times = self._times.get(id(module), (None, None))
        return times if ref is not None and ref() is module else None

    @contextmanager
    def during(self, root: Any) -> Iterator[None]:
        """Measures the call of ``root`` that the block makes."""
        placed: list[tuple[Any, Probe]] = []
        try:
            for module in root.modules():
                free = module is not root and SLOT not in vars(module)
                if free and why_unfit(module) is None:
                    probe = vars(module)[SLOT] = Probe(module)
                    placed.append((module, probe))
            started = time.perf_counter()
            yield
            self.whole = time.perf_counter() - started
        finally:
            for module, probe in placed:
                if vars(module).get(SLOT) is probe:
                    del vars(module)[SLOT]
                times = Times(probe.calls, probe.seconds)
                self._times[id(module)] = weakref.ref(module), times

    def chosen(self, module: Any, name: str, worth: Callable[[Times], bool]) -> list[_Part]:
        """The largest called modules below ``module`` that are worth it, with their names."""
        found: list[_Part] = []
        for own, child in module.named_children():
            if SLOT in vars(child):  # routed already, as a part of this model or of another one
                continue
            path = f"{name}.{own}" if name else own
            times = self.of(child)
            if times is None or times.calls == 0:  # a list, or called by its forward
                found += self.chosen(child, path, worth)
            elif worth(times):
                found.append((path, child, times))
        return found


_Part = tuple[str, Any, Times]
