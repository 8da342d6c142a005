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


def environment(backend: str) -> list[str]:
    """This process's environment; for our own interpreter also the place we were imported from."""
    values = {**os.environ, "RM_WORKER": "1", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    if interpreter(backend) == sys.executable:
        package = str(Path(__file__).absolute().parents[2])
        old = [p for p in values.get("PYTHONPATH", "").split(os.pathsep) if p]
        paths = [package, *(os.path.abspath(p) for p in old)]
        values["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return [f"{name}={value}" for name, value in values.items()]


@functools.cache
def has_packages(python: str, *names: str) -> bool:
    """Whether a Python has these distributions; nothing of them is imported."""
    code = "import sys; from importlib import metadata; [metadata.version(n) for n in sys.argv[1:]]"
    command = [python, "-c", code, *names]
    try:
        return subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
