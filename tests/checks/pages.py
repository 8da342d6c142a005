"""Names that must hold: what may stand at the top level, and the files that the pages name.

A page names a file in backticks or as a link, relative to the repository, to the page, or to one of
the folders that the pages are about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

TOP = {
    *("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "NOTICE", "CHANGELOG.md"),
    *("src", "include", "python", "backends", "tests", "benchmarks", "examples", "docs"),
}
ENDS = "py|pyi|cpp|hpp|h|md|sh|def|cu|cuh|txt|c|json|tsv|toml|inc"
NAMED = re.compile(rf"`([\w./*-]+/[\w.*-]+\.(?:{ENDS}))(?::[^`]*)?`|\]\(([^)#:\s]+)(?:#[^)]*)?\)")
FOLDERS = ("", "python", "python/rm_abstract", "src", "include", "tests", "backends/cuda/ops")
HISTORY = ("docs/decisions/", "docs/experiments/")  # say what was true when they were written


def names_in(page: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each file that the page names."""
    for match in NAMED.finditer(page):
        yield page.count("\n", 0, match.start()) + 1, match[1] or match[2]


def check(root: Path, files: list[Path]) -> Iterator[str]:
    known = {path.relative_to(root).as_posix() for path in files}
    folders = {parent.as_posix() for name in known for parent in Path(name).parents}
    for name in sorted({Path(name).parts[0] for name in known}):
        if name not in TOP and not name.startswith("."):
            yield f"{name}: the top level holds only {', '.join(sorted(TOP))} and dot files"
    for page in sorted(n for n in known if n.endswith(".md") and not n.startswith(HISTORY)):
        bases = [root / folder for folder in FOLDERS] + [(root / page).parent]
        for line, name in names_in((root / page).read_text(encoding="utf-8")):
            found = (path for base in bases for path in base.glob(name.removeprefix("./")))
            inside = (path.resolve().relative_to(root.resolve()).as_posix() for path in found)
            if not any(path in known or path in folders for path in inside):
                yield f"{page}:{line}: names {name}, which is no file of the repository"
