"""The one exception capture raises. It carries a reason code and names the operator or source line.

Codes: RM201 the export failed, RM203 a shape or a number depends on data, RM204 the call's inputs,
outputs or state cannot be represented, RM206 an operator draws random numbers, RM207 an operator
has no form in a program, RM208 the capture took too long.
"""

from __future__ import annotations

import torch

from rm_abstract.base.errors import CompileError


class CaptureError(CompileError):
    """A module could not be captured; the caller's module stays as it was."""

    passing = False  # True: it may succeed another time, though module and call are the same


def capture_error(code: str, message: str, remedy: str) -> CaptureError:
    """Builds the error in the house form `[where] expected ..., got ...; try ...`."""
    return CaptureError(f"[capture] {message}; try {remedy}", code=code, remedy=remedy)


def source_line(node: torch.fx.Node) -> str:
    """The user's line that made a node: the last frame torch recorded, "" when none."""
    frames = [s.strip() for s in (node.meta.get("stack_trace") or "").splitlines() if s.strip()]
    for i in range(len(frames) - 1, -1, -1):
        if frames[i].startswith("File "):
            code = frames[i + 1] if i + 1 < len(frames) else ""
            return f"{frames[i]}: {code}" if code else frames[i]
    return ""
