"""Which Python runs a backend's worker, and with which environment."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from rm_abstract.base.errors import DeviceUnavailableError


def interpreter(backend: str) -> str:
    """The Python that runs a backend's worker: RM_<BACKEND>_PYTHON, else this one."""
    found = os.environ.get(f"RM_{backend.upper()}_PYTHON") or sys.executable
    if not found:
        raise DeviceUnavailableError(
            f"[worker] expected a Python interpreter, got none in this embedded process; try "
            f"RM_{backend.upper()}_PYTHON",
            code="RM401",
        )
    return found


def of_another(backend: str) -> dict[str, str]:
    """This process's environment for a Python that is not ours: its packages are its own, and those
    on the user's PYTHONPATH would hide them (a torch that the vendor's package was not built for).
    RM_<BACKEND>_PYTHONPATH is what it gets instead."""
    values = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    if given := _absolute(os.environ.get(f"RM_{backend.upper()}_PYTHONPATH", "")):
        values["PYTHONPATH"] = os.pathsep.join(given)
    return values


def inherited(backend: str) -> dict[str, str]:
    """What runs in a backend's interpreter is given of this process's environment."""
    return dict(os.environ) if interpreter(backend) == sys.executable else of_another(backend)


def environment(backend: str) -> list[str]:
    """A worker's environment; for our own interpreter also the place we were imported from."""
    values = inherited(backend)
    values |= {"RM_WORKER": "1", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    if interpreter(backend) == sys.executable:
        package = str(Path(__file__).absolute().parents[2])
        paths = dict.fromkeys([package, *_absolute(values.get("PYTHONPATH", ""))])
        values["PYTHONPATH"] = os.pathsep.join(paths)
    return [f"{name}={value}" for name, value in values.items()]


def _absolute(search_path: str) -> list[str]:
    return [os.path.abspath(path) for path in search_path.split(os.pathsep) if path]


def has_packages(backend: str, *names: str) -> bool:
    """Whether a backend's Python has these distributions; nothing of them is imported."""
    search_path = inherited(backend).get("PYTHONPATH", "")
    return _has_packages(backend, interpreter(backend), search_path, names)


@functools.cache
def _has_packages(backend: str, python: str, search_path: str, names: tuple[str, ...]) -> bool:
    code = "import sys; from importlib import metadata; [metadata.version(n) for n in sys.argv[1:]]"
    command = [python, "-c", code, *names]
    try:
        done = subprocess.run(command, capture_output=True, env=inherited(backend), timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
