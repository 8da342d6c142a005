"""Recurrent layers, as `capture/recurrent.py` writes them."""

from __future__ import annotations

from collections.abc import Sequence

from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call, Handler


def _recurrent(c: Call) -> Sequence[Value | None]:
    operands = [c["x"], c["w"], c["h"], c["c"], c["bias"], c["proj"]]
    while operands[-1] is None:
        operands.pop()
    types = c.types if c["c"] is not None else c.types[:2]
    results: list[Value | None] = list(
        c.b.multi(
            "recurrent",
            operands,
            types,
            cell=str(c["cell"]),
            reverse=int(c["reverse"]),
            batch_first=int(c["batch_first"]),
        )
    )
    return results if len(results) == 3 else [*results, None]


TABLE: dict[str, Handler] = {"rm_abstract.recurrent.default": _recurrent}
