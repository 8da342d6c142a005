"""Workers of the fault tests: processes that use one cache directory, are killed or stopped, and
checked for what they read. RM_SOAK=1 runs the long versions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
SOAK = os.environ.get("RM_SOAK") == "1"
SLICE_SECONDS = 2


@dataclass
class Ran:
    """What a worker printed and how it ended."""

    returncode: int
    results: list[tuple[int, str]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    stderr: str = ""

    @property
    def sources(self) -> list[str]:
        return [source for _, source in self.results]


@dataclass
class Workers:
    """Starts workers on the test's own cache directory (RM_CACHE_DIR)."""

    log: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, *arguments: str, env: dict[str, str] | None = None, **popen: object
    ) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            str(HERE / "fault_worker.py"),
            *arguments,
            "--log",
            str(self.log),
        ]
        process = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # else a readline() would swallow more than a line, and finish() miss it
            **popen,
        )
        self.processes.append(process)
        return process

    def finish(self, process: subprocess.Popen[bytes], timeout: float = 120) -> Ran:
        """Waits in slices, so that a pause of everything (a stopped job, a suspended machine)
        costs one slice and is not taken for a worker that hangs."""
        for left in range(int(timeout / SLICE_SECONDS), -1, -1):
            try:
                out, err = process.communicate(timeout=SLICE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                state = Path(f"/proc/{process.pid}/status").read_text()
                assert left, f"worker {process.args} did not end:\n{state}"
        ran = Ran(process.returncode, stderr=err.decode())
        for line in out.decode().splitlines():
            if not line.endswith(("]", "}")):
                continue  # cut off by a kill
            value = json.loads(line)
            if isinstance(value, dict):
                ran.counters = value
            else:
                ran.results.append(tuple(value))
        return ran

    def run(self, *arguments: str, env: dict[str, str] | None = None, **popen: object) -> Ran:
        """A worker's whole life. One that ends by itself must end well: a crash is never read as
        an empty answer."""
        ran = self.finish(self.start(*arguments, env=env, **popen))
        assert ran.returncode in (0, -signal.SIGKILL), f"worker {arguments}: {ran}"
        return ran

    def compiles(self) -> list[int]:
        """The numbers that were compiled so far, in order."""
        if not self.log.exists():
            return []
        return [int(line.split()[0]) for line in self.log.read_text().splitlines()]


def objects(cache: Path) -> list[Path]:
    """The entries of a cache directory."""
    return sorted((cache / "v1" / "objects").glob("*/*.rmc"))
