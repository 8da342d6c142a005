"""An engine's process as its user sees it: started, asked, watched, and gone without a trace.

Invariant: whatever the process does (ends, is killed, goes silent, writes garbage) becomes an
ExecutionError RM303 with the end of its log for everybody who waits for it. All functions may be
called by any thread. Started by `subprocess` with a program of its own, so it works from scripts
without a main guard, from notebooks and from threads; a forked child lets go of it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import queue
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rm_abstract import _core
from rm_abstract.base.errors import ConfigError, Error, ExecutionError
from rm_abstract.generation.remote.worker_side import (
    end_group,
    mapped_files,
    members,
    remove_files,
)

SILENCE_S = 60.0  # without a sign of life: taken for hung
_STOP_S = 2.0  # after the end of its processes: for the tracker of shared memory
STALL_S = 600.0
_LOG_TAIL = 3000  # bytes
_STACKS_S = 2.0  # for a process that hangs to write where
_LONGEST_LINE = 64 << 20  # bytes of a message
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {  # of each event, besides its name
    "beat": {},
    "answer": {"id": int, "facts": dict},
    "tokens": {"id": int, "tokens": list, "chances": list, "done": bool},
    "error": {"id": int, "kind": str, "message": str, "fatal": bool},
}


class Ticket:
    """One request under way: its messages, in order."""

    def __init__(self, process: EngineProcess, number: int) -> None:
        self._process = process
        self.number = number
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.put: Callable[[dict[str, Any]], None] = self.messages.put

    def next(self, deadline: float = float("inf"), option: str = "") -> dict[str, Any]:
        """The next message; ``deadline`` in seconds of time.monotonic(), which the user moves by
        ``option`` (where it is empty, by the one of the start).

        Raises ExecutionError: RM303 when the process is gone or silent, RM308 at the deadline,
        RM309 when it does nothing at all any more, RM331 for what the engine reports.
        """
        while True:
            try:
                message = self.messages.get(timeout=1.0)
            except queue.Empty:
                self._process.check_alive()
                self._process.check_progress()
                if time.monotonic() > deadline:
                    raise ExecutionError(
                        f"[{self._process.name}] expected an answer in time, got none; try a "
                        f"larger {option or self._process.start_option}",
                        code="RM308",
                    ) from None
                continue
            if message["event"] == "gone":
                raise self._process.crash()
            if message["event"] == "error":
                raise ExecutionError(
                    f"[{self._process.name}] {message['kind']}: {message['message']}", code="RM331"
                )
            return message

    def forget(self, cancel: bool = False) -> None:
        """Nobody waits for it any more; ``cancel`` stops it. Its number means something to the
        process it was sent to only."""
        self._process.forget([self], cancel)

    def within(self, limit_s: float) -> dict[str, Any]:
        """The next message of a generation under way. A process that lets one wait for longer is
        ended: it would let the next generation wait as well. Raises ExecutionError."""
        try:
            return self.next(time.monotonic() + limit_s)
        except ExecutionError as error:
            if error.code != "RM308":
                raise
        self._process.give_up()
        raise ExecutionError(
            f"[{self._process.name}] expected the next token within {limit_s:g} s, got none; the "
            "engine's process was ended; raise execute_timeout_s if it needs longer",
            code="RM308",
        )


class EngineProcess:
    """One process, started by the constructor. Raises Error (RM330) when it cannot be."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: Mapping[str, str],
        log_dir: str = "",
        stall_s: float = STALL_S,
        start_option: str = "start_timeout_s in engine_options",
    ) -> None:
        """``command`` gets the socket's number and a scratch folder as its last arguments. Whoever
        waits gives the process up when it did nothing at all for ``stall_s`` seconds; 0: never.
        ``start_option`` is what the user sets where starting takes long."""
        self.name, self.start_option = name, start_option
        self.scratch = Path(tempfile.mkdtemp(prefix=f"rm_{name}_"))
        self._pid = os.getpid()
        self._log = self._log_file(log_dir)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._tickets: dict[int, Ticket] = {}
        self._heard = time.monotonic()
        self._gone = False
        self._closed = False
        self._garbage = ""  # what it sent that is no message
        self._shared: set[str] = set()  # files that its processes had in shared memory
        (self.scratch / "tmp").mkdir()
        ours, theirs = socket.socketpair()
        # One that is stopped reads nothing: whoever sends would wait as long as it does.
        limit = struct.pack("@ll", int(SILENCE_S), 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            with self._log.open("ab") as log:
                self._child = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(self.scratch)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**environment, "TMPDIR": str(self.scratch / "tmp")},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is not for it
                )
        except OSError as error:
            ours.close()
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise Error(
                f"[{name}] expected a Python that can be started, got {error}; try "
                f"RM_{name.upper()}_PYTHON",
                code="RM330",
            ) from None
        finally:
            theirs.close()
        self._socket = ours
        self._sending = threading.Lock()
        self._stall_s = stall_s
        self._stall = _core.worker.StallWatch(self._child.pid, stall_s)
        self._stalling = threading.Lock()  # guards _stall
        _running.add(self)
        threading.Thread(target=_read, args=(weakref.ref(self), ours), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return not self._gone and not self._closed and self._child.poll() is None

    def submit(
        self, op: str, deliver: Callable[[dict[str, Any]], None] | None = None, **fields: Any
    ) -> Ticket:
        """Sends a request; its messages come to the ticket, or to ``deliver``, called by the
        reading thread. Raises ExecutionError (RM303)."""
        ticket = Ticket(self, next(self._numbers))
        if deliver is not None:
            ticket.put = deliver
        with self._lock:
            if self._gone or self._closed:
                raise self.crash()
            if not self._tickets:  # it had nothing to do until now
                with self._stalling:
                    self._stall = _core.worker.StallWatch(self._child.pid, self._stall_s)
            self._tickets[ticket.number] = ticket
        self._send({"op": op, "id": ticket.number, **fields})
        return ticket

    def request(self, op: str, timeout_s: float, option: str = "", **fields: Any) -> dict[str, Any]:
        """A request with one answer, its facts; ``option``: its limit. Raises ExecutionError."""
        ticket = self.submit(op, **fields)
        try:
            facts = dict(ticket.next(time.monotonic() + timeout_s, option)["facts"])
        finally:
            self.forget([ticket])
        for pid in members(self._child.pid):  # known before anybody kills them
            self._shared |= mapped_files(pid)
        return facts

    def forget(self, tickets: list[Ticket], cancel: bool = False) -> None:
        """Nobody waits for these any more; ``cancel`` stops them."""
        with self._lock:
            for ticket in tickets:
                self._tickets.pop(ticket.number, None)
            usable = not self._gone and not self._closed
        if cancel and usable and tickets:
            with contextlib.suppress(ExecutionError):
                self._send({"op": "cancel", "ids": [ticket.number for ticket in tickets]})

    def check_alive(self) -> None:
        """Raises ExecutionError (RM303) for a process that is gone or hangs."""
        if not self._gone and time.monotonic() - self._heard > SILENCE_S:
            self._kill()
        if self._gone or self._closed or self._child.poll() is not None:
            raise self.crash()

    def check_progress(self) -> None:
        """Raises ExecutionError (RM309) for a process that beats but does nothing else."""
        with self._stalling:
            if not self._stall.has_stalled(self._log_bytes()):
                return
        self._write_stacks()
        self._kill()
        raise ExecutionError(
            f"[{self.name}] expected the engine to go on, got {self._stall_s:g} s in which it "
            "neither computed, read, wrote nor reported anything; raise stall_timeout_s if it "
            f"waits for something{self._named_log()}\n{self.log_tail()}",
            code="RM309",
        )

    def crash(self) -> ExecutionError:
        """What became of it, with the end of its log."""
        status = self._child.poll()
        if self._closed:
            what = "was closed"
        elif self._garbage:
            what = f"sent what is no message ({self._garbage}) and was ended"
        elif status is None:
            what = "stopped answering"
        elif status < 0:
            what = f"was ended by signal {-status} ({signal.Signals(-status).name})"
        else:
            what = f"ended with status {status}"
        return ExecutionError(
            f"[{self.name}] expected the engine's process {self.pid} to serve, got: it {what}; "
            f"try again, another is started{self._named_log()}\n{self.log_tail()}",
            code="RM303",
            remedy="try again: another process is started",
        )

    def log_tail(self) -> str:
        with contextlib.suppress(OSError):
            data = self._log.read_bytes()[-_LOG_TAIL:]
            return data.decode(errors="replace").strip()
        return ""

    def close(self) -> None:
        """Ends the process and what it started, and removes its folder; idempotent."""
        if self._pid != os.getpid():
            return
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        _running.discard(self)
        self._kill()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        _wait_for_group(self._child.pid)
        # Where the tracker was ended too, or had no time on a busy machine.
        remove_files(self._shared - mapped_files(os.getpid()))
        shutil.rmtree(self.scratch, ignore_errors=True)

    def let_go(self) -> None:
        """In a child made by fork: the process is the parent's."""
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._stalling = threading.Lock()
        self._closed = self._gone = True
        self._socket.close()  # the worker must see the parent's end, not this copy
        self._child.returncode = 0  # its destructor must not wait for somebody else's child

    # ---- inside ------------------------------------------------------------------------------

    def _log_file(self, log_dir: str) -> Path:
        if not log_dir:
            return self.scratch / "log"
        folder = Path(log_dir).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise ConfigError(
                f"[{self.name}] expected RM_WORKER_LOG_DIR to be a folder, got {error}; try another"
            ) from error
        return folder / f"{self.name}-{os.getpid()}-{self.scratch.name}.log"

    def _named_log(self) -> str:
        return "" if self._log.parent == self.scratch else f"; its log is {self._log}"

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            try:
                self._socket.sendall(data)
            except OSError:
                self._kill()  # half a message may have gone
                raise self.crash() from None

    def give_up(self) -> None:
        """Ends a process that does not go on."""
        self._kill()

    def _take(self, line: bytes) -> None:
        """Raises ValueError for what is no message."""
        message = checked(line)
        self._heard = time.monotonic()
        if message["event"] == "beat":
            return
        with self._lock:
            ticket = self._tickets.get(message["id"])
        with self._stalling:
            self._stall.heard()
        if ticket is not None:
            ticket.put(message)
        if message["event"] == "error" and message["fatal"]:
            self._ended()

    def _ended(self) -> None:
        """It cannot serve any more: whoever waits is told. Called by the reading thread."""
        if self._pid != os.getpid():
            return
        if not self._closed:
            self._kill()
        with self._lock:
            self._gone = True
            waiting = list(self._tickets.values())
        for ticket in waiting:
            ticket.put({"event": "gone"})

    def _log_bytes(self) -> int:
        with contextlib.suppress(OSError):
            return self._log.stat().st_size
        return 0

    def _write_stacks(self) -> None:
        """Has the process write the stacks of its threads to its log (worker_side listens)."""
        before, until = self._log_bytes(), time.monotonic() + _STACKS_S
        with contextlib.suppress(OSError):
            self._child.send_signal(signal.SIGUSR1)
        while self._log_bytes() == before and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)  # the rest of them

    def _kill(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(0.05)  # how it ended by itself, if it did
        self._shared |= end_group(self._child.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_STOP_S)


def checked(line: bytes) -> dict[str, Any]:
    """A line as one of the messages of worker_side.py. Raises ValueError, which says what it is."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    fields = _FIELDS.get(str(message.get("event"))) if isinstance(message, dict) else None
    if fields is None or not all(isinstance(message.get(n), kind) for n, kind in fields.items()):
        raise ValueError(repr(line[:60]))
    return dict(message)


def _read(process: weakref.ref[EngineProcess], ours: socket.socket) -> None:
    """The reading thread: holds the process weakly, so that one nobody uses is collected."""
    with contextlib.suppress(OSError), ours.makefile("rb") as lines:
        while line := lines.readline(_LONGEST_LINE):
            owner = process()
            if owner is None:
                return
            try:
                owner._take(line)
            except ValueError as error:
                owner._garbage = str(error)
                break
            del owner
    owner = process()
    if owner is not None:
        owner._ended()


def _wait_for_group(group: int) -> None:
    """Until the tracker of shared memory, the last of the group, has done its work."""
    until = time.monotonic() + _STOP_S
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except OSError:
            return
        time.sleep(0.01)
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)


_running: weakref.WeakSet[EngineProcess] = weakref.WeakSet()


def running() -> Iterator[EngineProcess]:
    """Every process that was not closed."""
    yield from list(_running)


def _close_all() -> None:
    for process in running():
        process.close()


def _after_fork() -> None:
    for process in running():
        process.let_go()
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all)
