"""Folders for files that the vendor's software reads and writes by path.

A folder goes with its use; one whose process crashed meanwhile goes when the next worker starts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "rm-rbln-"
_NAME = re.compile(rf"{_PREFIX}(\d+)-")


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder of this process's own, removed at the end."""
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as path:
        yield Path(path)


def sweep() -> None:
    """Removes this user's folders of processes that are gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        found = _NAME.match(path.name)
        with contextlib.suppress(OSError):
            if found and path.lstat().st_uid == os.geteuid() and not _runs(int(found[1])):
                shutil.rmtree(path, ignore_errors=True)


def _runs(pid: int) -> bool:
    return Path("/proc", str(pid)).exists()
