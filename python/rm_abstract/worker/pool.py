"""The workers of a session: started when they are needed, restarted when they died, and gone with
the session. One process compiles, another executes: a compiler that crashes, or is cancelled, does
not take loaded programs with it.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from pathlib import Path
from typing import Any

from rm_abstract import _core
from rm_abstract.base.errors import ConfigError, DeviceUnavailableError, from_core
from rm_abstract.worker import artefact_files
from rm_abstract.worker.interpreter import environment, interpreter

ROLES = ("compile", "execute")
_SHORTEST_START_S, _LONGEST_START_S = 120.0, 600.0  # an SDK's import on a machine that is busy
_IDLE_START_S = 120.0


class WorkerPool:
    """The workers of one backend. Thread safe. A forked child must make a pool of its own."""

    def __init__(
        self,
        backend: str,
        fingerprint: bytes,
        log_dir: str = "",
        timeout_s: float = 0.0,
        stall_s: float = 0.0,
    ) -> None:
        """``log_dir`` keeps what the workers write, one file each; empty: nothing is kept. The
        time limits are those of compiling, 0 for none: starting takes at most the first, but
        between two and ten minutes, and does nothing for at most the second or two minutes."""
        self.backend = backend
        self._fingerprint = fingerprint
        self._log_dir = Path(log_dir).absolute() if log_dir else None
        self._start_s = max(_SHORTEST_START_S, min(timeout_s or _LONGEST_START_S, _LONGEST_START_S))
        self._idle_start_s = min(stall_s or _IDLE_START_S, _IDLE_START_S)
        self._workers: dict[str, Any] = {}
        self._owner = os.getpid()  # a forked child must not touch its parent's workers
        self._lock = threading.Lock()
        self.repeats = threading.RLock()  # held by a call that met a crash while it is repeated
        self.starts = 0
        _open_pools.add(self)

    def worker(self, role: str) -> Any:
        """The live worker of a role, started when there is none. Raises CoreError (RM302,
        RM303, RM309, RM401) and DeviceUnavailableError (RM403) for one that has other software
        than this process."""
        with self._lock:
            known = self._workers.get(role)
            if known is not None and known.alive:
                return known
            command = [interpreter(self.backend), "-m", "rm_abstract.worker", self.backend]
            self.starts += 1
            worker = _core.worker.Worker(
                [*command, "--fd", "3"],
                environment(self.backend),
                log_path=self._log_path(role),
                start_timeout_s=self._start_s,
                start_stall_s=self._idle_start_s,
            )
            self._check(worker)
            self._workers[role] = worker
            return worker

    def _log_path(self, role: str) -> str:
        """The file of the worker that starts now. Raises ConfigError."""
        if self._log_dir is None:
            return ""
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"[worker] expected RM_WORKER_LOG_DIR to be a folder, got {error}; try another"
            ) from error
        name = f"{self.backend}-{os.getpid()}-{self.starts}-{role}.log"
        return str(self._log_dir / name)

    def _check(self, worker: Any) -> None:
        theirs = worker.ready["fingerprint"]
        if theirs != self._fingerprint:
            worker.stop()
            raise DeviceUnavailableError(
                f"[worker {self.backend}] expected the software this process sees, "
                f"{self._fingerprint.decode(errors='replace')}, got "
                f"{theirs.decode(errors='replace')}; try the same versions in the environment of "
                f"RM_{self.backend.upper()}_PYTHON",
                code="RM403",
            )

    def alive(self) -> list[int]:
        """Process ids of the live workers."""
        with self._lock:
            return [w.pid for w in self._workers.values() if w.alive]

    def close(self) -> None:
        with self._lock:
            workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            worker.stop()
        if workers and os.getpid() == self._owner:
            # One that was killed, or did not end in the time it has, leaves its artefacts' files.
            artefact_files.sweep(ended=[worker.ready["pid"] for worker in workers])


_open_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """The interpreter does not run every destructor; a worker that saw its socket close would end
    as well, but later."""
    for pool in list(_open_pools):
        pool.close()


def compile_error(error: BaseException) -> Exception:
    """A worker's failure as the public exception of compilation."""
    from rm_abstract.base.errors import CompileError

    return from_core(error, CompileError)
