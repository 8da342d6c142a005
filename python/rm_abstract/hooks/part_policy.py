"""When the parts of a module are asked: which refusals of its router lead to them, and when.

A root that is refused for its own code has the next call of that kind measured, because the
original ran for this one and nothing runs it twice. A part that is refused hands on to the modules
below it. What parts are, and which modules become some, is in parts.py.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from rm_abstract.engines.base import Engine
from rm_abstract.hooks.parts import MakePart, Owned, Parts, may_help


class Whole(Owned, Protocol):
    """A router, as far as it is asked about its parts."""

    name: str  # of a part; of a root empty
    module_ref: weakref.ref[Any]

    @property
    def engine(self) -> Engine | None: ...


class Refusal(NamedTuple):
    """Of a call of which the next one is measured."""

    code: str
    detail: str
    snapshot: int


class PartPolicy:
    """Of one router, which owns this object and is held weakly. ``parts``: of the root that the
    router's module is a part of; a root makes its own once it was refused."""

    def __init__(self, router: Whole, parts: Parts | None, make: MakePart) -> None:
        self._router = weakref.ref(router)
        self._is_part = bool(router.name)
        self._parts = parts
        self._make = make
        self._lock = threading.Lock()
        # By key; None of those that an entry refused itself.
        self._due: dict[bytes | None, Refusal] = {}

    # ---- of a root -----------------------------------------------------------------------------

    def measures_next(self, key: bytes | None, code: str, detail: str, snapshot: int) -> bool:
        """Whether the next call of this kind tells which parts are worth it. Until then the kind
        is not refused for good."""
        if self._is_part or not self._may_serve(code) or not self._of_its_own().to_be_measured:
            return False
        self._due[key] = Refusal(code, detail, snapshot)
        return True

    @property
    def waits(self) -> bool:
        """Whether a refused call waits for its next one."""
        return bool(self._due)

    def due(self, key: bytes) -> tuple[Refusal | None, bool]:
        """The refusal of which this call is the next one; whether it was this very kind's."""
        keyed = self._due.pop(key, None)
        return keyed or self._due.pop(None, None), keyed is not None

    def to_be_measured(self, code: str) -> Parts | None:
        """What measures this call, which is refused; None when there is nothing to measure."""
        if self._is_part or not self._may_serve(code):
            return None
        parts = self._of_its_own()
        return parts if parts.to_be_measured else None

    def structure_changed(self) -> None:
        if self._parts is not None and not self._is_part:
            self._parts.structure_changed()

    def records(self) -> list[dict[str, Any]]:
        return [] if self._parts is None or self._is_part else self._parts.records()

    def forget(self) -> None:
        self._due.clear()

    def remove(self) -> bool:
        """Takes a root's parts out of their slots. False when it has none."""
        if self._parts is None or self._is_part:
            return False
        self._parts.remove()
        return True

    # ---- of a part -----------------------------------------------------------------------------

    def admit(self, leaves: Callable[[], tuple[Any, ...]]) -> None:
        """Raises Decline for a call that a part leaves alone."""
        if self._is_part and self._parts is not None:
            self._parts.admit(leaves())

    def leave(self, code: str) -> None:
        """A part was refused: what it holds may be served."""
        router = self._router()
        if router is not None and self._is_part and self._parts is not None:
            if self._may_serve(code):
                self._parts.below(router.module_ref(), router.name)

    def keep(self, record: dict[str, Any], name: str) -> None:
        """The module of a part is gone."""
        if self._parts is not None:
            self._parts.keep(record, name)

    # ---- of both -------------------------------------------------------------------------------

    def _may_serve(self, code: str) -> bool:
        """Whether calls refused for this reason may be served by routers of parts: nothing of the
        module is served otherwise, so no weight lies in two programs."""
        router = self._router()
        if router is None or not may_help(router.session, code, self._is_part):
            return False
        return router.engine is None or not router.engine.reports()

    def _of_its_own(self) -> Parts:
        with self._lock:
            if self._parts is None:
                root: Any = self._router()
                self._parts = Parts(root, self._make)
            return self._parts
