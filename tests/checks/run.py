"""Checks of the repository itself, without any import of the product: layers, sizes, text, names,
and that pages name files that exist.

Each check yields one line a finding; the exit status is 1 when there is any.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import layers
import names
import pages
import python_layers
import sizes
import text

ROOT = Path(__file__).resolve().parents[2]


def tracked_files(root: Path) -> list[Path]:
    """What git tracks and what it would: a new file is checked before its first commit."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout
        names = [name for name in listing.decode().split("\0") if name]
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive: no git, no repository
        skipped = {".git", ".venv", "build", "dist", "__pycache__"}
        paths = (p.relative_to(root) for p in root.rglob("*"))
        names = [str(p) for p in paths if not skipped & set(p.parts)]
    return sorted(path for name in names if (path := root / name).is_file())


def main() -> int:
    files = tracked_files(ROOT)
    checks: list[Callable[[Path, list[Path]], Iterator[str]]] = [
        layers.check,
        python_layers.check,
        sizes.check,
        text.check,
        names.check,
        pages.check,
    ]
    findings = [finding for check in checks for finding in check(ROOT, files)]
    print("\n".join(findings) or f"{len(files)} files, no finding")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
