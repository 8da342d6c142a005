"""A plugin written from docs/plugin_guide.md and the public headers alone: it keeps the contract,
and an unmodified model runs on it, in workers, on a made-up machine that has its device node.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rm_abstract

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as the guide says: the installed headers, no build system."""
    out = tmp_path_factory.mktemp("guide") / "rm_backend_furiosa.so"
    source = ROOT / "tests" / "conformance" / "plugins" / "guide_plugin.cpp"
    flags = ["-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    include = [f"-I{rm_abstract.include_dir()}"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, *include, str(source), "-o", str(out)], check=True)
    return out


def environment(**more: str) -> dict[str, str]:
    package = str(Path(rm_abstract.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": package, **more}


def test_it_passes_the_conformance_suite(plugin: Path) -> None:
    command = [sys.executable, "-m", "rm_abstract.testing.conformance", str(plugin), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    rows = json.loads(done.stdout)
    assert done.returncode == 0, rows
    passed = {row["check"] for row in rows if row["verdict"] == "passed"}
    assert {"an artefact survives serialising", "a cancelled compilation stops"} <= passed
    assert "programs compute what torch computes" in passed


def test_a_model_runs_on_it(plugin: Path, tmp_path: Path) -> None:
    (tmp_path / "dev" / "rngd").mkdir(parents=True)
    (tmp_path / "dev" / "rngd" / "npu0mgmt").touch()
    tests = str(ROOT / "tests" / "fault")
    source = (
        f"import sys; sys.path.insert(0, {tests!r})\n"
        "from npu_support import rm, run\n"
        "rm.init('npu:0', fallback='error:capture,compile,device,correctness')\n"
        "print(rm.current_device(), run().right, rm.explain().routed)\n"
    )
    env = environment(RM_BACKEND_PATH=str(plugin), RM_HARDWARE_ROOT=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=env, timeout=200
    )
    assert done.stdout.split() == ["furiosa:0", "True", "2"], done.stderr
