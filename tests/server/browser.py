"""A headless Chromium, spoken to by its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATH = next(filter(None, map(shutil.which, NAMES)), None)
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
]


class Page:
    """One page. Messages are JSON, each ended by a zero byte; ours go to the browser's descriptor
    3, its own come from 4."""

    def __init__(self, folder: Path) -> None:
        assert PATH is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "-", PATH, *_FLAGS]
        command += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=quiet, stderr=quiet
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.folder = folder
        self._read, self._numbers = b"", itertools.count(1)
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 120
        while time.monotonic() < end:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)
        raise AssertionError(f"no answer to {method}")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            assert select.select([self._in], [], [], 120)[0], "the browser says nothing"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser ended"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def value(self, expression: str) -> Any:
        """Of JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def save(self, file: Path) -> None:
        """A picture of the page."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.kill()
        self._process.wait()
