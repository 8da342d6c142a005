"""`rm-abstract doctor`: is everything there, and if not, the command that fixes it.

Invariant: it never fails because of what it examines. Every check runs on its own; torch,
transformers and the backend plugins are loaded in child processes (a broken one may kill them).
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import click

from rm_abstract._version import __version__

# Programs that switch it on inside themselves, and how they are asked.
_HOSTS = {
    "pytest": "pytest -p rm_abstract.pytest_plugin",
    "IPython": "%load_ext rm_abstract",
}
_RUNNER = "python -m rm_abstract script.py, -m module, -c code, or - for standard input"
_MINIMUM = {"torch": (2, 10), "transformers": (5, 0)}


@dataclass
class Finding:
    name: str
    status: str  # "ok", "warn", "fail"
    detail: str
    remedy: str = ""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def doctor(as_json: bool) -> None:
    """Examine this installation; says what is wrong and the command that fixes it."""
    findings = examine()
    worst = any(finding.status == "fail" for finding in findings)
    if as_json:
        rows = [asdict(finding) for finding in findings]
        click.echo(json.dumps({"version": __version__, "ok": not worst, "checks": rows}, indent=2))
    else:
        click.echo(f"rm_abstract {__version__}")
        for finding in findings:
            click.echo(f"[{finding.status:4}] {finding.name}: {finding.detail}")
            if finding.remedy:
                click.echo(f"       fix: {finding.remedy}")
    sys.exit(1 if worst else 0)


def examine() -> list[Finding]:
    findings = []
    for name, check in _CHECKS.items():
        try:
            findings += check()
        except Exception as error:  # the doctor reports what breaks, whatever it is
            findings.append(Finding(name, "fail", f"the check itself failed: {error!r}"))
    return findings


def _python() -> list[Finding]:
    detail = f"{platform.python_version()} at {sys.executable}, {platform.platform()}"
    return [Finding("python", "ok", detail)]


def _core() -> list[Finding]:
    try:
        from rm_abstract import _core as core
    except ImportError as error:
        return [Finding("core", "fail", str(error), "pip install --force-reinstall rm_abstract")]
    return [Finding("core", "ok", str(core.__file__))]


def _library(name: str) -> list[Finding]:
    """Version from metadata, then a real import in a child."""
    minimum = _MINIMUM[name]
    wanted = ".".join(map(str, minimum))
    install = f"pip install '{name}>={wanted}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return [Finding(name, "warn", "not installed; models cannot be loaded", install)]
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < minimum:
        return [Finding(name, "fail", f"{version} is older than {wanted}", install)]
    code = f"import {name}; print({name}.__version__)"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        return [Finding(name, "fail", f"{version} does not import: {last}", install)]
    return [Finding(name, "ok", child.stdout.strip().splitlines()[-1])]


def _settings() -> list[Finding]:
    from rm_abstract import device
    from rm_abstract.base import config
    from rm_abstract.base.errors import ConfigError

    try:
        settings = config.resolve({})
        device.require_known(settings)
    except ConfigError as error:
        return [Finding("settings", "fail", str(error), error.remedy)]
    changed = [
        f"{name}={text!r} from {source}"
        for name, (text, source) in settings.values.items()
        if source != "default"
    ]
    return [Finding("settings", "ok", "; ".join(changed) or "all defaults")]


# Prints what the plugins say as JSON, after torch, which the bridge needs, came to the core.
_LIST_DEVICES = """
import json
from rm_abstract import device
there = device.import_torch_if_installed()
print(json.dumps([there, device.backends(), device.devices()], default=str))
"""

_REPORT = "rm-abstract doctor --json"


def _devices() -> list[Finding]:
    child = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", _LIST_DEVICES],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if child.returncode != 0:
        return [_died(child)]
    torch_imported, rows, usable = json.loads(child.stdout.strip().splitlines()[-1])
    findings = []
    if not torch_imported:
        findings.append(Finding("backend torch", "warn", "torch is not there: no bridge"))
    for row in rows:
        devices = ", ".join(str(info["name"]) for info in row["devices"])
        if row["available"]:
            findings.append(Finding(f"backend {row['name']}", "ok", f"{row['version']} {devices}"))
        else:
            detail = f"{row['code']} {row['reason']}".strip()
            findings.append(Finding(f"backend {row['name']}", "warn", detail))
    if usable:
        findings.append(Finding("devices", "ok", ", ".join(usable)))
    else:
        remedy = "pip install --force-reinstall rm_abstract"
        findings.append(Finding("devices", "fail", "no usable device, not even cpu", remedy))
    return findings


def _died(child: subprocess.CompletedProcess[str]) -> Finding:
    """A process that loads the core, then torch, then the plugins, and did not end well."""
    lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
    if child.returncode > 0:
        last = lines[-1] if lines else f"exit status {child.returncode}"
        command = f"{os.path.basename(sys.executable)} -c 'import rm_abstract._core, torch'"
        remedy = f"run {command} and mend what it names, or report this with `{_REPORT}`"
        return Finding("devices", "fail", f"they cannot be listed: {last}", remedy)
    name = signal.Signals(-child.returncode).name
    place = next((line for line in lines if line.startswith("File ")), "an unknown place")
    detail = f"a process with the core, then torch, then the plugins ended by {name}: {place}"
    remedy = f"import torch before rm_abstract, and report this with `{_REPORT}`"
    return Finding("devices", "fail", detail, remedy)


def _vendors() -> list[Finding]:
    """The environments of vendors' software that were named, and their tools."""
    from rm_abstract.vendors import environments
    from rm_abstract.vendors.recipes import RECIPES

    findings = []
    for name, recipe in RECIPES.items():
        python = environments.configured(recipe)
        if not python:
            continue
        title = f"{name} environment"
        if recipe.optional and not environments.has(recipe, python):
            findings.append(
                Finding(title, "ok", f"{python} has no {recipe.optional}: {recipe.use}")
            )
            continue
        for one in environments.examine(recipe, python):
            status = "warn" if one.remedy else "ok"
            findings.append(Finding(title, status, one.detail, one.remedy))
    return findings


def _cache() -> list[Finding]:
    from rm_abstract.base import config

    text = config.resolve({}).text("cache_dir")
    base = os.environ.get("XDG_CACHE_HOME")
    default = Path(base) / "rm_abstract" if base else Path.home() / ".rm_abstract" / "cache"
    folder = Path(text) if text else default
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not os.access(nearest, os.W_OK):
        remedy = f"chown {os.getuid()} {nearest}, or set RM_CACHE_DIR"
        return [Finding("cache", "warn", f"{folder} cannot be written (RM603)", remedy)]
    if folder.exists() and (folder.stat().st_mode & 0o022 or folder.stat().st_uid != os.geteuid()):
        remedy = f"chmod go-w {folder}"
        return [Finding("cache", "warn", f"{folder} can be written by others: not used", remedy)]
    return [Finding("cache", "ok", str(folder))]


def _openmp() -> list[Finding]:
    """One OpenMP runtime in the process: two fight over the cores."""
    code = (
        "import torch\n"
        "try:\n"
        "    import rm_abstract; rm_abstract.devices()\n"
        "except Exception: pass\n"
        "lines = [line.split()[-1] for line in open('/proc/self/maps')]\n"
        "print('|'.join(sorted({p for p in lines if 'libgomp' in p or 'libiomp' in p})))"
    )
    if not sys.platform.startswith("linux"):
        return []
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    if child.returncode != 0:
        return []  # torch is missing or broken: said above
    runtimes = [path for path in child.stdout.strip().split("|") if path]
    if len(runtimes) > 1:
        remedy = "start the script with torch imported before other OpenMP users"
        return [Finding("openmp", "warn", "several runtimes: " + ", ".join(runtimes), remedy)]
    return [Finding("openmp", "ok", ", ".join(runtimes) or "none loaded")]


def _doors() -> list[Finding]:
    """Ways to switch it on that need something installed beside the package."""
    found = []
    line = Path(__file__).resolve().parents[2] / "rm_abstract.pth"
    value = os.environ.get("RM_ABSTRACT")
    state = "not set" if value is None else f"set to {value!r}"
    if line.is_file():
        found.append(Finding("RM_ABSTRACT", "ok", f"{state}; read at every start of this Python"))
    else:
        detail = f"{state}, but {line} is missing: the variable has no effect"
        remedy = "pip install --force-reinstall rm_abstract"
        status = "fail" if value else "warn"
        found.append(Finding("RM_ABSTRACT", status, detail, remedy))
    names = [point.name for point in metadata.entry_points(group="torch_dynamo_backends")]
    if "rm_abstract" in names:
        found.append(Finding("torch.compile", "ok", 'backend="rm_abstract" is registered'))
    else:
        remedy = "pip install --force-reinstall rm_abstract"
        found.append(Finding("torch.compile", "warn", "the backend is not registered", remedy))
    for package, use in _HOSTS.items():
        there = importlib.util.find_spec(package) is not None
        state = f"{package} is installed: {use}" if there else f"{package} is not installed"
        found.append(Finding(package, "ok", state))
    found.append(Finding("scripts", "ok", _RUNNER))
    return found


_CHECKS: dict[str, Callable[[], list[Finding]]] = {
    "python": _python,
    "core": _core,
    "torch": lambda: _library("torch"),
    "transformers": lambda: _library("transformers"),
    "settings": _settings,
    "devices": _devices,
    "vendors": _vendors,
    "cache": _cache,
    "openmp": _openmp,
    "doors": _doors,
}
