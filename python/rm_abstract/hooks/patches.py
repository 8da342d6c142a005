"""The register of changed foreign attributes.

Invariant: an attribute is restored to the exact object that was there, and only while it still is
ours; a later patch by somebody else is left alone and reported (our function then passes through).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INHERITED = object()  # `before` of an attribute that the owner did not have in its own dict


@dataclass(frozen=True)
class Patch:
    """One changed attribute: ``owner.__dict__[name]`` was ``before`` and became ``after``."""

    owner: Any
    name: str
    before: Any
    after: Any
    why: str

    @property
    def target(self) -> str:
        owner = self.owner
        path = getattr(owner, "__qualname__", None)
        return f"{owner.__module__}.{path}.{self.name}" if path else f"{owner.__name__}.{self.name}"

    @property
    def in_place(self) -> bool:
        return vars(self.owner).get(self.name) is self.after

    def to_dict(self) -> dict[str, str]:
        return {
            "target": self.target,
            "before": _describe(self.before),
            "after": _describe(self.after),
            "why": self.why,
            "state": "in place" if self.in_place else "replaced by somebody else",
        }


class PatchSet:
    """All changes of one session, in the order they were made."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []

    def __iter__(self) -> Any:
        return iter(self._patches)

    def __len__(self) -> int:
        return len(self._patches)

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any], why: str) -> None:
        """Puts ``make(before)`` where ``owner.__dict__[name]`` (never the bound form) was.

        An inherited attribute (a descriptor of a base class) is overridden, and later deleted.
        """
        if any(patch.owner is owner and patch.name == name for patch in self._patches):
            return
        before = vars(owner).get(name, INHERITED)
        after = make(getattr(owner, name) if before is INHERITED else before)
        setattr(owner, name, after)
        self._patches.append(Patch(owner, name, before, after, why))

    def restore(self) -> list[str]:
        """Undoes every change still ours, last first; returns one line for each that is not."""
        conflicts = []
        while self._patches:
            patch = self._patches.pop()
            if patch.in_place and patch.before is INHERITED:
                delattr(patch.owner, patch.name)
            elif patch.in_place:
                setattr(patch.owner, patch.name, patch.before)
            else:
                conflicts.append(
                    f"{patch.target}: expected our function, got {_describe(_current(patch))}; "
                    "left in place, our function passes calls through"
                )
        return conflicts


def _current(patch: Patch) -> Any:
    return vars(patch.owner).get(patch.name)


def _describe(value: Any) -> str:
    if value is INHERITED:
        return "inherited"
    inner = getattr(value, "__func__", value)
    name = getattr(inner, "__qualname__", None)
    if name is None:
        return repr(value)
    kind = f"{type(value).__name__} " if inner is not value else ""
    return f"{kind}{inner.__module__}.{name}"
