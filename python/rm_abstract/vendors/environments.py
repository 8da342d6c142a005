"""The Python environments of the vendors' software: making one, and finding out what one lacks.

A vendor's packages pin a torch of their own, so each has an environment beside the user's; the
worker runs there (`worker/interpreter.py`). This package is linked into it, not copied: after an
upgrade of the user's installation both sides of a worker are of the same version.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rm_abstract.base.errors import ConfigError, DeviceUnavailableError
from rm_abstract.vendors.recipes import RECIPES, Recipe, Tool
from rm_abstract.worker.interpreter import of_another


@contextmanager
def a_device_of(name: str) -> Iterator[None]:
    """Makes one device of a vendor up, for its compiler, which needs none: RM_HARDWARE_ROOT names a
    folder with its node. Leaves a machine that has one as it is."""
    recipe, before = RECIPES.get(name), os.environ.get("RM_HARDWARE_ROOT")
    if recipe is None or list(Path(before or "/").glob(recipe.node.replace("0", "[0-9]*"))):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="rm-check-") as root:
        node = Path(root, recipe.node)
        node.parent.mkdir(parents=True)
        node.touch()
        os.environ["RM_HARDWARE_ROOT"] = root
        try:
            yield
        finally:
            del os.environ["RM_HARDWARE_ROOT"]
            if before is not None:
                os.environ["RM_HARDWARE_ROOT"] = before


@dataclass(frozen=True)
class Finding:
    """One thing about an environment; ``remedy`` is empty when it is as it should be."""

    detail: str
    remedy: str = ""


def create(recipe: Recipe, folder: Path, say: Callable[[str], None]) -> Path:
    """Makes the environment in a folder that is not there yet, and returns its Python.

    The vendor's packages are downloaded by pip as it is configured. Raises ConfigError for a folder
    that exists, DeviceUnavailableError (RM401) with pip's last lines when it fails; the folder is
    removed then.
    """
    if folder.exists():
        raise ConfigError(f"[env] expected a folder that is not there yet, got '{folder}'")
    python = folder / "bin" / "python"
    try:
        say(f"making {folder}")
        environment = of_another(recipe.whose())
        _run([sys.executable, "-m", "venv", str(folder)], environment)
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
        say(f"installing {len(recipe.pinned)} pinned packages; this may be gigabytes")
        for packages in (["--no-deps", *recipe.pinned] if recipe.pinned else [], recipe.others):
            if packages:
                _run([*pip, *packages], environment)
        link_this_package(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return python


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        advice = "; try pip set up for PyTorch's index of CPU builds" if "+cpu" in last else ""
        raise DeviceUnavailableError(
            f"[env] expected {' '.join(command[:4])} to work, got: {last}{advice}", code="RM401"
        )


def link_this_package(folder: Path) -> None:
    """Makes rm_abstract, as installed here, importable in an environment of the same Python."""
    from importlib import metadata

    (site,) = (folder / "lib").glob("python*/site-packages")
    package = Path(__file__).resolve().parents[1]
    (site / package.name).symlink_to(package)
    # Its entry points name the plugins a worker may be asked for.
    info = Path(str(metadata.distribution("rm_abstract").locate_file(""))).resolve()
    for found in info.glob("rm_abstract-*.dist-info"):
        (site / found.name).symlink_to(found)


def examine(recipe: Recipe, python: str) -> list[Finding]:
    """What an environment has and lacks. Nothing of the vendor's is imported, here or there; torch
    is, and what is built for it, where the versions are right."""
    remedy = (
        f"rm-abstract env create {recipe.name} FOLDER, then {recipe.variable}=FOLDER/bin/python"
    )
    names = [wanted.partition("==")[0] for wanted in (*recipe.pinned, *recipe.by_hand)]
    try:
        found = _versions(recipe, python, names)
    except DeviceUnavailableError as error:
        return [Finding(str(error), remedy)]
    findings = []
    for requirement in recipe.pinned:
        name, _, wanted = requirement.partition("==")
        have = found[name]
        if have is None or have.partition("+")[0] != wanted.partition("+")[0]:
            findings.append(Finding(f"expected {requirement}, got {have or 'none'}", remedy))
    for requirement in recipe.by_hand:
        name, _, wanted = requirement.partition("==")
        if not f"{found[name]}.".startswith(f"{wanted}."):
            findings.append(
                Finding(
                    f"expected {requirement}, got {found[name] or 'none'}",
                    f"{python} -m pip install '{requirement}.*', from the vendor's own package "
                    "index: an account of the vendor's is needed",
                )
            )
    if found["rm_abstract"] is None and not recipe.optional:
        findings.append(Finding("expected rm_abstract in it, got none", remedy))
    findings += [
        Finding(f"expected {tool.program} on PATH, got none", f"apt-get install {tool.debian}")
        for tool in missing_tools(recipe)
    ]
    findings += _broken(recipe, python, found)
    if not findings:
        first = ", ".join(f"{name} {found[name]}" for name in names[:2])
        findings.append(Finding(f"{python}: {first}"))
    return findings


def _asked(recipe: Recipe, python: str, code: str, *arguments: str) -> str:
    """The last line of what a program prints there. Raises DeviceUnavailableError."""
    try:
        done = subprocess.run(
            [python, "-c", code, *arguments], capture_output=True, text=True, timeout=300,
            check=False, env={**of_another(recipe.whose()), "RM_DISABLE": "1"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceUnavailableError(f"{python} does not run: {error}", code="RM401") from None
    if done.returncode != 0:
        last = done.stderr.strip()[-300:] or f"exit status {done.returncode}"
        raise DeviceUnavailableError(f"{python} does not run: {last}", code="RM401")
    return (done.stdout.strip().splitlines() or [""])[-1]


def _versions(recipe: Recipe, python: str, names: Sequence[str]) -> dict[str, str | None]:
    """The version of every distribution; those of other names are told under the pinned ones."""
    code = (
        "import json, sys\nfrom importlib import metadata\nfound = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = metadata.version(name)\n"
        "    except metadata.PackageNotFoundError: found[name] = None\n"
        "print(json.dumps(found))"
    )
    printed = _asked(recipe, python, code, "rm_abstract", *names, *recipe.same.values())
    try:
        found: dict[str, str | None] = json.loads(printed)
    except ValueError:
        raise DeviceUnavailableError(f"{python} is no Python", code="RM401") from None
    for name, other in recipe.same.items():
        found[name] = found[name] or found[other]
    return found


def _broken(recipe: Recipe, python: str, found: Mapping[str, str | None]) -> list[Finding]:
    """What is installed and does not import: built for another torch, or without its libraries."""
    for name in recipe.imports:
        if not found.get(name):
            continue
        try:
            _asked(recipe, python, f"import {name}")
        except DeviceUnavailableError as error:
            last = str(error).strip().splitlines()[-1]
            remedy = (
                f"{python} -m pip install --force-reinstall --no-deps {name}=={found[name]}, with "
                "pip set up for PyTorch's index of CPU builds"
            )
            return [Finding(f"{name} {found[name]} does not import: {last}", remedy)]
    return []


def missing_tools(recipe: Recipe) -> list[Tool]:
    return [tool for tool in recipe.tools if shutil.which(tool.program) is None]


def configured(recipe: Recipe) -> str:
    """The interpreter named for it; "" when none is."""
    own, other = (
        os.environ.get(name, "") if name else "" for name in (recipe.variable, recipe.overruled_by)
    )
    return other if other and (own or has(recipe, other)) else own


def has(recipe: Recipe, python: str) -> bool:
    """Whether an environment is one of this recipe, where it may be one of another."""
    try:
        found = _versions(recipe, python, [recipe.optional, *recipe.same])
    except DeviceUnavailableError:
        return False
    return found[recipe.optional] is not None
