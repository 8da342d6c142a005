"""What an engine may use of the session, and the interface through which it reports.

An engine imports neither the session nor the router: whoever creates it passes these two in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rm_abstract.base.config import Settings
from rm_abstract.device import Resolved

if TYPE_CHECKING:  # it imports torch, which init() does not
    from rm_abstract.guards.found import Sources


class Events(Protocol):
    """Hears what an engine finds out while it serves calls. The engine keeps it alive: an
    implementation must hold the model, and what belongs to it, weakly."""

    def failed(self, error: Exception) -> None:
        """A specialisation could not be made, and the original served the call. Raises ``error``
        (with ``served`` set) when the user's policy says so."""

    def served_by_original(self) -> None:
        """A call that counts as routed was served by the original this time."""

    def uncount(self, calls: int) -> None:
        """So many of the calls counted as routed were the engine's own."""

    def detach(self) -> None:
        """The original alone is faster: the model's calls need not come here any more."""

    def sources(self) -> Sources | None:
        """What the module's forward may read, where that was found out for the call that is
        served just now."""


class Captures(Protocol):
    """Captures calls in another process (background.py)."""

    def submit(self, data: bytes, done: Callable[[str, str], None]) -> None:
        """``data`` is a job (capture_job.py). ``done(code, message)`` is called later, by another
        thread; both are empty when the program is in the compile cache."""


@dataclass(frozen=True)
class EngineContext:
    """The settings and services one engine works with; made by the session."""

    settings: Settings
    device: Resolved
    open_cache: Callable[[], Any]  # -> _core.cache.CompileCache, opened on first use
    kernel_checks: Callable[[], Any]  # -> _core.SelfCheck, made on first use
    workers: Callable[[str, bytes], Any]  # (backend, fingerprint) -> WorkerPool
    events: Events
    captures: Callable[[], Captures] | None = None  # None: every call waits for its capture
