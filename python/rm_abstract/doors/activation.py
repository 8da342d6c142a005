"""``RM_ABSTRACT=1 python script.py``: initialises rm_abstract when the interpreter starts.

The wheel installs ``rm_abstract.pth`` beside the package. Python runs its one line at every start;
the line imports this module only where ``RM_ABSTRACT`` is set. Invariant: nothing here raises, a
script never fails because of this variable.
"""

from __future__ import annotations

import itertools
import os
import sys

VARIABLE = "RM_ABSTRACT"
_ON = ("1", "true", "yes", "on")
# Programs of our own that must not initialise themselves: workers compile for another process.
_OURS = ("rm_abstract.worker", "rm_abstract.engines.capturing", "rm_abstract")


_tried = False  # in a virtual environment Python reads every .pth file twice


def activate() -> bool:
    """Calls ``init()`` when the variable asks for it; True when it did. Raises nothing."""
    global _tried
    if _tried:
        return False
    _tried = True
    if os.environ.get(VARIABLE, "").lower() not in _ON or _is_ours():
        return False
    try:
        from rm_abstract import api

        api.init()
    except Exception as error:
        sys.stderr.write(f"rm_abstract: {VARIABLE} is set, but init() failed: {error}\n")
        return False
    return True


def _is_ours() -> bool:
    """Whether this interpreter runs `python -m` with a program of this package."""
    words = sys.orig_argv
    return any(a == "-m" and b in _OURS for a, b in itertools.pairwise(words))
