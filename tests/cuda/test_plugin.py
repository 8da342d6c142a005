"""The plugin of the engine where it is built: it loads with a driver and without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

rm = pytest.importorskip("rm_abstract")

_SCRIPT = """
import json, sys
import rm_abstract as rm
from rm_abstract import _core, device
device.load_plugins()
before = [row["name"] for row in _core.backend.backends()]
(row,) = [row for row in device.backends() if row["name"] == "cuda"]
row.pop("devices")
print(json.dumps({"before": before, "row": row, "torch": "torch" in sys.modules}))
"""


def test_it_is_loaded_for_who_asks_and_says_why_it_cannot_serve() -> None:
    built = Path(rm.__file__).parent / "backends" / "rm_backend_cuda.so"
    if not built.is_file():
        pytest.skip("rm_backend_cuda.so is not built: RM_CUDA found no nvcc")
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120, check=True
    )
    found = json.loads(done.stdout)
    assert "cuda" not in found["before"]  # nobody named a GPU yet
    row = found["row"]
    assert len(row["build_id"]) >= 32
    if row["available"]:
        assert row["kernels"] > 40
    else:
        assert row["score"] == 0 or "driver" in row["reason"] or "no device" in row["reason"]
        assert row["reason"]
