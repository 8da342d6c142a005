"""No exit, fork, change of weights or end of a program hangs while weights are packed in the
background. RM_HEAVY=1: 1,000 of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HEAVY = os.environ.get("RM_HEAVY") == "1"
COUNT = 250 if HEAVY else 15
SECONDS_EACH, SECONDS_TO_START = 20, 120  # generous: a machine may be busy with other things


@pytest.mark.parametrize("mode", ["exit", "fork", "update", "del"])
def test_nothing_hangs_in_the_middle_of_background_packing(mode: str, seed: int):
    done = subprocess.run(
        [sys.executable, str(HERE / "packing_stress.py"), mode, str(COUNT), str(seed)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_START + SECONDS_EACH * COUNT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"done {COUNT}\n"), done.stdout
