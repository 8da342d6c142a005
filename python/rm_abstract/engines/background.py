"""Captures in a process of their own (decision 0034): for calls that do not wait for them.

torch.export changes torch for the whole process while it traces, so another thread's call could
meet a half-traced module. Here one helper process carries out one job after the other, and only
the compile cache connects the two. One thread of this process waits for the answers; it holds no
lock while it waits, and no call ever waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from rm_abstract.base.framing import read_frame, write_frame

PROGRAM = "rm_abstract.engines.capturing"
IDLE_S = 60.0  # a helper without a job holds some hundred MB: it ends after so long
Done = Callable[[str, str], None]  # (code, message), both empty when the program is in the cache


class Captures:
    """The helper process of one session, started when there is a job."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[tuple[bytes, Done]] = queue.Queue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._inherited: subprocess.Popen[bytes] | None = None  # of the process that forked
        self._closed = False
        atexit.register(self.close)

    def submit(self, data: bytes, done: Done) -> None:
        """Queues a job (capture_job.pack); ``done`` is called once, by another thread. Never
        called when the session was closed before."""
        with self._lock:
            if self._closed:
                return
            self._jobs.put((data, done))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="rm_abstract captures", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Ends the helper at once; jobs that wait are dropped."""
        with self._lock:
            self._closed = True
            atexit.unregister(self.close)
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            _closed_pipes(process)
            process.wait()

    def forget(self) -> None:
        """In a child made by fork: the helper is the parent's and must notice when that ends."""
        self._lock = threading.Lock()  # another thread may have held it
        self._closed = True
        atexit.unregister(self.close)
        # Kept, not dropped: its destructor would wait for a process that is not this one's child.
        self._inherited, self._process = self._process, None
        if self._inherited is None:
            return
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (self._inherited.stdin, self._inherited.stdout):
            if stream is not None:  # the numbers stay taken: the stream closes them some day
                os.dup2(nothing, stream.fileno(), inheritable=False)
        os.close(nothing)

    def _work(self) -> None:
        while True:
            try:
                data, done = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if not self._jobs.empty():
                        continue
                    self._thread = None
                    process, self._process = self._process, None
                if process is not None:
                    process.kill()
                    _closed_pipes(process)
                    process.wait()
                return
            code, message = self._answer(data)
            if self._closed:
                return
            done(code, message)

    def _answer(self, data: bytes) -> tuple[str, str]:
        process = self._running()
        if process is None:
            return "RM211", "the helper process could not be started"
        assert process.stdin is not None and process.stdout is not None
        try:
            write_frame(process.stdin, data)
            answer = read_frame(process.stdout)
        except (OSError, ValueError):  # it ended, or close() was called
            answer = None
        if answer is None:
            with self._lock:
                if self._process is process:
                    self._process = None
            process.kill()
            return "RM211", f"the helper process ended ({process.wait()})"
        found: dict[str, str] = json.loads(answer)
        return found.get("code", ""), found.get("message", "")

    def _running(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._closed:
                return None
            if self._process is None:
                with contextlib.suppress(OSError):
                    self._process = _started()
            return self._process


def _started() -> subprocess.Popen[bytes]:
    switched = ("RM_ABSTRACT", "RM_COMPILE_MODE", "PYTHONSTARTUP")
    values = {name: value for name, value in os.environ.items() if name not in switched}
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    old = [p for p in values.get("PYTHONPATH", "").split(os.pathsep) if p]
    values["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([package, *map(os.path.abspath, old)]))
    values["OMP_NUM_THREADS"] = "1"
    options: dict[str, Any] = {"start_new_session": True}  # Ctrl-C is not for it
    return subprocess.Popen(
        [sys.executable, "-m", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=values,
        **options,
    )


def _closed_pipes(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
