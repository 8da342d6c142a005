"""The programs that serve calls of a routed model, to be run without calling it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rm_abstract.base.decline import Decline
from rm_abstract.engines.call_parts import reported
from rm_abstract.engines.compiled_call import CompiledCall
from rm_abstract.engines.program_engine import ProgramEngine
from rm_abstract.generation.greedy_step import GreedyStep

if TYPE_CHECKING:
    from rm_abstract.generation.state import RoutedModel


class ServedModel:
    """Implements sharing.Host; keeps no generation alive."""

    def __init__(self, model: Any, router: RoutedModel) -> None:
        self.model, self._router = model, router

    def program(self, inputs: dict[str, Any]) -> GreedyStep | None:
        found = served(self._router, inputs)
        return None if found is None else GreedyStep.serving(*found)

    def waits(self) -> int:
        return self._router.waiting_calls

    def failed(self, error: Exception) -> None:
        self._router.events.failed(reported(error))


def served(router: RoutedModel, kwargs: dict[str, Any]) -> tuple[CompiledCall, list[Any]] | None:
    """The compiled call that serves a call by these keywords, and its leaves; None: there is none.

    Weights are not looked at: an ordinary call before did that.
    """
    engine = router.engine
    if not isinstance(engine, ProgramEngine):
        return None
    call = engine.flatten(kwargs)
    if isinstance(call, Decline):
        return None
    entry = engine.entry(call.spec)
    return None if entry is None else (entry, call.leaves)
