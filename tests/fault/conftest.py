"""Fixtures of the fault tests."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_support import HERE, Workers


@pytest.fixture
def workers(tmp_path: Path):
    pool = Workers(tmp_path / "compiles.log")
    yield pool
    for process in pool.processes:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture(scope="session")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, str]], dict[str, str]]:
    """Environment that preloads kill_at.c with the given settings."""
    library = tmp_path_factory.mktemp("preload") / "kill_at.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "kill_at.c"), "-ldl"]
    subprocess.run(command, check=True)
    return lambda settings: {"LD_PRELOAD": str(library), **settings}
