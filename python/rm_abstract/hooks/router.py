"""What sits in the slot ``_compiled_call_impl`` of a routed module.

``nn.Module.__call__`` looks at that slot already, so nothing else changes: the type, the class and
the pickles of the model stay as they were. Invariant: a call returns what the stock module would
have returned, or raises what it would have raised.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import is_lazy

from rm_abstract import _core
from rm_abstract.base import reasons
from rm_abstract.base.decline import Decline, Deferred
from rm_abstract.base.errors import Error, ExecutionError, from_core, internal
from rm_abstract.base.frames import release_frames
from rm_abstract.base.scope import disabled_var
from rm_abstract.engines.base import Engine
from rm_abstract.engines.placement import placement_of
from rm_abstract.generation.registry import remote_engine
from rm_abstract.guards import purity, sources
from rm_abstract.hooks.eager_once import EagerOnce
from rm_abstract.hooks.host import SLOT, RouterHost
from rm_abstract.hooks.inner import InnerModels
from rm_abstract.hooks.part_policy import PartPolicy
from rm_abstract.hooks.parts import Parts
from rm_abstract.hooks.recovery import Recovery
from rm_abstract.hooks.route import RouteFailure, new_route
from rm_abstract.hooks.router_events import RouterEvents, for_remote_engine
from rm_abstract.hooks.slot import Ours
from rm_abstract.hooks.snapshots import MAX_PAUSE, Snapshots, change_reason

if TYPE_CHECKING:
    from rm_abstract.generation.state import GenerationState
    from rm_abstract.hooks.gradients import GradientCalls

_LASTING = frozenset({"RM107", "RM110", "RM113", "RM118"})  # the next call changes none cheaply


class Router(Ours):
    """The router of one root module, or of a part of one that cannot be captured (``name``: the
    part's). The module's slot holds the only lasting strong reference."""

    __slots__ = (
        "__weakref__",
        "_engine",
        "_generation",
        "_gradients",
        "_inner",
        "_lock",
        "_parts",
        "_pending",
        "_recovery",
        "_refused",
        "_serves_gradients",
        "_try",
        "compile_seconds",
        "events",
        "first_calls",
        "label",
        "loop_tokens",
        "module_ref",
        "name",
        "route",
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
        self._gradients: GradientCalls | None = None  # made by the first call with gradients
        # A part gives none: what surrounds it may run it again and compare what autograd saved.
        wanted = session.settings.flag("serve_gradients") and not name
        self._serves_gradients = wanted and not strict
        if self._serves_gradients:
            self.route.gradients(True)
        self.module_ref = weakref.ref(module)
        self.session = session
        self.source = source
        self.label = type(module).__name__
        self.name = name
        if name:
            self.label = f"{name} ({self.label})"
        self._parts = PartPolicy(self, parts, Router)
        self._inner = InnerModels(self, Router)
        if source == "inner":
            self.route.inner(True)
        self.events = RouterEvents(self)
        self._engine: Engine | None = None
        self._generation: GenerationState | None = None
        self._lock = threading.Lock()
        self.snapshots = Snapshots(self)
        self._pending: set[bytes] = set()
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
        except RouteFailure as failure:
            return self._failed(failure.error, args, kwargs)
        return self._slow_path(args, kwargs) if output is NotImplemented else output

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
            self._parts.keep(self.record(), self.name)

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
            "parts": self._parts.records(),
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
            self._parts.forget()
            self.snapshots.drop()
        if self._parts.remove():
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
        if self._gradients is not None:
            self._gradients.weights_changed(structure=what != "weights")
        if what != "weights":
            self._parts.structure_changed()
            if self.in_place:
                self.place_inner()
        self.snapshots.drop()
        if self._engine is not None:
            self._engine.invalidate(what, where)

    # ---- slow path --------------------------------------------------------------------------

    def _slow_path(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An eligible call that no entry serves yet."""
        try:
            return self._look_closer(args, kwargs)
        finally:
            self.snapshots.found = None

    def _look_closer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compiles such a call once, or runs it eager."""
        gradients = self._gradient_calls() if torch.is_grad_enabled() else None
        needed = None if gradients is None else gradients.needed(args, kwargs)
        if gradients is not None and needed is not None:
            output = gradients.serve(self, args, kwargs, needed)
            if output is NotImplemented:
                return self._eager("RM117", gradients.why, args, kwargs)
            return output
        snapshots = self.snapshots
        with snapshots.lock:
            what, where = self.route.stale()
            if not what and snapshots.held:
                what, where = snapshots.changed()
            if what and not snapshots.follow_change(what, where):
                return self._eager(change_reason(what), where, args, kwargs)
            # One that holds stays: what is bound was compiled for it, and a new one would take a
            # change that another thread makes just now for the state of old.
            code, detail = ("", "") if snapshots.held else snapshots.take()
            taken = snapshots.number
        if code:
            if code in _LASTING and not self._is_lazy():
                self.route.pause(code, 64)
            if code == "RM210":
                self.route.pause(code, MAX_PAUSE)
            return self._eager(code, detail, args, kwargs)
        if snapshots.user_code and not purity.can_watch():
            why = "a profiler is on: what the forward does cannot be watched"
            return self._eager("RM210", why, args, kwargs)
        described = self.route.describe(args, kwargs)
        if len(described) == 2:
            return self._eager(described[0], described[1], args, kwargs)
        if not self._callable_with(args, kwargs):
            return self._eager("RM104", "forward does not take these arguments", args, kwargs)
        key: bytes = described[1]
        due, keyed = self._parts.due(key)
        if due is not None:
            code, detail, refused = due
            if keyed and refused == taken:  # else it is another model by now, and is tried again
                self.route.refuse(key, code, detail, None)
            if code == "RM205":  # as in declined()
                self.route.pause(code, MAX_PAUSE)
            try:
                return self._eager(code, detail, args, kwargs)
            except BaseException:  # the user's: a later call is measured
                self.route.forget(key)
                self.route.pause("RM205", 0)
                raise
        with self._lock:
            busy = key in self._pending
            if not busy:
                self._pending.add(key)
        if busy:
            return self._eager("RM112", "another thread compiles this call", args, kwargs)
        try:
            return self._compile(key, taken, args, kwargs)
        finally:
            with self._lock:
                self._pending.discard(key)

    def _gradient_calls(self) -> GradientCalls | None:
        """What serves calls with gradients; None where they are left to PyTorch."""
        if self._gradients is None and self._serves_gradients:
            from rm_abstract.hooks.gradients import GradientCalls

            module: Any = self.module_ref()
            with self._lock:
                if self._gradients is None:
                    self._gradients = GradientCalls(module, self.route.describe, self.route.routed)
        return self._gradients

    def _callable_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Engines never see a call that is a TypeError: the original raises the user's own."""
        try:
            inspect.signature(self.module_ref().forward).bind(*args, **kwargs)  # type: ignore[union-attr]
        except TypeError:
            return False
        except ValueError:  # a builtin forward has no signature
            return True
        return True

    def _is_lazy(self) -> bool:
        """Whether weights get their shapes with this call: the next one finds them."""
        module: Any = self.module_ref()
        return any(map(is_lazy, itertools.chain(module.parameters(), module.buffers())))

    def _compile(
        self, key: bytes, taken: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        module = self.module_ref()
        devices = {tensor.device for tensor in _tensors(module)}
        if len(devices) > 1:
            where = "weights on " + ", ".join(sorted(map(str, devices)))
            return self._refuse(key, "RM110", where, args, kwargs)
        snapshot = taken

        def settled() -> None:
            nonlocal snapshot
            snapshot = self.snapshots.settled()

        eager = EagerOnce(module, args, kwargs, settled)
        token = disabled_var.set("compiling")  # our own captures and gates stay on the original
        start = time.perf_counter()
        try:
            engine = self._engine_for(module)
            if engine is None:
                self.route.retire("RM108")
                return self._eager("RM108", "inference_engine='torch'", args, kwargs)
            for home in devices:  # before seconds are spent on a capture
                placement = placement_of(self.session.resolved)
                placement.check(home)
                if self.source == "inner":
                    placement.check_inner(home)
            self._parts.admit(lambda: self.route.describe(args, kwargs)[2])
            signature = engine.signature_of(args, kwargs)
            if isinstance(signature, Decline):
                raise signature
            known = engine.entry(signature)
            output = eager() if known else engine.first_call(args, kwargs, eager)
            entry = engine.entry(signature)  # none: gone since, or never made
            if entry is None and known is None and snapshot == self.snapshots.number:
                raise Decline("RM501", "the parity gate refused the artefact")
        except Decline as decline:
            release_frames(decline)
            if self._measures_next(key, decline.code, decline.detail):
                self._note(decline.code, decline.detail)
                return eager()
            if decline.code != "RM107":  # a change while it was compared: the next call tries again
                self.route.refuse(key, decline.code, decline.detail, None)
            if isinstance(decline, Deferred):
                decline.pending.then(functools.partial(self.route.forget, key))
            self.declined(decline)
            self._parts.leave(decline.code)
            return eager()
        except Exception as error:
            if eager.error is not None:
                eager.raise_error()
            release_frames(error)
            self._report(key, error)
            return eager()
        finally:
            disabled_var.reset(token)
            self.compile_seconds += time.perf_counter() - start
        if entry is None:
            code, detail = "RM112", "another thread's call saw the module change meanwhile"
        else:
            code, detail = self.snapshots.bind(key, entry, snapshot)
        if code:
            self._note(code, detail)
        else:
            self.first_calls += 1
        return output

    def _engine_for(self, module: Any) -> Engine | None:
        with self._lock:
            if self._engine is None:
                self._engine = self.session.create_engine(module, self.events)
            return self._engine

    # ---- ways back to the original ----------------------------------------------------------

    def _eager(self, code: str, detail: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.route.count(code, detail)
        self._notice(code, detail)
        module = self.module_ref()
        parts = self._parts.to_be_measured(code)
        if parts is not None:
            self._inner.remove()  # parts serve these calls, too
            return parts.measure(module, args, kwargs)
        self._parts.leave(code)
        return _core.router.call_original(module, args, kwargs)

    def _refuse(
        self, key: bytes, code: str, detail: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.route.refuse(key, code, detail, None)
        self._note(code, detail)
        return _core.router.call_original(self.module_ref(), args, kwargs)

    def _note(self, code: str, detail: str) -> None:
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
        if decline.code == "RM205" and not self._parts.waits:
            self.route.pause(decline.code, MAX_PAUSE)
        self._note(decline.code, decline.detail)

    def refused_while_serving(self, code: str, detail: str) -> None:
        """An entry leaves its call and those like it to the original, which ran."""
        if self._measures_next(None, code, detail):
            self.snapshots.drop()  # so that the next call comes to the slow path
        self._parts.leave(code)

    def _measures_next(self, key: bytes | None, code: str, detail: str) -> bool:
        return self._parts.measures_next(key, code, detail, self.snapshots.number)

    def _report(self, key: bytes, error: Exception, served: bool = False) -> None:
        """An error of ours: refuse this key from now on, or for a while where the device ``served``
        it before; raise it when the policy says so."""
        if isinstance(error, _core.CoreError):
            failure = from_core(error)
        else:
            failure = error if isinstance(error, Error) else internal(error, "route")
        code = failure.code = failure.code or "RM306"
        if not self._measures_next(key, code, str(failure)):
            pause_s = self._recovery.pause_s(code) if served else None
            self.route.refuse(key, code, str(failure), pause_s)
        self.route.count(code, str(failure))
        self._refused[code] = str(failure)
        self._parts.leave(code)
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
            self._report(described[1], error, served=True)
        return output


def _tensors(module: Any) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
