"""What engines say to a router and ask of it. They belong to the router and hold it weakly: a cycle
would keep a model alive until the next garbage collection."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import Error
from rm_abstract.hooks.host import RouterHost
from rm_abstract.hooks.snapshots import Snapshots

if TYPE_CHECKING:
    from rm_abstract.guards.found import Sources


class EngineOwner(Protocol):
    """A router, as far as its engines reach it."""

    route: Any
    label: str
    session: RouterHost
    snapshots: Snapshots
    first_calls: int

    def failed(self, failure: Error) -> None: ...

    def declined(self, decline: Decline) -> None: ...

    def refused_while_serving(self, code: str, detail: str) -> None: ...

    def detach(self) -> None: ...

    def watch(self) -> Any: ...


class RouterEvents:
    """Implements engines.context.Events for one router. Holds it weakly: the engine that has this
    object belongs to the router, and a cycle would keep a model alive until the next collection."""

    def __init__(self, router: EngineOwner) -> None:
        self._router = weakref.ref(router)

    def failed(self, error: Exception) -> None:
        router = self._router()
        if router is None:
            return
        try:
            if isinstance(error, (Error, Decline)):
                router.refused_while_serving(error.code, str(error))
            if isinstance(error, Error):
                router.failed(error)
            elif isinstance(error, Decline):
                router.declined(error)
        except Error as raised:  # the policy; the original ran, once is enough
            raised.served = True
            raise

    def served_by_original(self) -> None:
        router = self._router()
        if router is not None:
            router.route.unrouted()
            router.first_calls += 1

    def uncount(self, calls: int) -> None:
        router = self._router()
        if router is not None:
            router.route.uncount(calls)

    def detach(self) -> None:
        router = self._router()
        if router is not None:
            router.detach()

    def sources(self) -> Sources | None:
        router = self._router()
        return None if router is None else router.snapshots.found


def for_remote_engine(router: EngineOwner) -> tuple[Any, Any]:
    """What an engine in another process may ask of the router, which it must not keep alive."""
    session, label = router.session, router.label
    watch = weakref.WeakMethod(router.watch)

    def watched() -> Any:
        found = watch()
        if found is None:
            raise Decline("RM113", "the model is gone")
        return found()

    def notice(code: str, detail: str) -> None:
        session.engine_notice(label, code, detail)

    return watched, notice
