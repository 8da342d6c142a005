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
from rm_abstract.worker.interpreter import of_another


@dataclass(frozen=True)
class Tool:
    """A program the vendor's compiler starts, and the Debian package it comes with."""

    program: str
    debian: str


@dataclass(frozen=True)
class Recipe:
    """What an environment consists of. ``pinned`` is installed without dependencies, because the
    vendor's own list drags in what is not needed; ``others`` is what of it is. ``by_hand`` is left
    to the user."""

    name: str
    variable: str
    pinned: Sequence[str]
    others: Sequence[str]
    tools: Sequence[Tool] = ()
    node: str = ""  # below the root: a device that is not there can be made up with it
    by_hand: Sequence[str] = ()  # from the vendor's own index, for those with an account there


# furiosa-torch loads with exactly this torch, and that build's libraries are linked against CUDA's:
# the nvidia wheels are never used, but without them torch does not import.
FURIOSA = Recipe(
    name="furiosa",
    variable="RM_FURIOSA_PYTHON",
    pinned=(
        "torch==2.10.0",
        "furiosa-torch==2026.4.0",
        "furiosa-kernels==2026.4.0",
        "nvidia-cublas-cu12==12.8.4.1",
        "nvidia-cuda-cupti-cu12==12.8.90",
        "nvidia-cuda-runtime-cu12==12.8.90",
        "nvidia-cudnn-cu12==9.10.2.21",
        "nvidia-cufft-cu12==11.3.3.83",
        "nvidia-cufile-cu12==1.13.1.3",
        "nvidia-curand-cu12==10.3.9.90",
        "nvidia-cusparse-cu12==12.5.8.93",
        "nvidia-cusparselt-cu12==0.7.1",
        "nvidia-nccl-cu12==2.27.5",
        "nvidia-nvjitlink-cu12==12.8.93",
        "nvidia-nvshmem-cu12==3.4.5",
    ),
    others=(
        "numpy",
        "sympy",
        "mpmath<1.4",
        "networkx",
        "jinja2",
        "fsspec",
        "filelock",
        "typing_extensions",
    ),
    tools=(Tool("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),),
    node="dev/rngd/npu0mgmt",
)
# What optimum-rbln 0.12.0 names, without what only audio and pictures need. torch-rbln stays out:
# it changes torch when that is imported.
RBLN = Recipe(
    name="rbln",
    variable="RM_RBLN_PYTHON",
    pinned=(
        "torch==2.13.0+cpu",
        "optimum-rbln==0.12.0",
        "transformers==5.15.1",
        "tokenizers==0.22.1",
        "diffusers==0.38.0",
    ),
    others=(
        "accelerate>=1.0.1",
        "filelock",
        "fsspec",
        "httpx<1.0.0",
        "huggingface-hub>=1.0,<2",
        "importlib_metadata",
        "jinja2",
        "mpmath<1.4",
        "networkx",
        "numpy",
        "packaging>=24.1",
        "Pillow",
        "pyyaml",
        "regex",
        "requests",
        "safetensors>=0.8.0rc0",
        "sympy",
        "tqdm",
        "typer",
        "typing_extensions",
    ),
    node="dev/rbln0",
    by_hand=("rebel-compiler==0.12",),
)
RECIPES = {recipe.name: recipe for recipe in (FURIOSA, RBLN)}


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
        environment = of_another(recipe.name)
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
        raise DeviceUnavailableError(
            f"[env] expected {' '.join(command[:4])} to work, got: {last}", code="RM401"
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
    """What an environment has and lacks, without importing anything of the vendor's here or
    there."""
    remedy = (
        f"rm-abstract env create {recipe.name} FOLDER, then {recipe.variable}=FOLDER/bin/python"
    )
    names = [wanted.partition("==")[0] for wanted in (*recipe.pinned, *recipe.by_hand)]
    code = (
        "import json, sys\nfrom importlib import metadata\nfound = {}\n"
        "for name in ['rm_abstract', *sys.argv[1:]]:\n"
        "    try: found[name] = metadata.version(name)\n"
        "    except metadata.PackageNotFoundError: found[name] = None\n"
        "print(json.dumps(found))"
    )
    try:
        done = subprocess.run(
            [python, "-c", code, *names], capture_output=True, text=True, timeout=120, check=False,
            env=of_another(recipe.name),
        )  # fmt: skip
        found = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return [Finding(f"{python} does not run: {error}", remedy)]
    if found is None:
        return [Finding(f"{python} does not run: {done.stderr.strip()[-300:]}", remedy)]
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
    if found["rm_abstract"] is None:
        findings.append(Finding("expected rm_abstract in it, got none", remedy))
    findings += [
        Finding(f"expected {tool.program} on PATH, got none", f"apt-get install {tool.debian}")
        for tool in missing_tools(recipe)
    ]
    if not findings:
        first = ", ".join(f"{name} {found[name]}" for name in names[:2])
        findings.append(Finding(f"{python}: {first}"))
    return findings


def missing_tools(recipe: Recipe) -> list[Tool]:
    return [tool for tool in recipe.tools if shutil.which(tool.program) is None]


def configured(recipe: Recipe) -> str:
    """The interpreter named for it; "" when none is."""
    return os.environ.get(recipe.variable, "")
