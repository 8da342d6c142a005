"""What sits in the slot ``_compiled_call_impl`` of a routed module.

``nn.Module.__call__`` looks at that slot already, so nothing else changes: the type, the class and
the pickles of the model stay as they were. Invariant: a call returns what the stock module would
have returned, or raises what it would have raised.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from rm_abstract import _core
from rm_abstract.base import reasons
from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import Error, ExecutionError, from_core, internal
from rm_abstract.engines.base import Engine, Keeping
from rm_abstract.generation.registry import remote_engine
from rm_abstract.guards import sources
from rm_abstract.hooks.host import SLOT, RouterHost
from rm_abstract.hooks.inner import InnerModels
from rm_abstract.hooks.part_policy import PartPolicy
from rm_abstract.hooks.parts import Parts
from rm_abstract.hooks.recovery import Recovery
from rm_abstract.hooks.route import RouteFailure, new_route
from rm_abstract.hooks.router_events import RouterEvents, for_remote_engine
from rm_abstract.hooks.slot import Ours
from rm_abstract.hooks.slow_path import SlowPath
from rm_abstract.hooks.snapshots import MAX_PAUSE, Snapshots

if TYPE_CHECKING:
    from rm_abstract.generation.state import GenerationState


class Router(Ours):
    """The router of one root module, or of a part of one that cannot be captured (``name``: the
    part's). The module's slot holds the only lasting strong reference."""

    __slots__ = (
        "__weakref__",
        "_engine",
        "_generation",
        "_inner",
        "_lock",
        "_recovery",
        "_refused",
        "_slow",
        "_try",
        "compile_seconds",
        "events",
        "first_calls",
        "label",
        "loop_tokens",
        "module_ref",
        "name",
        "parts",
        "route",
        "serves_gradients",
        "session",
        "snapshots",
        "source",
    )

    def __init__(
        self,
        module: Any,
        session: RouterHost,
        source: str,
        parts: Parts | None = None,
        name: str = "",
    ) -> None:
        self.route = new_route(module, session.facts(), session.settings)
        strict = session.settings.fallback_for("routing") == "error"
        self.route.strict(strict)
        self._try = self.route.try_route
        # A part gives none: what surrounds it may run it again and compare what autograd saved.
        wanted = session.settings.flag("serve_gradients") and not name
        self.serves_gradients = wanted and not strict
        if self.serves_gradients:
            self.route.gradients(True)
        self.module_ref = weakref.ref(module)
        self.session = session
        self.source = source
        self.label = type(module).__name__
        self.name = name
        if name:
            self.label = f"{name} ({self.label})"
        self.parts = PartPolicy(self, parts, Router)
        self._inner = InnerModels(self, Router)
        if source == "inner":
            self.route.inner(True)
        self.events = RouterEvents(self)
        self._engine: Engine | None = None
        self._generation: GenerationState | None = None
        self._lock = threading.Lock()
        self.snapshots = Snapshots(self)
        self._slow = SlowPath(self)
        self._refused: dict[str, str] = {}
        self._recovery = Recovery()
        self.compile_seconds = 0.0
        self.loop_tokens = 0  # generated without a call of the model each
        self.first_calls = 0  # served by the original while an entry was made

    # The first line is for dynamo, which sees it as true and inlines the original; every other
    # kind of tracing is noticed in C.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self.module_ref()._call_impl(*args, **kwargs)  # type: ignore[union-attr]
        try:
            output = self._try(args, kwargs)
            if output is NotImplemented and self.snapshots.recall():
                output = self._try(args, kwargs)
        except RouteFailure as failure:
            return self._failed(failure.error, args, kwargs)
        return self._slow(args, kwargs) if output is NotImplemented else output

    # A copy made by deepcopy or pickle has an empty slot (RNN modules copy the slot along).
    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:  # `sys` may be gone by then
        session = getattr(self, "session", None)
        if session is None or _finalizing():
            return
        if not self.name:
            record = self.record()
            if record["routed"] or record["eager"] or record["loop_tokens"]:
                session.keep_record(record)
        else:
            self.parts.keep(self.record(), self.name)

    # ---- state ------------------------------------------------------------------------------

    @property
    def in_place(self) -> bool:
        module = self.module_ref()
        return module is not None and vars(module).get(SLOT) is self

    @property
    def engine(self) -> Engine | None:
        return self._engine

    @property
    def generation(self) -> GenerationState:
        """What this model's generations share."""
        from rm_abstract.generation.state import GenerationState  # imports transformers

        with self._lock:
            if self._generation is None:
                settings, device = self.session.settings, self.session.device
                remote = remote_engine(settings, device, *for_remote_engine(self))
                self._generation = GenerationState(settings, remote)
            return self._generation

    @property
    def remote_engine(self) -> Any:
        """The engine in another process that generates for this model; None without one."""
        generation = self._generation
        return None if generation is None else generation.remote

    @property
    def routed_calls(self) -> int:
        return int(self.route.stats()["routed"])

    @property
    def served_latest_call(self) -> bool:
        """Whether a program of this model served the latest call of this thread."""
        return bool(self.route.served())

    def holds(self) -> bool:
        """Whether the module still is what its programs were made from."""
        return not self.route.look()[0]

    @property
    def waiting_calls(self) -> int:
        declined = self.route.stats()["declined"]
        return int(declined["RM112"][0]) if "RM112" in declined else 0

    def record(self) -> dict[str, Any]:
        """What happened so far, as data for the report."""
        stats = self.route.stats()
        engine, generation = self._engine, self._generation
        declined = sum(number for number, _ in stats["declined"].values())
        return {
            "model": self.label,
            "caught_by": self.source,
            "device": self.session.device,
            "routed": stats["routed"],
            "first_calls": self.first_calls,
            "loop_tokens": self.loop_tokens,
            "drafts": {} if generation is None else generation.draft_counts(),
            "generation_engine": {}
            if generation is None or generation.remote is None
            else generation.remote.record(),
            "loop_declined": {} if generation is None else generation.declined(),
            "eager": declined + self.first_calls,
            "reasons": [
                {
                    "code": code,
                    "calls": number,
                    "text": reasons.text_of(code),
                    "detail": detail,
                    "remedy": reasons.remedy_of(code),
                }
                for code, (number, detail) in sorted(stats["declined"].items())
            ],
            "compile_seconds": round(self.compile_seconds, 4),
            "weights_guarded": stats["weights"],
            "entries": [] if engine is None else [entry.to_dict() for entry in engine.reports()],
            "parts": self.parts.records(),
            "inner": self._inner.records(),
        }

    def remove(self) -> None:
        """Takes the router out of the slot; somebody else's slot is left alone."""
        module = self.module_ref()
        if module is not None and vars(module).get(SLOT) is self:
            del vars(module)[SLOT]
        self.route.retire("RM108")
        self.reset()
        self._inner.remove()
        if module is not None and self.name:
            self.session.detached.pop(id(module), None)

    def detach(self) -> None:
        """Leaves the slot: PyTorch alone is faster. The session keeps what was measured."""
        module = self.module_ref()
        if module is not None and self.in_place:
            self.session.detached[id(module)] = self
            weakref.finalize(module, self.session.detached.pop, id(module), None)
            del vars(module)[SLOT]
            self._inner.remove()

    def step_back(self) -> None:
        """Takes the slot again, when nobody else did."""
        module = self.module_ref()
        if module is not None:
            vars(module).setdefault(SLOT, self)
            self._inner.place(module)

    def place_inner(self) -> None:
        """Models inside this one get routers for calls of their own."""
        if not self.name and self.in_place:
            self._inner.place(self.module_ref())

    def reset(self) -> None:
        """Forgets everything compiled, for another device or other options."""
        with self._lock:
            engine, self._engine = self._engine, None
            generation, self._generation = self._generation, None
            self._refused.clear()
            self.parts.forget()
            self.snapshots.drop()
            self.snapshots.forget_kept()
        if self.parts.remove():
            self.route.pause("RM205", 0)  # what is refused again is measured again
        if engine is not None:
            engine.close()
        if generation is not None:
            generation.close()

    def watch(self) -> Any:
        """A guard of its own on the module as it is now: ``look()`` says what changed since.

        Raises Decline for a module that cannot be watched.
        """
        module = self.module_ref()
        route = new_route(module, self.session.facts(), self.session.settings)
        found = sources.of_module(module)  # type: ignore[arg-type]
        with torch.no_grad():  # gradients are no matter here
            code, detail = route.snapshot(found.rows())
        if code or found.unseen:
            raise Decline(code or "RM210", detail or "; ".join(found.unseen[:3]))
        return route

    def refusals(self) -> dict[str, str]:
        return dict(self._refused)

    def forgotten(self, what: str, where: str) -> None:
        """What was compiled is for another state of the module."""
        if what != "weights":
            self.is_another()
        elif self._slow.gradients is not None:
            self._slow.gradients.weights_changed(structure=False)
        self.snapshots.drop()
        if self._engine is not None:
            self._engine.invalidate(what, where)

    def is_another(self, known: bool = False) -> None:
        """The module's structure changed; ``known``: to what it was before."""
        if self._slow.gradients is not None:
            self._slow.gradients.weights_changed(structure=True)
        self.parts.structure_changed()
        if self.in_place and not known:
            self.place_inner()

    def keeper(self) -> Keeping | None:
        """The engine, where it keeps what is compiled for other states of the module."""
        engine = self._engine
        return engine if isinstance(engine, Keeping) else None

    def engine_for(self, module: Any) -> Engine | None:
        with self._lock:
            if self._engine is None:
                self._engine = self.session.create_engine(module, self.events)
            return self._engine

    # ---- ways back to the original ----------------------------------------------------------

    def eager(self, code: str, detail: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.route.count(code, detail)
        self._notice(code, detail)
        module = self.module_ref()
        parts = self.parts.to_be_measured(code)
        if parts is not None:
            self._inner.remove()  # parts serve these calls, too
            return parts.measure(module, args, kwargs)
        self.parts.leave(code)
        return _core.router.call_original(module, args, kwargs)

    def refuse(
        self, key: bytes, code: str, detail: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.route.refuse(key, code, detail, None)
        self.note(code, detail)
        return _core.router.call_original(self.module_ref(), args, kwargs)

    def note(self, code: str, detail: str) -> None:
        self.route.count(code, detail)
        self._refused[code] = detail
        self._notice(code, detail)

    def _notice(self, code: str, detail: str) -> None:
        if self._tells(code):
            self.session.notice(self.label, code, detail)

    def _tells(self, code: str) -> bool:
        """A part that cannot be captured is no news: the router of its model said so."""
        return not self.name or reasons.group_of(code) != "capture"

    def declined(self, decline: Decline) -> None:
        """The engine leaves a call to the original."""
        # It changes what the guard watches: no use in looking again, but once to measure.
        if decline.code == "RM205" and not self.parts.waits:
            self.route.pause(decline.code, MAX_PAUSE)
        self.note(decline.code, decline.detail)

    def refused_while_serving(self, code: str, detail: str) -> None:
        """An entry leaves its call and those like it to the original, which ran."""
        if self.measures_next(None, code, detail):
            self.snapshots.drop()  # so that the next call comes to the slow path
        self.parts.leave(code)

    def measures_next(self, key: bytes | None, code: str, detail: str) -> bool:
        return self.parts.measures_next(key, code, detail, self.snapshots.number)

    def report(self, key: bytes, error: Exception, served: bool = False) -> None:
        """An error of ours: refuse this key from now on, or for a while where the device ``served``
        it before; raise it when the policy says so."""
        if isinstance(error, _core.CoreError):
            failure = from_core(error)
        else:
            failure = error if isinstance(error, Error) else internal(error, "route")
        code = failure.code = failure.code or "RM306"
        if not self.measures_next(key, code, str(failure)):
            pause_s = self._recovery.pause_s(code) if served else None
            self.route.refuse(key, code, str(failure), pause_s)
        self.route.count(code, str(failure))
        self._refused[code] = str(failure)
        self.parts.leave(code)
        self.failed(failure)

    def failed(self, failure: Error) -> None:
        if self._tells(failure.code):
            self.session.failed(self.label, failure)

    def _failed(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An entry failed while serving. Replayed on the original only when nothing was changed."""
        if isinstance(error, ExecutionError) and error.committed:
            raise error
        if isinstance(error, Error) and error.served:
            raise error
        # The original judges the call first: what it refuses too is the user's error, not ours.
        output = _core.router.call_original(self.module_ref(), args, kwargs)
        described = self.route.describe(args, kwargs)
        if len(described) == 3:
            self.report(described[1], error, served=True)
        return output
