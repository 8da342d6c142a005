"""Captures calls of one module as records, and remembers which could not be captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rm_abstract import _core
from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import CompileError, from_core, internal
from rm_abstract.calls.call import FlatCall, rebuild_args
from rm_abstract.calls.tensors import call_tensors
from rm_abstract.capture.errors import CaptureError
from rm_abstract.engines.call_parts import Pattern
from rm_abstract.engines.call_text import call_key
from rm_abstract.engines.engine_module import EngineModule
from rm_abstract.engines.variant import Record
from rm_abstract.guards import sources

if TYPE_CHECKING:
    from rm_abstract.capture.captured import Captured

# Reasons for which a capture fails that hold for the same code in every process.
_LASTING = frozenset({"RM201", "RM203", "RM207", "RM208"})


class Capturer:
    """See the file's head."""

    def __init__(self, module: EngineModule) -> None:
        self._module = module

    def record(self, call: FlatCall, pattern: Pattern, whole: bool) -> Record:
        """Captures a call. Raises CaptureError or Decline when that is not possible.

        Of layers that are alike the first are traced, unless the ``whole`` model is asked for.
        """
        self._ask_dynamo(call)
        captured = self._captured(call, call_key(call, pattern), whole)
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
            extended=captured.extended,
        )

    def raise_refusal(self, key: str, shapes: Sequence[Sequence[int]]) -> None:
        """Raises CaptureError when an earlier process could not capture this call."""
        known = self._module.artefacts.find_refusal(self._module.get(), key, shapes)
        if known is not None:
            code, message = known
            message += " (found by an earlier capture; RM_CACHE_MODE=refresh tries again)"
            raise CaptureError(message, code=code)

    def _captured(self, call: FlatCall, key: str, whole: bool) -> Captured:
        module, artefacts = self._module.get(), self._module.artefacts
        shapes = [t.shape for t in call_tensors(call)]
        self.raise_refusal(key, shapes)
        from rm_abstract.capture import budget
        from rm_abstract.capture.export import capture_flat  # torch.export: 0.2 s to import

        try:
            asked = self._module.context.settings.fallback_for("capture") == "error"
            patience = budget.PATIENCE if asked else 1
            parameters = self._module.parameters
            return capture_flat(module, call, parameters, patience, whole, True)
        except CaptureError as error:
            if error.code in _LASTING and not error.passing:
                artefacts.store_refusal(module, key, shapes, error.code, str(error))
            raise
        except (Decline, MemoryError):
            raise
        except Exception as error:  # a defect of ours fails in every process, until it is mended
            failure = internal(error, "capture")
            artefacts.store_refusal(module, key, shapes, failure.code, str(failure))
            raise failure from error

    def _ask_dynamo(self, call: FlatCall) -> None:
        """Raises Decline where dynamo sees a user's forward read what the guard does not watch."""
        if not self._module.runs_user_code():
            return
        if not all(isinstance(x, torch.Tensor) for x in call.leaves):
            return
        from rm_abstract.guards import oracle

        module = self._module.get()
        args, kwargs = rebuild_args(call.spec, call.leaves, self._module.parameters.positional)
        missing = oracle.uncovered(module, args, kwargs, sources.of_module(module))
        if missing:
            raise Decline("RM210", f"{missing}, which torch's dynamo sees it read")
