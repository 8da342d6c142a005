"""The workers of a session: started when they are needed, restarted when they died, and gone with
the session. One process compiles, another executes: a compiler that crashes, or is cancelled, does
not take loaded programs with it.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Any

from rm_abstract import _core
from rm_abstract.base.errors import DeviceUnavailableError, from_core
from rm_abstract.worker.interpreter import environment, interpreter

ROLES = ("compile", "execute")


class WorkerPool:
    """The workers of one backend. Thread safe. A forked child must make a pool of its own."""

    def __init__(self, backend: str, fingerprint: bytes) -> None:
        self.backend = backend
        self._fingerprint = fingerprint
        self._workers: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.starts = 0
        _open_pools.add(self)

    def worker(self, role: str) -> Any:
        """The live worker of a role, started when there is none. Raises CoreError (RM401, RM303)
        and DeviceUnavailableError (RM403) for one that has other software than this process."""
        with self._lock:
            known = self._workers.get(role)
            if known is not None and known.alive:
                return known
            command = [interpreter(self.backend), "-m", "rm_abstract.worker", self.backend]
            self.starts += 1
            worker = _core.worker.Worker([*command, "--fd", "3"], environment(self.backend))
            self._check(worker)
            self._workers[role] = worker
            return worker

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
