"""File sizes: sources of at most 800 lines, nothing large but the shipped checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 800
SOURCES = {".c", ".cpp", ".cu", ".h", ".hpp", ".py", ".sh", ".cmake"}
MAX_BYTES = 512 * 1024
LARGE = {"examples/models/tiny_llama/model.safetensors": 6_000_000}  # allowed, with their own limit


def check(root: Path, files: list[Path]) -> Iterator[str]:
    for path in files:
        name = path.relative_to(root).as_posix()
        limit = LARGE.get(name, MAX_BYTES)
        if (size := path.stat().st_size) > limit:
            yield f"{name}: {size} bytes, at most {limit} may be committed"
        if path.suffix in SOURCES:
            lines = path.read_bytes().count(b"\n")
            if lines > MAX_LINES:
                yield f"{name}: {lines} lines, at most {MAX_LINES}; split it by reason to change"
