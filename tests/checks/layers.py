"""The dependency rule of docs/architecture.md: who may include whom.

A layer may include itself and the layers to its right in ORDER. Nothing under src/ includes torch;
a plugin under backends/ sees its own folder and include/rm/ only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ORDER = (
    "bindings control engine frontend autograd passes runtime plan cache backend select "
    "ops ir worker base"
).split()
# the cache and the workers know bytes, not graphs
ONLY = {"cache": {"cache", "base"}, "worker": {"worker", "base"}}
RANK = {layer: rank for rank, layer in enumerate(ORDER)}
SOURCES = {".cpp", ".hpp", ".h", ".c", ".cu", ".inc", ".def"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def may_know(layer: str, other: str) -> bool:
    return RANK[layer] <= RANK[other] and other in ONLY.get(layer, RANK)


def violation(root: Path, parts: tuple[str, ...], include: str) -> str | None:
    """Why the file at `parts` may not include `include`, or None."""
    first = include.split("/")[0]
    if first in {"torch", "ATen", "c10"}:
        return "torch stays outside: tensors cross by DLPack, ATen operators by backends/torch"
    if first not in RANK:
        return None
    if parts[0] == "src" and parts[1] in RANK and not may_know(parts[1], first):
        return f"layer {parts[1]} may not know layer {first}"
    if parts[0] == "backends" and not (root.joinpath(*parts[:2]) / include).is_file():
        return f"a plugin sees include/rm/ only, not src/{first}"
    if parts[0] == "include":
        return f"the public headers stand alone, without src/{first}"
    return None


def check(root: Path, files: list[Path]) -> Iterator[str]:
    for path in files:
        parts = path.relative_to(root).parts
        if parts[0] in {"src", "backends", "include"} and path.suffix in SOURCES:
            for include in INCLUDE.findall(path.read_text()):
                if reason := violation(root, parts, include):
                    yield f"{path.relative_to(root)}: includes {include}: {reason}"
