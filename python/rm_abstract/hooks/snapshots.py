"""Which state of a module its programs were compiled from: the guard's snapshots, by number.

Invariant: what is bound serves only calls of the snapshot that it was compiled for. The lock is
held where a snapshot is taken, dropped, or something compiled is bound to it.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from rm_abstract.engines.base import MOST_EARLIER, Entry, Keeping
from rm_abstract.guards import sources

if TYPE_CHECKING:
    from rm_abstract.guards.found import Sources

MAX_PAUSE = 1024  # calls served by eager before a model that keeps changing is tried again
_FREE_CHANGES = 3  # changes in a row, without one routed call between, before pausing starts


class Guarded(Protocol):
    """A router, as far as its snapshots know it."""

    route: Any
    module_ref: weakref.ref[Any]

    def forgotten(self, what: str, where: str) -> None:
        """What was compiled is for another state of the module ("weights" or "structure")."""

    def keeper(self) -> Keeping | None:
        """The engine, where it keeps what is compiled for other states."""

    def is_another(self, known: bool = False) -> None:
        """The module's structure changed, and what was compiled for it was kept; ``known``: it is
        again what it was before."""


class Snapshots:
    """The snapshots of one router, which owns this object and is held weakly."""

    def __init__(self, router: Guarded) -> None:
        self._router = weakref.ref(router)
        self._route = router.route
        self._module_ref = router.module_ref
        self._streak = 0  # changes in a row
        self._routed_at_change = 0
        self.lock = threading.RLock()
        self.held = False  # one was taken, and no change of it was followed
        self.number = 0  # taken and dropped so far
        self.found: Sources | None = None  # the latest's, until the call that took it ends
        self.user_code = True
        self._kept: dict[int, bool] = {}  # set aside, by number: whether it reaches user code

    def take(self) -> tuple[str, str]:
        """A new one; (code, detail) when the module cannot be routed now."""
        with self.lock:
            self.held, self.number = False, self.number + 1
            self.found = None
            try:
                found = sources.of_module(self._module_ref())  # type: ignore[arg-type]
                self.user_code = found.user_code
                if found.unseen:
                    return "RM210", "; ".join(found.unseen[:3])
                code, detail = self._route.snapshot(found.rows())
            except (AttributeError, KeyError, TypeError, RuntimeError) as error:
                return "RM113", f"the module tree cannot be read: {error}"
            self.held = not code
            if self.held:
                self.found = found
            return code or "", detail

    def drop(self) -> None:
        with self.lock:
            self.held, self.number, self.found = False, self.number + 1, None
            self._route.drop()

    def changed(self) -> tuple[str, str]:
        """("weights" or "structure", where) when the module differs from the snapshot, else ""."""
        code, where = self._route.look()
        # RM113: another thread's call found it, and said so
        if code not in ("RM107", "RM118", "RM113"):
            return "", ""
        return self._route.stale()[0] or "structure", where

    def follow_change(self, what: str, where: str) -> bool:
        """Weights or structure moved: drop the entries. False when it happens too often to help."""
        routed = self._route.routed()
        self._streak = self._streak + 1 if routed == self._routed_at_change else 0
        self._routed_at_change = routed
        if what != "structure" or not self._set_aside():
            self._forget(what, where)
        if self._streak > _FREE_CHANGES:
            self._route.pause(change_reason(what), min(2**self._streak, MAX_PAUSE))
            return False
        return True

    def recall(self) -> bool:
        """Whether the module, which is not what it was at the latest snapshot, is what it was at
        one that was set aside: then that one holds, and what was compiled for it serves."""
        if not self._kept:
            return False
        with self.lock:
            router = self._router()
            if router is None or not self.held or self._route.stale()[0] != "structure":
                return False
            # Code of packages does not ask which of two equal lists an attribute holds.
            by_content = not self.user_code and not any(self._kept.values())
            number, present = self._route.holding(by_content), self.number
            if number is None:
                return False
            keeper = router.keeper()
            if keeper is None or not keeper.take_back(number, present):
                self._forget_kept(number)
                return False
            router.is_another(known=True)
            self._route.keep(present)
            self._route.take_back(number)
            self._kept[present], self.user_code = self.user_code, self._kept.pop(number)
            self.number, self.found = present + 1, None
            return True

    def forget_kept(self) -> None:
        """What was set aside does not come back."""
        with self.lock:
            for number in list(self._kept):
                self._forget_kept(number)

    def _set_aside(self) -> bool:
        router = self._router()
        keeper = None if router is None else router.keeper()
        if router is None or keeper is None or not self.held or not keeper.set_aside(self.number):
            return False
        router.is_another()
        self._route.keep(self.number)
        self._kept[self.number] = self.user_code
        self.held, self.number, self.found = False, self.number + 1, None
        while len(self._kept) > MOST_EARLIER:
            self._forget_kept(next(iter(self._kept)))
        return True

    def _forget_kept(self, number: int) -> None:
        del self._kept[number]
        self._route.forget_kept(number)
        router = self._router()
        keeper = None if router is None else router.keeper()
        if keeper is not None:
            keeper.forget_aside(number)

    def settled(self) -> int:
        """The number of a snapshot that the module agrees with, behind a run of the original: it
        may have moved buffers or set up something. What was compiled before is not for that."""
        with self.lock:
            if self.held:
                what, where = self.changed()
                if what:
                    self._forget(what, where)
            if not self.held:
                self.take()
            return self.number

    def bind(self, key: bytes, entry: Entry, taken: int) -> tuple[str, str]:
        """Serves calls of a key by what was compiled for a snapshot; (code, detail) when the module
        cannot be routed or something changed meanwhile. Then the next call compiles again."""
        with self.lock:
            if taken != self.number:
                return "RM112", "another thread's call saw the module change meanwhile"
            if not self.held:
                return self.take()
            what, where = self.changed()
            if what:
                self._forget(what, where)
                return "RM112", f"changed while it was compiled: {where}"
            code, detail = self._route.look()
            if not code:
                self._route.bind(key, entry.run, entry.direct)
            return code or "", detail

    def _forget(self, what: str, where: str) -> None:
        router = self._router()
        if router is not None:
            router.forgotten(what, where)


def change_reason(what: str) -> str:
    """The reason for a change of this kind, as ``route.stale()`` names it."""
    return "RM107" if what == "weights" else "RM118"
