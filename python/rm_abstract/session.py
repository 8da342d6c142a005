"""The one session of the process: its settings, its device, and the modules it routes.

Invariant: a module is held weakly; what it did is kept after it died, so the final report is whole.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rm_abstract import _core
from rm_abstract import device as devices
from rm_abstract.base import reasons
from rm_abstract.base.config import Settings
from rm_abstract.base.errors import Error, RoutingWarning
from rm_abstract.base.scope import disabled_var

if TYPE_CHECKING:
    from rm_abstract.engines.background import Captures
    from rm_abstract.engines.base import Engine
    from rm_abstract.engines.context import EngineContext, Events
    from rm_abstract.hooks.install import Installation
    from rm_abstract.hooks.router import Router
    from rm_abstract.worker.pool import WorkerPool

_KEPT_RECORDS = 256  # reports of modules that no longer exist

_current: Session | None = None
_last: Session | None = None  # the current one, or the one that ended last
_lock = threading.RLock()


def current() -> Session | None:
    return _current


def set_current(session: Session | None) -> None:
    global _current, _last
    _current = session
    if session is not None:
        _last = session


def last() -> Session | None:
    """The current session, or the one that ended last: its report is still asked for."""
    return _last


def lock() -> threading.RLock:
    """Held by init, shutdown and switch_device."""
    return _lock


class Session:
    """Made by ``rm_abstract.init()``. Usable as a context manager: leaving it shuts down."""

    def __init__(self, settings: Settings, resolved: devices.Resolved | None = None) -> None:
        self.settings = settings
        self._resolved = resolved
        self.installation: Installation | None = None
        self.conflicts: list[str] = []
        self.skipped: dict[str, tuple[str, str]] = {}  # class -> (code, why it was not routed)
        self.pid = os.getpid()
        self.closed = False
        self._routers: weakref.WeakSet[Router] = weakref.WeakSet()
        # Modules whose router left them, with it: measured to be faster without.
        self.detached: dict[int, Any] = {}  # by the module's id, while it lives
        self.blind = False  # writes to weights cannot be noticed: nothing may be compiled
        self._entered: list[Settings | None] = []  # by nested `with`: what to go back to
        self._outer: Settings | None = None  # settings before the last init() of this session
        self._records: list[dict[str, Any]] = []
        self._final_records: list[dict[str, Any]] | None = None
        self._noticed: set[tuple[str, str]] = set()
        self._facts: Any = None
        self._collector_known = False
        self._prepared = False  # a model was attached
        self._compile_cache: Any = None
        self._kernel_checks: Any = None
        self._workers: dict[str, WorkerPool] = {}
        self._captures: Captures | None = None
        # Guards what is made on first use. Who ends the session holds `_lock` while it waits for
        # the scheduler's thread, which may be compiling and needs what is made here.
        self._making = threading.RLock()

    @property
    def resolved(self) -> devices.Resolved:
        """The device in use. For auto and cpu found on first use: plugins take time to load."""
        if self._resolved is None:
            with self._making:
                if self._resolved is None:
                    self._resolved = devices.resolve(self.settings)
        return self._resolved

    def change(self, settings: Settings, resolved: devices.Resolved | None) -> None:
        """Takes other settings; what is routed compiles again for them."""
        self.settings, self._resolved = settings, resolved
        self._compile_cache = None
        self._kernel_checks = None
        self._end_captures()
        for router in self.routers():
            router.route.retire("")  # the engine that gave it up (torch) may be another one now
            router.reset()
        detached, self.detached = self.detached, {}
        for router in detached.values():
            if not router.name:  # parts are chosen anew
                router.step_back()
        for router in self.routers():
            router.place_inner()
        self.close_workers()

    @property
    def device(self) -> str:
        return self.resolved.name

    @property
    def owned_by_this_process(self) -> bool:
        return self.pid == os.getpid()

    def __repr__(self) -> str:
        device = self.settings.text("device") if self._resolved is None else self._resolved.name
        return f"<rm_abstract.Session device={device} models={len(self._routers)}>"

    def initialised_again(self) -> None:
        """init() found this session active: a ``with`` around that call must not end it."""
        self._outer = self.settings

    def __enter__(self) -> Session:
        self._entered.append(self._outer)
        self._outer = None
        return self

    def __exit__(self, *exception: object) -> None:
        with _lock:
            outer = self._entered.pop()
            if current() is not self:
                return
            if outer is None:
                self.close()
                set_current(None)
            elif not self.settings.same_as(outer):
                self.change(outer, None)

    def install(self) -> None:
        """Changes the attributes of torch and transformers that lead models here."""
        from rm_abstract.hooks.install import Installation

        self.installation = Installation(self)
        self.installation.install()

    def close(self) -> None:
        """Restores every patched attribute, takes the routers out and ends the workers.

        What happened stays readable: `records()` has every model that was caught.
        """
        roots = [router for router in self.routers() if not router.name]
        self._final_records = [*self._records, *(router.record() for router in roots)]
        self.remove_routers()
        self.close_workers()
        self._end_captures()
        self.closed = True
        self.conflicts = self.installation.remove() if self.installation else []
        for line in self.conflicts:
            warnings.warn(f"[shutdown] {line}", RoutingWarning, stacklevel=3)

    @property
    def active(self) -> bool:
        """False once it is closed, and inside ``disabled()``."""
        return not self.closed and disabled_var.get() is None

    # ---- routed modules ----------------------------------------------------------------------

    def cannot_watch(self) -> None:
        """Writes to weights would be missed: everything stays with PyTorch."""
        self.blind = True
        self.remove_routers()

    def routers(self) -> list[Router]:
        return sorted(self._routers, key=lambda router: router.label)

    def attach(self, module: Any, source: str) -> Router | None:
        """Puts a router into the module's slot; None (and a reason in ``skipped``) when it cannot.

        Attaching compiles nothing and touches no device.
        """
        from rm_abstract.hooks import attaching

        router = attaching.attach(self, module, source)
        if router is not None and not self._prepared:
            self._prepared = True
            self._prepare()
        return router

    def _prepare(self) -> None:
        """Loads what a first call needs. A model was just loaded, which takes longer anyway, and
        the first call is what users wait for."""
        from rm_abstract import engines

        # What cannot be loaded here cannot be in the first call, which reports it.
        with suppress(Exception):
            self._load_plugins()
            engines.load(self.settings.text("inference_engine"))

    def adopt(self, router: Router) -> None:
        self._routers.add(router)

    def keep_record(self, record: dict[str, Any]) -> None:
        """Called when a routed module dies: its record stays for the report."""
        if not self.closed and len(self._records) < _KEPT_RECORDS:
            self._records.append(record)

    def records(self) -> list[dict[str, Any]]:
        """Of the models that died; of all models once the session is closed."""
        return list(self._records if self._final_records is None else self._final_records)

    def remove_routers(self) -> None:
        for router in self.routers():
            router.remove()
        self._routers.clear()
        self.detached.clear()

    def facts(self) -> Any:
        """The router's view of torch, made when the first module is routed."""
        from rm_abstract.hooks.route import make_facts

        if self._facts is None:
            self._facts = make_facts()
        capturing = sys.modules.get("transformers.utils.output_capturing")
        if capturing is not None and not self._collector_known:
            collector = getattr(capturing, "_active_collector", None)
            variable = getattr(collector, "context_var", None)
            if variable is not None:
                self._facts.add_quiet_variable(variable)
            self._collector_known = True
        return self._facts

    def create_engine(self, module: Any, events: Events) -> Engine | None:
        """An engine for a module; None for ``torch``, which leaves every call to eager."""
        from rm_abstract import engines

        self._load_plugins()
        name = self.settings.text("inference_engine")
        return engines.create(name, module, self.engine_context(events))

    def _load_plugins(self) -> None:
        """Again: torch is in the process now, so the bridge to it can be loaded."""
        devices.load_plugins(self.settings.text("backend_path"), self.settings.text("cpu_isa"))

    def engine_context(self, events: Events) -> EngineContext:
        """The settings and services of this session for one engine."""
        from rm_abstract.engines.context import EngineContext

        return EngineContext(
            self.settings,
            self.resolved,
            self.compile_cache,
            self.kernel_checks,
            self.workers,
            events,
            self._background_captures,
        )

    def _background_captures(self) -> Captures:
        """What captures calls that need not wait; its process starts with the first one."""
        from rm_abstract.engines.background import Captures

        with self._making:
            if self._captures is None:
                self._captures = Captures()
            return self._captures

    def _end_captures(self) -> None:
        with self._making:
            captures, self._captures = self._captures, None
        if captures is not None and self.owned_by_this_process:
            captures.close()

    def compile_cache(self) -> Any:
        """The session's compile cache (``_core.cache.CompileCache``), opened on first use."""
        with self._making:
            if self._compile_cache is None:
                options = {name: text for name, (text, _) in self.settings.values.items()}
                self._compile_cache = _core.cache.CompileCache(options)
        return self._compile_cache

    def kernel_checks(self) -> Any:
        """The session's judge of kernel rows (``_core.SelfCheck``), made on first use."""
        cache = self.compile_cache()
        with self._making:
            if self._kernel_checks is None:
                self._kernel_checks = _core.SelfCheck(self.settings.text("self_check"), cache)
        return self._kernel_checks

    def kernel_check_report(self) -> dict[str, Any]:
        """What the judge did so far; empty before the first program."""
        return {} if self._kernel_checks is None else dict(self._kernel_checks.report())

    def cache_problem(self) -> str:
        """Why nothing is kept on disk; empty when it is, or when nothing was to be kept yet."""
        return "" if self._compile_cache is None else str(self._compile_cache.disk_problem)

    def workers(self, backend: str, fingerprint: bytes) -> WorkerPool:
        """The worker processes of a backend; none is started before it is asked for."""
        from rm_abstract.worker.pool import WorkerPool

        with self._making:
            if backend not in self._workers:
                self._workers[backend] = WorkerPool(
                    backend,
                    fingerprint,
                    self.settings.text("worker_log_dir"),
                    float(self.settings.text("timeout_s")),
                    float(self.settings.text("stall_timeout_s")),
                )
            return self._workers[backend]

    def close_workers(self) -> None:
        """Ends them; a later call starts others."""
        with self._making:
            pools, self._workers = list(self._workers.values()), {}
        if self.owned_by_this_process:
            for pool in pools:
                pool.close()

    # ---- telling the user -------------------------------------------------------------------

    def policy(self, code: str) -> str:
        """ "warn", "allow" or "error" for a reason code."""
        return self.settings.fallback_for(reasons.group_of(code))

    def notice(self, label: str, code: str, detail: str) -> None:
        """A call stays eager for ``code``. Most routing reasons are only reported."""
        policy = self.policy(code)
        if policy == "error" and code not in reasons.ASKED_FOR:
            raise Error(
                f"[{label}] expected an accelerated call, got {code}: {detail}; "
                f"try {reasons.remedy_of(code)}",
                code=code,
            )
        expected = reasons.group_of(code) == "routing" and code not in reasons.UNEXPECTED
        if policy == "warn" and not expected:
            self._warn(label, code, f"{reasons.text_of(code)}: {detail}")

    def engine_notice(self, label: str, code: str, detail: str) -> None:
        """A generation is not served by the session's inference engine for ``code``."""
        policy, engine = self.policy(code), self.settings.text("inference_engine")
        if engine == "auto":
            engine = f"the engine of {self.device}"
        if policy == "error":
            raise Error(
                f"[{label}.generate] expected {engine} to serve the call, got {code}: {detail}; "
                f"try {reasons.remedy_of(code)}",
                code=code,
            )
        once = (label, code + detail.partition(":")[0])  # numbers come behind the colon
        if policy == "warn" and once not in self._noticed:
            self._noticed.add(once)
            text = f"{label}.generate is not served by {engine}, {code}: {detail}"
            warnings.warn(text, RoutingWarning, stacklevel=2)

    def failed(self, label: str, error: Error) -> None:
        """Capture, compile or execution failed with ``error``: eager serves, or it is raised."""
        policy = self.policy(error.code or "RM306")
        if policy == "error":
            raise error
        if policy == "warn":
            self._warn(label, error.code, str(error))

    def _warn(self, label: str, code: str, text: str) -> None:
        if (label, code) in self._noticed:
            return
        self._noticed.add((label, code))
        warnings.warn(
            f"{label} runs on eager PyTorch, {code}: {text}", RoutingWarning, stacklevel=2
        )


def after_fork_in_child() -> None:
    """A child never touches the parent's device state: it runs eager until it calls init()."""
    session = current()
    if session is not None and session.pid != os.getpid():
        for router in session.routers():
            router.route.retire("RM108")
        if session._captures is not None:
            session._captures.forget()


os.register_at_fork(after_in_child=after_fork_in_child)
