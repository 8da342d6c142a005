"""The conformance suite on every plugin of the tree, and on plugins it must find fault with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rm_abstract.testing import plugins

IMPORTS = {"torch": ["--import", "torch"]}


def conformance(path: Path, *options: str) -> dict[str, tuple[str, str]]:
    """Check -> (verdict, detail), from a process of its own: a plugin has one host at a time."""
    source = Path(__file__).resolve().parents[2] / "python"
    env = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-m", "rm_abstract.testing.conformance", str(path), "--json", *options],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode in (0, 1), done.stderr
    rows = json.loads(done.stdout)
    assert (done.returncode == 1) == any(row["verdict"] == "failed" for row in rows)
    return {row["check"]: (row["verdict"], row["detail"]) for row in rows}


def built(name: str) -> Path:
    """The plugin, or a skip for one that this machine's build leaves out."""
    try:
        return plugins.built_plugin(name)
    except FileNotFoundError as error:
        if name in ("null", "torch", "cpu"):
            raise  # built everywhere: missing means the build is broken
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["null", "torch", "cpu", "cuda", "sim"])
def test_plugin_keeps_the_contract(name: str) -> None:
    outcomes = conformance(built(name), *IMPORTS.get(name, []))
    failed = {check: detail for check, (verdict, detail) in outcomes.items() if verdict == "failed"}
    assert not failed
    assert sum(verdict == "passed" for verdict, _ in outcomes.values()) >= 10


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_kernel_checks_really_run_on_kernel_backends(name: str) -> None:
    outcomes = conformance(built(name), *IMPORTS.get(name, []))
    for check in ("kernel rows are complete", "every operator ends with a fallback"):
        assert outcomes[check][0] == "passed"


ODD = {
    1: set(),  # a newer minor version is fine
    6: {"device info stays inside the callers struct"},
    7: {"its table is complete"},
    11: {"a device beyond the last is refused"},
    14: {"kernel rows are complete"},
    15: set(),
}


@pytest.mark.parametrize("kind", sorted(ODD))
def test_a_plugin_that_breaks_a_rule_is_found_out(kind: int, tmp_path: Path) -> None:
    outcomes = conformance(compile_odd(kind, tmp_path))
    failed = {check for check, (verdict, _) in outcomes.items() if verdict == "failed"}
    assert ODD[kind] <= failed
    if not ODD[kind]:
        assert not failed & {"its table is complete", "kernel rows are complete"}


def test_a_file_that_is_no_plugin_fails_to_load(tmp_path: Path) -> None:
    path = tmp_path / "rm_backend_text.so"
    path.write_text("no library")
    assert conformance(path)["it loads"][0] == "failed"


def compile_odd(kind: int, folder: Path) -> Path:
    root = Path(__file__).resolve().parents[2]
    dlpack = subprocess.run(
        [sys.executable, str(root / "cmake" / "find_dlpack.py")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    out = folder / f"rm_backend_odd_{kind}.so"
    subprocess.run(
        [
            os.environ.get("CXX", "c++"),
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-DRM_ODD={kind}",
            f"-I{root / 'include'}",
            f"-I{dlpack}",
            str(root / "tests" / "abi" / "plugins" / "odd_plugin.cpp"),
            "-o",
            str(out),
        ],
        check=True,
    )
    return out
