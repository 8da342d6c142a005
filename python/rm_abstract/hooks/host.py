"""The session as hooks and routers see it. They are given it; they never import it."""

from __future__ import annotations

from typing import Any, Protocol

from rm_abstract.base.config import Settings
from rm_abstract.base.errors import Error
from rm_abstract.device import Resolved
from rm_abstract.engines.base import Engine
from rm_abstract.engines.context import Events

SLOT = "_compiled_call_impl"  # nn.Module.__call__ runs what an instance has here


class HookHost(Protocol):
    """What the replaced methods of torch and transformers need."""

    @property
    def settings(self) -> Settings: ...

    @property
    def resolved(self) -> Resolved:
        """The device in use."""

    @property
    def active(self) -> bool:
        """False once it is closed, and inside ``disabled()``: hooks do nothing then."""

    def cannot_watch(self) -> None:
        """Writes to weights cannot be noticed in this process: nothing may be compiled."""

    def attach(self, module: Any, source: str) -> Any:
        """A module is ready to be called: gives it a router."""


class RouterHost(HookHost, Protocol):
    """What a router needs."""

    skipped: dict[str, tuple[str, str]]  # class -> (code, why it got no router)
    detached: dict[int, Any]  # a module's id -> its router that left it: faster without
    blind: bool  # cannot_watch() was called

    @property
    def device(self) -> str: ...

    def routers(self) -> list[Any]:
        """The routers that live."""

    def adopt(self, router: Any) -> None:
        """A router was made."""

    def keep_record(self, record: dict[str, Any]) -> None:
        """The record (Router.record) of a router whose module died."""

    def facts(self) -> Any:
        """_core.router.Facts of this process."""

    def create_engine(self, module: Any, events: Events) -> Engine | None:
        """An engine for ``module`` that reports to ``events``; None: every call stays eager."""

    def notice(self, label: str, code: str, detail: str) -> None:
        """A call of the model ``label`` stays eager. Raises Error where the policy says so."""

    def engine_notice(self, label: str, code: str, detail: str) -> None:
        """The session's engine leaves a generation to the programs of the core, or to
        transformers. Raises Error where the policy says so."""

    def failed(self, label: str, error: Error) -> None:
        """Capture, compilation or execution failed. Raises ``error`` where the policy says so."""
