"""`rm-abstract serve` in a process of its own, and requests to it without a client library."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEY = "right-key-of-the-tests"
CONNECTIONS = 256  # that the tests' server takes at once
ENDLESS = 10_000_000  # tokens the model "endless" can make: more than any test waits for


class Process:
    """`rm-abstract serve` as a user starts it."""

    def __init__(self, *arguments: str, cache: Path) -> None:
        env = {**os.environ, "RM_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "rm_abstract.cli.main", "serve", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *arguments], stderr=subprocess.PIPE, text=True, env=env
        )
        self.lines: list[str] = []
        self.url = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"serving .* at (\S+)", line):
                self.url = found[1]
                break
        assert self.url, "".join(self.lines)
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def end(self, seconds: float = 120) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(
    server: Process,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """One request on a connection of its own; with the right key unless headers are given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        given = bearer(KEY) if headers is None else headers
        if body is not None:
            given = {"Content-Type": "application/json", **given}
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        return Answer(answer.status, dict(answer.getheaders()), answer.read())
    finally:
        connection.close()


def counted(server: Process, name: str, model: str = "tiny") -> float:
    """A metric of one model."""
    lines = ask(server, "GET", "/metrics").body.decode().splitlines()
    (line,) = (line for line in lines if line.startswith(f'rm_{name}{{model="{model}"}}'))
    return float(line.split()[-1])


def until(true: Callable[[], Any], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)
