"""Programs that share weights on a device compute what they should, whatever their neighbours do.
RM_HEAVY=1: 1,000 acts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STEPS = 1000 if os.environ.get("RM_HEAVY") == "1" else 40


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("plugin", ["sim", "mine"])
@pytest.mark.sampled(1)
def test_weights_that_are_shared_are_the_right_ones(plugin: str, seed: int, tmp_path: Path) -> None:
    uploads = tmp_path / "uploads"
    env = {**os.environ, "MINE_UPLOADS": str(uploads), "RM_SIM_COMPILE_S": "0"}
    env["RM_BACKEND_PATH"] = str(HERE.parent / "python_plugins")
    done = subprocess.run(
        [sys.executable, str(HERE / "shared_weights_stress.py"), plugin, str(STEPS), str(seed)],
        capture_output=True, text=True, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    copies, last = done.stdout.splitlines()
    assert last == f"done {STEPS}", done.stdout
    if plugin == "mine":
        made = len(uploads.read_text().splitlines())
        assert 0 < made <= int(copies.split()[1]), (made, copies)
