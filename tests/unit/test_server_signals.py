"""A server that is told to end before it began."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("fastapi", reason="the group `serve` is not installed")

SCRIPT = """
import os, signal
import uvicorn
from rm_abstract.server.app import Server
from rm_abstract.server.run import Address, run

real = uvicorn.Server.run

def at_once(self, *given, **named):
    os.kill(os.getpid(), signal.{name})  # whoever read the line may send it before uvicorn listens
    real(self, *given, **named)

uvicorn.Server.run = at_once
run(Server({{}}), Address(port=0), 1)
print("ended")
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_between_the_first_line_and_the_first_request_ends_the_server(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(name=name)], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0 and done.stdout == "ended\n", done.stderr
    assert "serving" in done.stderr
