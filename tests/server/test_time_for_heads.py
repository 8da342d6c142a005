"""The time for a request's head is time in which the server listened."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from rm_abstract.server.connections import Connection
from rm_abstract.server.limits import Policy

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class Suspended(Connection):
    """A machine that is put to sleep for an hour as soon as a peer is here: the clock leaps."""

    policy = Policy(header_seconds=2.0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.loop.time = lambda: time.monotonic() + 3600


async def _status(*sent: bytes) -> bytes:
    """What is answered to pieces that are 0.2 s apart."""
    config = Config(_answer, lifespan="off", log_level="critical")
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Suspended(config, ServerState(), {}), "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()) as peer:
        peer.settimeout(20)
        for piece in sent:
            await asyncio.sleep(0.2)
            peer.sendall(piece)
        line = (await asyncio.to_thread(peer.recv, 100)).partition(b"\r\n")[0]
    server.close()
    return line


def test_an_hour_in_which_the_machine_slept_does_not_count() -> None:
    assert asyncio.run(_status(HEAD)) == b"HTTP/1.1 200 OK"


def test_half_a_head_is_refused_in_the_end() -> None:
    assert asyncio.run(_status(HEAD[:5], HEAD[5:9])).startswith(b"HTTP/1.1 408")
