"""The relations of sizes that a capture relies on: what torch.export found out beside ranges."""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped,unused-ignore]
from torch.export import ExportedProgram

from rm_abstract.capture.dims import SymbolNames
from rm_abstract.capture.errors import capture_error

_SIGNS = {"Eq": "==", "Equality": "==", "Ne": "!=", "Unequality": "!=", "LessThan": "<="}
_SIGNS |= {"GreaterThan": ">=", "StrictLessThan": "<", "StrictGreaterThan": ">"}


def relations_of(program: ExportedProgram, symbols: SymbolNames) -> list[str]:
    """Guards among the program's symbols, in the grammar of the IR: "s0<=512", "s1==s0+1"."""
    known = set(symbols.names)
    found: list[str] = []
    shape_env = _shape_env(program)
    for guard in shape_env.guards if shape_env is not None else ():
        expr = shape_env.simplify(guard.expr)
        parts = expr.args if isinstance(expr, sympy.And) else (expr,)
        for part in parts:
            sign = _SIGNS.get(type(part).__name__)
            if part in (True, sympy.true) or not part.free_symbols <= known:
                continue
            if sign is None:
                raise capture_error(
                    "RM201", f"expected guards that compare sizes, got {part}", "eager execution"
                )
            text = f"{symbols.text(part.args[0])}{sign}{symbols.text(part.args[1])}"
            if text not in found:
                found.append(text)
    return found


def _shape_env(program: ExportedProgram) -> Any:
    for node in program.graph.nodes:
        fake = getattr(node.meta.get("val"), "fake_mode", None)
        if fake is not None and fake.shape_env is not None:
            return fake.shape_env
    return None
