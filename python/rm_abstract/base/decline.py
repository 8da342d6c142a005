"""The one way to say that a call stays with the original module."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Decline(Exception):
    """A decision not to route, with its reason code; returned by ``signature_of``, or raised by
    ``first_call`` and ``Entry.run`` *before* anything was changed. Never shown to a user."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail


class Pending:
    """Something that is settled later, once, by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settled = False
        self._calls: list[Callable[[], object]] = []

    def then(self, call: Callable[[], object]) -> None:
        """Calls it when it is settled; at once if it is."""
        with self._lock:
            if not self._settled:
                self._calls.append(call)
                return
        call()

    def settle(self) -> None:
        with self._lock:
            self._settled, calls = True, self._calls
            self._calls = []
        for call in calls:
            call()


class Deferred(Decline):
    """A decline that holds until ``pending`` is settled: then the call is looked at again."""

    def __init__(self, code: str, detail: str, pending: Pending) -> None:
        super().__init__(code, detail)
        self.pending = pending
