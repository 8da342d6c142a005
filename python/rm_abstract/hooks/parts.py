"""The parts of a model that cannot be captured whole: routers of the largest modules that can.

The model itself runs in PyTorch and calls them. A part is a router like any other, with its own
guard, watch and gate; what it adds is here: which modules become parts, and what they leave alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from rm_abstract import _core
from rm_abstract.base.decline import Decline
from rm_abstract.base.reasons import group_of
from rm_abstract.hooks.host import SLOT, RouterHost
from rm_abstract.hooks.probe import Measured, Times

# Reasons that lie in the code of the module or in what it is given: modules below may lack them.
_ITS_OWN = frozenset(
    {"RM104", "RM201", "RM203", "RM204", "RM205", "RM206", "RM207", "RM208", "RM209", "RM210"}
)
_IN_A_PART = _ITS_OWN | {"RM114"}
# A routed call costs some microseconds in any case, and a capture a second.
_WORTH_S = 200e-6
_WORTH_SHARE = 0.005
_MOST = 128  # parts of one model
_CAPTURES_S = 30.0  # of all parts together in one process: a call of the model waits for them
_MEASUREMENTS = 4  # of one model, which changes its structure again and again


class Owned(Protocol):
    """A router, of a root or of a part, as far as parts know it."""

    session: RouterHost
    compile_seconds: float

    def record(self) -> dict[str, Any]: ...

    def remove(self) -> None: ...


# The class of routers: (module, session, who caught it, the parts it belongs to, the part's name)
MakePart = Callable[[Any, RouterHost, str, "Parts", str], Owned]


def may_help(session: RouterHost, code: str, in_a_part: bool) -> bool:
    """Whether what is refused for this reason may have parts that are not."""
    return (
        code in (_IN_A_PART if in_a_part else _ITS_OWN)
        and session.resolved.backend == "cpu"
        and session.settings.text("inference_engine") != "torch"
        and session.settings.flag("serve_parts")
        and session.settings.fallback_for(group_of(code)) != "error"
        and session.settings.fallback_for("routing") != "error"
    )


class Parts:
    """The parts of one root. Its router owns this object; parts belong to their modules' slots."""

    def __init__(self, root: Owned, make: MakePart) -> None:
        self._root = weakref.ref(root)
        self._make = make
        self._lock = threading.Lock()
        self._measured: Measured | None = None
        self._measurements = 0
        self._removals = 0
        self._stale = True
        self._parts: dict[str, tuple[weakref.ref[Owned], float]] = {}  # with the share of a call
        self._kept: list[dict[str, Any]] = []  # records of parts whose module is gone

    @property
    def to_be_measured(self) -> bool:
        return self._stale and self._measurements < _MEASUREMENTS

    def structure_changed(self) -> None:
        """Other modules may be there: they are measured when the root is refused again."""
        self._stale = True

    def measure(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the root, which the original serves. Afterwards its parts are armed."""
        with self._lock:
            mine, self._stale = self._stale, False
            self._measurements += mine
            removals = self._removals
        if not mine:  # another thread's call is measured
            return _core.router.call_original(module, args, kwargs)
        measured = Measured()
        try:
            with measured.during(module):
                output = module._call_impl(*args, **kwargs)
        except BaseException:  # the user's: half a call tells nothing, and another is measured
            self._stale = True
            raise
        with self._lock:
            if removals == self._removals:  # else the session ended, or the model was unloaded
                self._measured = measured
                self._arm(module, "")
        return output

    def below(self, module: Any, name: str) -> None:
        """A part was refused: the modules it holds take its place."""
        with self._lock:
            self._arm(module, name)

    def _arm(self, module: Any, name: str) -> None:
        root, measured = self._root(), self._measured
        if root is None or measured is None or measured.whole <= 0.0 or self._too_long():
            return

        def worth(times: Times) -> bool:
            share = times.seconds / measured.whole
            return times.seconds / times.calls >= _WORTH_S and share >= _WORTH_SHARE

        found = measured.chosen(module, name, worth)
        found.sort(key=lambda part: -part[2].seconds)
        for path, part, times in found[: max(0, _MOST - len(self._parts))]:
            if id(part) in root.session.detached:  # measured to be faster without
                continue
            router = self._make(part, root.session, "part", self, path)
            part.__dict__[SLOT] = router
            root.session.adopt(router)
            self._parts[path] = weakref.ref(router), times.seconds / measured.whole

    # ---- what a part leaves to PyTorch ---------------------------------------------------------

    def admit(self, leaves: tuple[Any, ...]) -> None:
        """Raises Decline for a call of a part, of which these are tensors and other objects."""
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            # It writes one layer of a cache, of which a program would take and give all.
            raise Decline("RM114", "a part of a model is not served with caches")
        if self._too_long():
            why = f"the parts of this model together took more than {_CAPTURES_S:.0f} s"
            raise Decline("RM208", why)

    def _too_long(self) -> bool:
        return sum(part.compile_seconds for part in self._living()) > _CAPTURES_S

    def _living(self) -> list[Owned]:
        return [part for ref, _ in list(self._parts.values()) if (part := ref()) is not None]

    # ---- what becomes of them ------------------------------------------------------------------

    def remove(self) -> None:
        """Takes the parts out of their slots; they are chosen anew when the root is refused."""
        with self._lock:
            living = self._living()
            self._parts.clear()
            self._removals += 1
            self._measured, self._stale, self._measurements = None, True, 0
        for part in living:
            part.remove()

    def keep(self, record: dict[str, Any], name: str) -> None:
        """The module of a part is gone."""
        if name in self._parts:  # else it was removed before
            share = self._parts[name][1]
            self._kept.append({**record, "part": name, "share": round(share, 4)})

    def records(self) -> list[dict[str, Any]]:
        """Largest first."""
        rows = list(self._kept)
        for name, (ref, share) in list(self._parts.items()):
            part = ref()
            if part is not None:
                rows.append({**part.record(), "part": name, "share": round(share, 4)})
        return sorted(rows, key=lambda row: -float(row["share"]))
