"""The conformance suite on every plugin of the tree, and on plugins it must find fault with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

import rm_abstract
from rm_abstract.testing import plugins

IMPORTS = {"torch": ["--import", "torch"]}


@lru_cache
def conformance(path: Path, *options: str) -> dict[str, tuple[str, str]]:
    """Check -> (verdict, detail), from a process of its own: a plugin has one host at a time."""
    package = str(Path(rm_abstract.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
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
@pytest.mark.sampled(2)
def test_plugin_keeps_the_contract(name: str) -> None:
    outcomes = conformance(built(name), *IMPORTS.get(name, []))
    failed = {check: detail for check, (verdict, detail) in outcomes.items() if verdict == "failed"}
    assert not failed
    has_device = outcomes["device info is sensible"][0] != "skipped"
    least = 10 if has_device or name != "cuda" else 9  # without a GPU: what needs no device
    assert sum(verdict == "passed" for verdict, _ in outcomes.values()) >= least


@pytest.mark.parametrize("name", ["torch", "cpu"])
@pytest.mark.sampled(1)
def test_kernel_checks_really_run_on_kernel_backends(name: str) -> None:
    outcomes = conformance(built(name), *IMPORTS.get(name, []))
    for check in ("kernel rows are complete", "every operator ends with a fallback"):
        assert outcomes[check][0] == "passed"


EXECUTED = {
    "cpu": "kernels compute what torch computes",
    "sim": "programs compute what torch computes",
}


@pytest.mark.parametrize("name", sorted(EXECUTED))
@pytest.mark.sampled(1)
def test_results_are_really_compared(name: str) -> None:
    assert conformance(built(name))[EXECUTED[name]][0] == "passed"


PYTHON_PLUGINS = Path(__file__).resolve().parents[1] / "python_plugins"


def test_what_was_compared_and_what_was_not_is_said() -> None:
    conformance.cache_clear()
    found = conformance(PYTHON_PLUGINS / "rm_backend_small.py")
    verdict, detail = found["programs compute what torch computes"]
    assert verdict == "passed" and "gelu: it refuses gelu" in detail
    assert "relu: it refuses relu" not in detail


def test_an_operator_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    conformance.cache_clear()
    monkeypatch.setenv("SMALL_FAULT", "wrong_tanh")
    found = conformance(PYTHON_PLUGINS / "rm_backend_small.py")
    verdict, detail = found["programs compute what torch computes"]
    assert verdict == "failed" and detail.startswith("tanh: ") and "relu" not in detail


def test_a_plugin_that_shares_weights_of_one_name_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conformance.cache_clear()
    monkeypatch.setenv("SMALL_FAULT", "weights_by_name")
    found = conformance(PYTHON_PLUGINS / "rm_backend_small.py")
    verdict, detail = found["programs compute what torch computes"]
    assert verdict == "failed" and "weights of several programs: " in detail


ODD = {
    1: set(),  # a newer minor version is fine
    6: {"device info stays inside the callers struct"},
    7: {"its table is complete"},
    11: {"a device beyond the last is refused"},
    14: {"kernel rows are complete"},
    15: set(),
}


@pytest.mark.sampled(3)
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


WRONG = {
    "guide_plugin.cpp": ("furiosa", "GUIDE_WRONG", EXECUTED["sim"]),
    "kernel_plugin.cpp": ("onekernel", "KERNEL_WRONG", EXECUTED["cpu"]),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("source", sorted(WRONG))
def test_a_plugin_that_computes_something_else_is_found_out(source: str, tmp_path: Path) -> None:
    name, switch, check = WRONG[source]
    path = Path(__file__).parent / "plugins" / source
    right = conformance(compile_plugin(path, tmp_path / f"rm_backend_{name}.so"))
    assert not {c: d for c, (verdict, d) in right.items() if verdict == "failed"}
    assert right[check][0] == "passed"
    (tmp_path / "wrong").mkdir()
    out = tmp_path / "wrong" / f"rm_backend_{name}.so"
    wrong = conformance(compile_plugin(path, out, f"-D{switch}"))
    failed = {c: detail for c, (verdict, detail) in wrong.items() if verdict == "failed"}
    assert set(failed) == {check}
    assert "differs from torch's" in failed[check]


def compile_odd(kind: int, folder: Path) -> Path:
    source = Path(__file__).resolve().parents[1] / "abi" / "plugins" / "odd_plugin.cpp"
    return compile_plugin(source, folder / f"rm_backend_odd_{kind}.so", f"-DRM_ODD={kind}")


def compile_plugin(source: Path, out: Path, *defines: str) -> Path:
    flags = ["-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", *defines]
    include = [f"-I{rm_abstract.include_dir()}"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, *include, str(source), "-o", str(out)], check=True)
    return out
