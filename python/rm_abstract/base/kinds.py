"""The one table of kinds, which is C++'s: what the guard compares, what the key of a call holds and
what Python takes for granted cannot differ.
"""

from __future__ import annotations

from rm_abstract import _core

kind_of = _core.router.kind_of  # how values of this kind are compared
same_value = _core.router.same_value  # whether the guard would find two values the same
