"""The one exception capture raises. It carries a reason code and names the operator or source line.

Codes: RM201 the export failed, RM203 a shape or a number depends on data, RM204 the call's inputs,
outputs or state cannot be represented, RM206 an operator draws random numbers, RM207 an operator
has no form in a program, RM208 the capture took too long.
"""

from __future__ import annotations

from rm_abstract.base.errors import CompileError


class CaptureError(CompileError):
    """A module could not be captured; the caller's module stays as it was."""

    passing = False  # True: it may succeed another time, though module and call are the same


def capture_error(code: str, message: str, remedy: str) -> CaptureError:
    """Builds the error in the house form `[where] expected ..., got ...; try ...`."""
    return CaptureError(f"[capture] {message}; try {remedy}", code=code, remedy=remedy)
