"""What a worker's Python is given of the user's environment: in another interpreter the packages
are those of that environment, whatever lies on the user's PYTHONPATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import rm_abstract as rm
from rm_abstract.generation.vllm import options
from rm_abstract.worker import interpreter


def given(backend: str) -> dict[str, str]:
    return dict(row.split("=", 1) for row in interpreter.environment(backend))


def test_our_own_interpreter_keeps_the_users_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["here", "/there"]))
    package, *rest = given("zeta")["PYTHONPATH"].split(os.pathsep)
    assert Path(package, "rm_abstract", "worker").is_dir()
    assert rest == [os.path.abspath("here"), "/there"]


def test_another_interpreter_is_not_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    monkeypatch.setenv("PYTHONHOME", "/of/the/user")
    monkeypatch.setenv("RM_ZETA_PYTHON", "/opt/zeta/bin/python")
    monkeypatch.setenv("RM_ZETA_LEVEL", "3")
    found = given("zeta")
    assert not {"PYTHONPATH", "PYTHONHOME"} & set(found) and found["RM_ZETA_LEVEL"] == "3"
    monkeypatch.setenv("RM_ZETA_PYTHONPATH", os.pathsep.join(["sdk", "/more"]))
    assert given("zeta")["PYTHONPATH"] == os.pathsep.join([os.path.abspath("sdk"), "/more"])


def test_vllm_in_another_interpreter_is_not_given_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's worker needs a folder of ours on its path; that must not bring the user's along."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONHOME", "/of/the/user")
    (ours, *rest) = options.environment({}, "cpu")["PYTHONPATH"].split(os.pathsep)
    assert Path(ours, "rm_vllm_reload.py").is_file() and rest == [str(tmp_path)]
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    arguments = "class EngineArgs:\n    tensor_parallel_size: int = 1\n"
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(arguments)
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setenv("RM_VLLM_PYTHON", str(python))
    found = options.environment({}, "cpu")
    assert found["PYTHONPATH"] == ours and "PYTHONHOME" not in found
    with pytest.raises(rm.Error, match="RM_VLLM_PYTHON"):  # the worker would not find that one
        options.names()
    monkeypatch.setenv("RM_VLLM_PYTHONPATH", str(tmp_path))
    assert options.environment({}, "cpu")["PYTHONPATH"] == os.pathsep.join([ours, str(tmp_path)])
    assert "tensor_parallel_size" in options.names()


def test_packages_are_looked_for_where_the_worker_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "zeta_sdk-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zeta-sdk\nVersion: 1.0\n")
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setenv("RM_ZETA_PYTHON", str(python))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not interpreter.has_packages("zeta", "zeta-sdk")
    monkeypatch.setenv("RM_ZETA_PYTHONPATH", str(tmp_path))
    assert interpreter.has_packages("zeta", "zeta-sdk")
    monkeypatch.delenv("RM_ZETA_PYTHON")
    assert interpreter.has_packages("zeta", "zeta-sdk")
