"""Artefacts that are files or folders of a vendor's: they go from the compiler to the cache to the
runtime without a copy in the user's process, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import rm_abstract as rm

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "fault"))

from npu_support import run, worker_pids  # noqa: E402
from test_plugin_verdicts import INPUTS, layers  # noqa: E402

HEAVY = os.environ.get("RM_HEAVY") == "1"
MIB = 4096 if HEAVY else 160

SCRIPT = """
import json, os, sys
sys.path[:0] = [{fault!r}, {integration!r}]
import rm_abstract as rm
from npu_support import run
from test_plugin_verdicts import INPUTS, layers

def resident(field):
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith(field))
    return int(line.split()[1]) << 10

with rm.init("big:0", compile_options={{"timeout_s": 0, "stall_timeout_s": 300}}):
    model = layers()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts here
    before = resident("VmRSS")
    result = run(calls=3, model=model, inputs=INPUTS)
    grown = resident("VmHWM") - before
(seen,) = result.report["models"]
print(json.dumps({{
    "right": result.right, "routed": result.routed, "codes": sorted(result.codes),
    "warned": result.warned, "grown": grown, "cache": seen["entries"][-1]["cache"],
}}))
"""


def served(form: str, folder: Path, mib: int = MIB) -> dict[str, Any]:
    """Two calls in a process of its own; ``folder`` is where its workers keep files."""
    folder.mkdir(exist_ok=True)
    source = SCRIPT.format(fault=str(TESTS / "fault"), integration=str(TESTS / "integration"))
    package = str(Path(rm.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": package, "TMPDIR": str(folder), "BIG_FORM": form}
    env |= {"BIG_MIB": str(mib), "RM_BACKEND_PATH": str(TESTS / "python_plugins")}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("form", ["file", "folder"] if HEAVY else ["file"])
@pytest.mark.sampled(1, of="large artefacts")
@pytest.mark.timeout(1800)  # 4 GiB go to the disk several times
def test_a_large_artefact_is_never_copied_in_the_users_process(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # what a process needs besides the artefact
        patch.setenv("RM_CACHE_DIR", str(tmp_path / "small"))
        besides = [served(form, tmp_path / "files", 1)["grown"] for _ in range(2)]
    for cache, small in zip(("miss", "hit"), besides, strict=True):
        found = served(form, tmp_path / cache)
        assert found["right"] and found["routed"] >= 1, found
        assert found["cache"] == cache
        # Mapped once, to be digested; a copy would be as much again.
        assert found["grown"] - small < 1.5 * (MIB << 20), (found["grown"] >> 20, small >> 20)
        assert not list((tmp_path / cache).glob("rm-artefact-*"))


@pytest.mark.sampled(1, of="large artefacts")
def test_a_damaged_file_is_made_again(own_cache: Path, tmp_path: Path) -> None:
    assert served("folder", tmp_path / "one", 8)["cache"] == "miss"
    objects = own_cache / "v1" / "objects"
    (largest,) = (path for path in objects.rglob("*.rmc") if path.stat().st_size > 8 << 20)
    largest.chmod(0o600)
    with largest.open("r+b") as file:
        file.seek(5 << 20)
        file.write(b"damaged")
    found = served("folder", tmp_path / "two", 8)
    assert found["right"] and found["routed"] >= 1 and found["cache"] == "miss"


@pytest.mark.parametrize("end", ["killed", "slow"])
def test_what_a_worker_leaves_goes_with_its_session(
    end: str, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed from outside, or removes its files for longer than it has time to end."""
    folder = tmp_path / "files"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name, value in {
        "TMPDIR": str(folder), "RM_BACKEND_PATH": str(TESTS / "python_plugins"),
        "BIG_FORM": "folder", "BIG_MIB": "1", "BIG_END": end,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with rm.init("big:0"):
        assert run(calls=2, model=layers(), inputs=INPUTS).routed == 1
        assert list(folder.glob("rm-artefact-*"))
        if end == "killed":
            for pid in worker_pids():
                os.kill(pid, signal.SIGKILL)
    assert not list(folder.glob("rm-artefact-*"))
