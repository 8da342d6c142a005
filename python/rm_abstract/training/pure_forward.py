"""Which forwards only compute: what else one does, such as counting or storing, no program repeats.

The first step for batches of a new structure is eager's and is watched, before a capture could run
the forward a second time. What does more is left to eager, and so is a module that is changed in
front of one step after the other. Both are looked at again, after ever more steps.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from rm_abstract.base.decline import Decline
from rm_abstract.guards.purity import Effects, can_watch

_CHANGES = 4  # of the module in front of as many steps in a row: the next one will be another
_PAUSE, _LONGEST_PAUSE = 16, 4096  # steps


class PureForward:
    """Of one compiled step or loss."""

    def __init__(self) -> None:
        self._pure: set[Hashable] = set()  # structures of batches
        self._suspect = False  # what was found may have been a first call's
        self._changes = 0
        self._refusal: Decline | None = None
        self._left, self._pause = 0, _PAUSE  # steps without a look

    def check(self) -> None:
        """Raises Decline for a step that is left to eager without a look."""
        if self._left and self._refusal is not None:
            self._left -= 1
            raise self._refusal

    def knows(self, key: Hashable) -> bool:
        return key in self._pure

    def watch(self, module: Any, inputs: Any, targets: Any) -> Effects:
        """To be entered around one forward of eager's. Raises Decline where nothing can be seen."""
        if not can_watch():
            raise Decline("RM210", "a profiler is on: what the forward does cannot be watched")
        return Effects(module, [("inputs", inputs), ("targets", targets)], trains=True)

    def judge(self, effects: Effects, key: Hashable) -> Decline | None:
        """Behind that forward: why its steps stay eager's, where they do."""
        if not effects.found:
            self._suspect = False
            self._pure.add(key)
            return None
        if effects.settles and not self._suspect:
            self._suspect = True  # a first call may set something up: look once more
            return None
        return self._hold(Decline(effects.code, effects.found))

    def changed(self, what: str) -> None:
        """The module is no longer what it was. Raises Decline when it never stays the same."""
        self._pure.clear()
        self._changes += 1
        if self._changes > _CHANGES and not self._suspect:
            raise self._hold(Decline("RM118", f"{what}, in front of one step after the other"))

    def ran(self) -> None:
        """A program made a step."""
        self._changes, self._pause = 0, _PAUSE

    def _hold(self, refusal: Decline) -> Decline:
        self._refusal, self._left = refusal, self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return refusal
