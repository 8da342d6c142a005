"""The first call of its kind: what a router does with an eligible call that no entry serves yet.

The state of the module is looked at, the call is described, and an engine compiles it beside the
original, whose result is the call's; or the original alone runs.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.parameter import is_lazy

from rm_abstract.base.decline import Decline, Deferred
from rm_abstract.base.frames import release_frames
from rm_abstract.base.scope import disabled_var
from rm_abstract.engines.base import Engine
from rm_abstract.engines.placement import placement_of
from rm_abstract.guards import purity
from rm_abstract.hooks.eager_once import EagerOnce
from rm_abstract.hooks.snapshots import MAX_PAUSE, change_reason

if TYPE_CHECKING:
    from rm_abstract.hooks.gradients import GradientCalls
    from rm_abstract.hooks.host import RouterHost
    from rm_abstract.hooks.part_policy import PartPolicy
    from rm_abstract.hooks.snapshots import Snapshots

_LASTING = frozenset({"RM107", "RM110", "RM113", "RM118"})  # the next call changes none cheaply


class Routed(Protocol):
    """A router, as far as a call on this path needs it."""

    route: Any
    module_ref: weakref.ref[Any]
    session: RouterHost
    snapshots: Snapshots
    parts: PartPolicy
    source: str
    serves_gradients: bool
    compile_seconds: float
    first_calls: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def engine_for(self, module: Any) -> Engine | None: ...
    def eager(
        self, code: str, detail: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...
    def refuse(
        self, key: bytes, code: str, detail: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...
    def note(self, code: str, detail: str) -> None: ...
    def declined(self, decline: Decline) -> None: ...
    def measures_next(self, key: bytes | None, code: str, detail: str) -> bool: ...
    def report(self, key: bytes, error: Exception) -> None: ...


class SlowPath:
    """Of one router, which owns this object and is held weakly."""

    def __init__(self, router: Routed) -> None:
        self._router = weakref.ref(router)
        self._lock = threading.Lock()
        self._pending: set[bytes] = set()  # kinds of calls that are being compiled
        self.gradients: GradientCalls | None = None  # made by the first call with gradients

    def _of(self) -> Routed:
        router = self._router()
        assert router is not None  # a call of it runs
        return router

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An eligible call that no entry serves yet."""
        router = self._of()
        try:
            return self._look_closer(args, kwargs)
        finally:
            router.snapshots.found = None

    def _look_closer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compiles such a call once, or runs it eager."""
        router = self._of()
        gradients = self._gradient_calls() if torch.is_grad_enabled() else None
        needed = None if gradients is None else gradients.needed(args, kwargs, self._state())
        if gradients is not None and needed is not None:
            output = gradients.serve(router, args, kwargs, needed)
            if output is NotImplemented:
                return router.eager("RM117", gradients.why, args, kwargs)
            return output
        snapshots = router.snapshots
        with snapshots.lock:
            what, where = router.route.stale()
            if not what and snapshots.held:
                what, where = snapshots.changed()
            if what and not snapshots.follow_change(what, where):
                return router.eager(change_reason(what), where, args, kwargs)
            # One that holds stays: what is bound was compiled for it, and a new one would take a
            # change that another thread makes just now for the state of old.
            code, detail = ("", "") if snapshots.held else snapshots.take()
            taken = snapshots.number
        if code:
            if code in _LASTING and not self._is_lazy():
                router.route.pause(code, 64)
            if code == "RM210":
                router.route.pause(code, MAX_PAUSE)
            return router.eager(code, detail, args, kwargs)
        if snapshots.user_code and not purity.can_watch():
            why = "a profiler is on: what the forward does cannot be watched"
            return router.eager("RM210", why, args, kwargs)
        described = router.route.describe(args, kwargs)
        if len(described) == 2:
            return router.eager(described[0], described[1], args, kwargs)
        if not self._callable_with(args, kwargs):
            return router.eager("RM104", "forward does not take these arguments", args, kwargs)
        key: bytes = described[1]
        due, keyed = router.parts.due(key)
        if due is not None:
            code, detail, refused = due
            if keyed and refused == taken:  # else it is another model by now, and is tried again
                router.route.refuse(key, code, detail, None)
            if code == "RM205":  # as in declined()
                router.route.pause(code, MAX_PAUSE)
            try:
                return router.eager(code, detail, args, kwargs)
            except BaseException:  # the user's: a later call is measured
                router.route.forget(key)
                router.route.pause("RM205", 0)
                raise
        with self._lock:
            busy = key in self._pending
            if not busy:
                self._pending.add(key)
        if busy:
            return router.eager("RM112", "another thread compiles this call", args, kwargs)
        try:
            return self._compile(key, taken, args, kwargs)
        finally:
            with self._lock:
                self._pending.discard(key)

    def _state(self) -> int | None:
        """The snapshot that the module agreed with when the call was looked at; None: with none."""
        router = self._of()
        held, number = router.snapshots.held, router.snapshots.number
        return number if held and not router.route.stale()[0] else None

    def _gradient_calls(self) -> GradientCalls | None:
        """What serves calls with gradients; None where they are left to PyTorch."""
        router = self._of()
        if self.gradients is None and router.serves_gradients:
            from rm_abstract.hooks.gradients import GradientCalls

            module: Any = router.module_ref()
            with self._lock:
                if self.gradients is None:
                    self.gradients = GradientCalls(
                        module, router.route.describe, router.route.routed
                    )
        return self.gradients

    def _callable_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Engines never see a call that is a TypeError: the original raises the user's own."""
        router = self._of()
        try:
            inspect.signature(router.module_ref().forward).bind(*args, **kwargs)  # type: ignore[union-attr]
        except TypeError:
            return False
        except ValueError:  # a builtin forward has no signature
            return True
        return True

    def _is_lazy(self) -> bool:
        """Whether weights get their shapes with this call: the next one finds them."""
        router = self._of()
        module: Any = router.module_ref()
        return any(map(is_lazy, itertools.chain(module.parameters(), module.buffers())))

    def _compile(
        self, key: bytes, taken: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        router = self._of()
        module = router.module_ref()
        devices = {tensor.device for tensor in _tensors(module)}
        if len(devices) > 1:
            where = "weights on " + ", ".join(sorted(map(str, devices)))
            return router.refuse(key, "RM110", where, args, kwargs)
        snapshot = taken

        def settled() -> None:
            nonlocal snapshot
            snapshot = router.snapshots.settled()

        eager = EagerOnce(module, args, kwargs, settled)
        token = disabled_var.set("compiling")  # our own captures and gates stay on the original
        start = time.perf_counter()
        try:
            engine = router.engine_for(module)
            if engine is None:
                router.route.retire("RM108")
                return router.eager("RM108", "inference_engine='torch'", args, kwargs)
            for home in devices:  # before seconds are spent on a capture
                placement = placement_of(router.session.resolved)
                placement.check(home)
                if router.source == "inner":
                    placement.check_inner(home)
            router.parts.admit(lambda: router.route.describe(args, kwargs)[2])
            signature = engine.signature_of(args, kwargs)
            if isinstance(signature, Decline):
                raise signature
            known = engine.entry(signature)
            output = eager() if known else engine.first_call(args, kwargs, eager)
            entry = engine.entry(signature)  # none: gone since, or never made
            if entry is None and known is None and snapshot == router.snapshots.number:
                raise Decline("RM501", "the parity gate refused the artefact")
        except Decline as decline:
            release_frames(decline)
            if router.measures_next(key, decline.code, decline.detail):
                router.note(decline.code, decline.detail)
                return eager()
            if decline.code != "RM107":  # a change while it was compared: the next call tries again
                router.route.refuse(key, decline.code, decline.detail, None)
            if isinstance(decline, Deferred):
                decline.pending.then(functools.partial(router.route.forget, key))
            router.declined(decline)
            router.parts.leave(decline.code)
            return eager()
        except Exception as error:
            if eager.error is not None:
                eager.raise_error()
            release_frames(error)
            router.report(key, error)
            return eager()
        finally:
            disabled_var.reset(token)
            router.compile_seconds += time.perf_counter() - start
        if entry is None:
            code, detail = "RM112", "another thread's call saw the module change meanwhile"
        else:
            code, detail = router.snapshots.bind(key, entry, snapshot)
        if code:
            router.note(code, detail)
        elif eager.ran:
            router.first_calls += 1
        else:  # by a program that was kept or found in the cache
            router.route.count_served()
        return output


def _tensors(module: Any) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
