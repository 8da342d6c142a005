"""What a worker's Python is given of the user's environment: in another interpreter the packages
are those of that environment, whatever lies on the user's PYTHONPATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

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
