"""Test files of one name in two folders: without packages pytest collects only the first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def check(root: Path, files: list[Path]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for path in files:
        name = path.relative_to(root).as_posix()
        if name.startswith("tests/") and path.name.startswith("test_") and path.suffix == ".py":
            first = seen.setdefault(path.name, name)
            if first != name:
                yield f"{name}: {first} has the same name, which pytest cannot collect; rename one"
