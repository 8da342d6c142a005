"""Runs the application on uvicorn until SIGTERM or SIGINT, then lets requests under way finish."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass

import uvicorn

from rm_abstract.server.app import Server, create_app


@dataclass(frozen=True)
class Address:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    certificate: str | None = None
    private_key: str | None = None


def run(server: Server, address: Address, drain_seconds: int) -> None:
    """Returns when the server has ended; its models are closed then."""
    try:
        _run(server, address, drain_seconds)
    finally:
        server.close()


def _run(server: Server, address: Address, drain_seconds: int) -> None:
    config = uvicorn.Config(
        create_app(server),
        host=address.host,
        port=address.port,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=drain_seconds,
        ssl_certfile=address.certificate,
        ssl_keyfile=address.private_key,
    )
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address.host, address.port))
        scheme = "https" if address.certificate else "http"
        host = f"[{address.host}]" if ":" in address.host else address.host
        port = listening.getsockname()[1]
        names = ", ".join(server.models)
        print(f"serving {names} at {scheme}://{host}:{port}", file=sys.stderr, flush=True)
        uvicorn.Server(config).run(sockets=[listening])
