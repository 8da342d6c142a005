"""Runs the application on uvicorn until SIGTERM or SIGINT, then lets requests under way finish."""

from __future__ import annotations

import signal
import socket
import sys
from dataclasses import dataclass
from types import FrameType

import uvicorn

from rm_abstract.server.app import Server, create_app
from rm_abstract.server.connections import protocol


@dataclass(frozen=True)
class Address:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    certificate: str | None = None
    private_key: str | None = None


def run(server: Server, address: Address, drain_seconds: int) -> None:
    """Returns when the server has ended; its models are closed then."""
    web = uvicorn.Server(_config(server, address, drain_seconds))

    def heard(number: int, frame: FrameType | None) -> None:
        """Before uvicorn listens itself, and when it has ended: it raises what it heard again."""
        web.should_exit = True

    before = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _run(web, server, address)
    finally:
        server.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _config(server: Server, address: Address, drain_seconds: int) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(server),
        http=protocol(server.policy),
        ws="none",
        host=address.host,
        port=address.port,
        log_level="error",  # no lines for what clients send
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=drain_seconds,
        ssl_certfile=address.certificate,
        ssl_keyfile=address.private_key,
    )


def _run(web: uvicorn.Server, server: Server, address: Address) -> None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address.host, address.port))
        listening.listen(1024)  # who reads the line below may connect at once
        scheme = "https" if address.certificate else "http"
        host = f"[{address.host}]" if ":" in address.host else address.host
        port = listening.getsockname()[1]
        names = ", ".join(server.models)
        print(f"serving {names} at {scheme}://{host}:{port}", file=sys.stderr, flush=True)
        web.run(sockets=[listening])
