"""The one way to say that a call stays with the original module."""

from __future__ import annotations


class Decline(Exception):
    """A decision not to route, with its reason code; returned by ``signature_of``, or raised by
    ``first_call`` and ``Entry.run`` *before* anything was changed. Never shown to a user."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail
