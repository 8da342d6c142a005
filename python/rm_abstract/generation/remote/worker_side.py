"""The worker's side of an engine process: one JSON object a line, both ways, over one socket.

Runs in any Python: it imports the standard library only and is loaded by its path, so that the
engine's environment needs no rm_abstract. The process ends with everything it started as soon as
the other end closes, however that happened.

    in   {"op": "start", "id", "model", "arguments", "device"}   out  {"event": "answer", "id", ...}
         {"op": "generate", "id", "prompt", "sampling"}               {"event": "tokens", "id", ...}
         {"op": "cancel", "ids"}, {"op": "call", "id", "name", "arguments"}
    out  {"event": "error", "id", "kind", "message", "fatal"}, {"event": "beat"}
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import faulthandler
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

BEAT_S = 1.0
Chances = list[list[tuple[int, float]]]  # a token: itself first, then the most likely ones


class Engine(Protocol):
    """What a worker program implements."""

    async def start(self, model: str, arguments: dict[str, Any], device: str) -> dict[str, Any]:
        """Loads the model of the folder ``model``; facts about the engine."""

    def generate(
        self, number: int, prompt: list[int], sampling: dict[str, Any]
    ) -> AsyncIterator[tuple[list[int], Chances, bool]]:
        """(new tokens, log probabilities where asked for, whether it is the end)."""

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Whatever else the program offers."""

    def is_dead(self) -> bool:
        """The engine cannot serve any more: the process is of no use."""


@dataclass
class Batch:
    """The rows of one generation, which arrive as requests of their own."""

    rows: int
    prompts: dict[int, list[int]] = field(default_factory=dict)
    samplings: dict[int, dict[str, Any]] = field(default_factory=dict)
    queues: dict[int, asyncio.Queue[Any]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)  # rows nobody waits for any more


class Batches:
    """Puts the rows of a generation together again, for an engine that runs a batch at a time:
    requests say in ``sampling`` their group, row and how many rows there are."""

    def __init__(
        self,
        run: Callable[[Batch, Callable[[int, Any], None]], None],
        thread: concurrent.futures.Executor,
    ) -> None:
        """``run(batch, give)`` runs in ``thread``; ``give(row, item)`` hands over what `generate`
        of an engine yields, or an exception."""
        self._run, self._thread = run, thread
        self._waiting: dict[str, Batch] = {}

    async def generate(
        self, prompt: list[int], sampling: dict[str, Any]
    ) -> AsyncIterator[tuple[list[int], Chances, bool]]:
        loop = asyncio.get_running_loop()
        name, row = sampling["group"], int(sampling["row"])
        batch = self._waiting.setdefault(name, Batch(int(sampling["rows"])))
        queue = batch.queues[row] = asyncio.Queue()
        batch.prompts[row], batch.samplings[row] = prompt, sampling
        if len(batch.prompts) == batch.rows:
            del self._waiting[name]

            def give(to: int, item: Any) -> None:
                loop.call_soon_threadsafe(batch.queues[to].put_nowait, item)

            loop.run_in_executor(self._thread, self._guarded, batch, give)
        try:
            while True:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item[2]:
                    return
        finally:
            batch.left.add(row)

    def _guarded(self, batch: Batch, give: Callable[[int, Any], None]) -> None:
        try:
            self._run(batch, give)
        except BaseException as error:
            for row in range(batch.rows):
                give(row, error)


def members(group: int) -> list[int]:
    """Processes of a group that still run, except the tracker that removes shared memory."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read()
            if int(fields[2]) == group and fields[0] != "Z" and b"resource_tracker" not in command:
                found.append(int(name))
    return found


def end_group(group: int, but: int = 0) -> set[str]:
    """Ends every process of a group; the files in shared memory that they had mapped. The tracker
    of shared memory goes last, of itself, and removes what it knows of."""
    shared: set[str] = set()
    for _ in range(50):
        left = [pid for pid in members(group) if pid != but]
        if not left:
            break
        for pid in left:
            shared |= mapped_files(pid)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return shared


def mapped_files(pid: int, folder: str = "/dev/shm/") -> set[str]:
    """Files of a folder that a process has in its memory."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            paths = {line.split(maxsplit=5)[-1].strip() for line in file if folder in line}
    except OSError:
        return set()
    return {path for path in paths if path.startswith(folder) and not path.endswith("(deleted)")}


def remove_files(paths: set[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


class Server:
    """Serves one engine on the socket ``fd`` until the other end closes."""

    def __init__(self, engine: Engine, fd: int, scratch: str) -> None:
        self._engine, self._scratch = engine, scratch
        self._socket = socket.socket(fileno=fd)
        self._sending = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def run(self) -> None:
        for target in (self._read, self._beat):
            threading.Thread(target=target, daemon=True).start()
        self._loop.run_forever()

    def _send(self, **message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            try:
                self._socket.sendall(data)
            except OSError:
                self._end()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self._send(event="beat")

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                self._loop.call_soon_threadsafe(self._take, message)
        self._end()

    def _end(self) -> None:
        mine = mapped_files(os.getpid())
        remove_files(end_group(os.getpgrp(), but=os.getpid()) | mine)
        shutil.rmtree(self._scratch, ignore_errors=True)
        os._exit(0)

    def _take(self, message: dict[str, Any]) -> None:
        if message["op"] == "cancel":
            for number in message["ids"]:
                if number in self._tasks:
                    self._tasks[number].cancel()
            return
        number = message["id"]
        task = self._loop.create_task(self._guarded(message))
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _guarded(self, message: dict[str, Any]) -> None:
        number = message["id"]
        try:
            await self._serve(message)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            sys.stderr.flush()
            fatal = message["op"] == "start" or self._engine.is_dead()
            text = str(error).strip() or type(error).__name__
            self._send(
                event="error", id=number, kind=type(error).__name__, message=text, fatal=fatal
            )

    async def _serve(self, message: dict[str, Any]) -> None:
        number = message["id"]
        if message["op"] == "generate":
            stream = self._engine.generate(number, message["prompt"], message["sampling"])
            async for tokens, chances, done in stream:
                self._send(event="tokens", id=number, tokens=tokens, chances=chances, done=done)
            return
        if message["op"] == "start":
            facts = await self._engine.start(
                message["model"], message["arguments"], message["device"]
            )
        else:
            facts = await self._engine.call(message["name"], message["arguments"])
        self._send(event="answer", id=number, facts=facts)


def main(engine: Engine, argv: list[str]) -> None:
    """``argv``: the number of the socket, the folder to remove at the end."""
    faulthandler.register(signal.SIGUSR1)  # asked for when it hangs, before it is ended
    Server(engine, int(argv[0]), argv[1]).run()
