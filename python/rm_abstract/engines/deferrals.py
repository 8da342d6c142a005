"""The calls of one engine that another process captures, or has captured.

These are all calls with `compile_mode="async"`, and those that say themselves that they can wait
(`unhurried`). A call is given away once: what it came back with is what later calls like it are
told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rm_abstract.base.decline import Decline, Deferred, Pending
from rm_abstract.calls.call import FlatCall
from rm_abstract.calls.tensors import call_tensors
from rm_abstract.capture.errors import CaptureError
from rm_abstract.engines.capture_job import NOT_POSSIBLE, Job, pack
from rm_abstract.engines.capturer import Capturer
from rm_abstract.engines.engine_module import EngineModule

_unhurried: ContextVar[list[Pending] | None] = ContextVar("rm_abstract_unhurried", default=None)


@contextmanager
def unhurried(apply: bool = True) -> Iterator[list[Pending]]:
    """Calls inside do not need their programs now: captures go to another process where that is
    possible. Gives the list of what was begun there, or had not ended yet."""
    begun: list[Pending] = []
    token = _unhurried.set(begun if apply else None)
    try:
        yield begun
    finally:
        _unhurried.reset(token)


class Deferrals:
    """See the file's head. Calls of one engine may come from several threads."""

    def __init__(self, module: EngineModule, capturer: Capturer) -> None:
        context = module.context
        assert context.captures is not None
        self._module, self._capturer = module, capturer
        self._settings = context.settings
        self._captures = context.captures
        self._always = context.settings.text("compile_mode") == "async"
        self._outcomes: dict[str, tuple[str, str] | Pending] = {}

    def forget(self) -> None:
        """The module is another one now."""
        self._outcomes = {}

    def defer(self, call: FlatCall, pattern: tuple[Any, ...], key: str) -> None:
        """Raises Deferred while another process captures the call, then CaptureError when that
        found that it cannot be captured. Returns when the call is to be captured here. Not for a
        call whose program is in the cache; ``key`` is what it would be found by."""
        begun = _unhurried.get()
        if begun is None and not self._always:
            return
        try:
            self._submit(call, pattern, key)
        except Deferred as deferred:
            if begun is not None:
                begun.append(deferred.pending)
            raise
        except Decline:
            if self._always:
                raise

    def _submit(self, call: FlatCall, pattern: tuple[Any, ...], key: str) -> None:
        shapes = [list(map(int, t.shape)) for t in call_tensors(call)]
        place = json.dumps([key, shapes])
        outcome = self._outcomes.get(place)
        if isinstance(outcome, Pending):
            raise Deferred("RM112", "captured by another process", outcome)
        if outcome is not None:
            code, message = outcome
            raise (
                Decline(code, message) if code == NOT_POSSIBLE else CaptureError(message, code=code)
            )
        self._capturer.raise_refusal(key, shapes)
        identity, settings = self._identity(), dict(self._settings.values)
        data = pack(Job(self._module.get(), call, pattern, identity, settings))
        outcomes, pending = self._outcomes, Pending()
        outcomes[place] = pending

        def done(code: str, message: str) -> None:
            lost = "its program is not in the compile cache"
            outcomes[place] = code or NOT_POSSIBLE, message or lost
            pending.settle()

        self._captures().submit(data, done)
        raise Deferred("RM112", "captured by another process", pending)

    def _identity(self) -> str:
        """Raises Decline where two processes cannot be sure to mean the same module."""
        artefacts = self._module.artefacts
        if self._module.runs_user_code():
            raise Decline(NOT_POSSIBLE, "the model runs code that is no installed package's")
        problem = artefacts.cache.disk_problem
        if self._settings.text("cache_mode") != "readwrite" or problem:
            raise Decline(NOT_POSSIBLE, problem or "the compile cache is not read and written")
        identity = artefacts.identity_of(self._module.get())
        if not identity:
            raise Decline(NOT_POSSIBLE, artefacts.bypass)
        return identity
