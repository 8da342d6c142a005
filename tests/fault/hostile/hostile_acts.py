"""What a hostile plugin does, by name. Needs neither torch nor the compiled core."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

SOCKET = 3  # of a worker
VERSION = 4  # kProtocolVersion


class NoError(BaseException):
    """Neither an Exception nor one of Python's own."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("this error has no text")


def packet(kind: int, request: int, body: bytes, announced: int | None = None) -> bytes:
    """A message of the protocol (src/worker/wire.hpp)."""
    size = len(body) if announced is None else announced
    return struct.pack("<IHHQQII", 0x4B574D52, VERSION, kind, request, size, 0, 0) + body


PROGRESS, DONE, FAILED = 65, 66, 67


def wanted(place: str) -> str:
    """The kind of misbehaviour for this place, "" for none."""
    at, _, kind = os.environ.get("HOSTILE", "").partition(".")
    return kind if at == place else ""


def generates() -> bool:
    """Whether the place is in a runtime that generates."""
    return os.environ.get("HOSTILE", "").startswith("gen_")


def act(place: str, otherwise: Any = None) -> Any:
    """Misbehaves, when this is the place; else gives what it should."""
    kind = wanted(place)
    if not kind:
        return otherwise
    if kind in RETURNED:
        return RETURNED[kind]
    ACTS[kind]()
    return otherwise


def _raise(error: BaseException) -> Any:
    def do() -> None:
        raise error

    return do


def _sleep() -> None:
    time.sleep(3600)


def _hang_with_the_lock() -> None:
    """Holds the interpreter's lock, as C code of an SDK may."""
    import re

    re.match("(a*)*b", "a" * 64)


def _recurse() -> None:
    _recurse()


def _flood_the_log() -> None:
    line = b"\xff\x00 noise" * 8192
    for _ in range(1024):
        os.write(2, line)
    os._exit(3)


def _write_much() -> None:
    """What a chatty SDK does in days: 16 MiB."""
    for _ in range(256):
        os.write(2, b"all is well\n" * 5462)


def _garbage_on_the_socket() -> None:
    os.write(SOCKET, os.urandom(64))
    _sleep()


def _answer_for_it() -> None:
    """An answer from the plugin, then the real one: the request has two."""
    for request in range(64):
        os.write(SOCKET, packet(DONE, request, struct.pack("<Q", 77)))


def _fail_for_it() -> None:
    for request in range(64):
        os.write(SOCKET, packet(FAILED, request, b"\x01"))


def _half_an_answer() -> None:
    for request in range(64):
        os.write(SOCKET, packet(DONE, request, b"\x01\x02", announced=1 << 20))


def _endless_progress() -> None:
    """Of this request, whatever its number is; goes on until the process ends."""
    body = struct.pack("<dQ", 0.5, 3) + b"\x1b[A"
    while True:
        for request in range(8):
            os.write(SOCKET, packet(PROGRESS, request, body))
        time.sleep(0.001)


def _close_everything() -> None:
    os.closerange(0, 1024)
    _sleep()


def _close_the_socket() -> None:
    os.close(SOCKET)
    _sleep()


def _leave_a_child() -> None:
    """A daemon of the SDK's: in a session of its own, with every descriptor."""
    subprocess.Popen(["sleep", "30"], start_new_session=True, pass_fds=[SOCKET], stderr=sys.stderr)
    os.kill(os.getpid(), signal.SIGSEGV)


def _truncate_memory() -> None:
    """Every memory this process has a descriptor of or maps."""
    for link in [*Path("/proc/self/fd").iterdir(), *Path("/proc/self/map_files").iterdir()]:
        try:
            if "memfd" in os.readlink(link):
                os.truncate(link, 0)
        except OSError:
            pass


def _seal_memory() -> None:
    for link in Path("/proc/self/fd").iterdir():
        try:
            fcntl.fcntl(int(link.name), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        except (OSError, ValueError):
            pass


def _exhaust_descriptors() -> None:
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    threading.Thread(target=_sleep, args=(held,), daemon=True)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fifo() -> Path:
    path = Path(os.environ["HOSTILE_FOLDER"], f"fifo{os.getpid()}")
    if not path.exists():
        os.mkfifo(path)
    return path


def _loop() -> Path:
    path = Path(os.environ["HOSTILE_FOLDER"], f"loop{os.getpid()}")
    path.mkdir(exist_ok=True)
    if not (path / "again").is_symlink():
        (path / "again").symlink_to(path)
        (path / "hosts").symlink_to("/etc/hosts")
        os.mkfifo(path / "fifo")
    return path


ACTS: dict[str, Any] = {
    "error": _raise(RuntimeError("E77")),
    "bytes_error": _raise(RuntimeError("E77 \udcff\udc80 in a file's name \x1b[31m\0")),
    "long_error": _raise(RuntimeError("E77 " + "x" * (32 << 20))),
    "unprintable": _raise(Unprintable()),
    "system_exit": _raise(SystemExit(0)),
    "interrupt": _raise(KeyboardInterrupt()),
    "base": _raise(NoError("E78")),
    "generator_exit": _raise(GeneratorExit()),
    "stop_iteration": _raise(StopIteration()),
    "recursion": _recurse,
    "exit": lambda: os._exit(0),
    "kill": _kill,
    "abort": os.abort,
    "stop": _stop,
    "hang": _sleep,
    "locked": _hang_with_the_lock,
    "flood": _flood_the_log,
    "chatty": _write_much,
    "garbage": _garbage_on_the_socket,
    "twice": _answer_for_it,
    "failed": _fail_for_it,
    "half": _half_an_answer,
    "progress": _endless_progress,
    "closed": _close_the_socket,
    "all_closed": _close_everything,
    "child": _leave_a_child,
    "truncate": _truncate_memory,
    "seal": _seal_memory,
    "descriptors": _exhaust_descriptors,
}
RETURNED: dict[str, Any] = {
    "none": None,
    "number": 7,
    "empty": b"",
    "text": "text",
    "no_path": Path("/nonexistent/artefact"),
    "root": Path("/proc/self"),
    "list": [1, 2, 3],
}
if wanted("compile") in ("fifo", "loop"):
    RETURNED.update(fifo=_fifo(), loop=_loop())
