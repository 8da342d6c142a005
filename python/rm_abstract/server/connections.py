"""What a connection must keep to below the requests: the pace of headers, of reading, how many.

uvicorn's h11 protocol: it bounds the bytes of a request's head, and its errors get OpenAI's shape
here. Invariant: a peer that neither sends nor reads holds a connection for a bounded time.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from rm_abstract.server.errors import error_body
from rm_abstract.server.limits import Policy

# The time for a head is counted in so many parts. A part counts once, however long it took: where
# this process did not run (a busy or a suspended machine), no peer could have been heard.
_PARTS = 8


class Connection(H11Protocol):
    """Subclasses have a policy."""

    policy = Policy()
    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self.transport.set_write_buffer_limits(high=0)  # pause_writing tells of all that is unread
        if len(self.connections) > self.policy.connections:
            self.app = _too_many
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._read_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # in the middle of an answer: there is no place for another
            return
        self._answer(400, msg)

    # ---- heads that do not come ------------------------------------------------------------------

    def _watch_head(self) -> None:
        """The time runs from the first moment in which a head may come to its last byte, whatever
        comes between, such as the rest of a body that nobody reads; between two requests uvicorn's
        shorter time for idle connections counts."""
        waits = self.cycle is None or self.cycle.response_complete
        if not waits or self.timeout_keep_alive_task is not None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None and not self.transport.is_closing():
            self._wait_for_head(_PARTS)

    def _wait_for_head(self, parts: int) -> None:
        seconds = self.policy.header_seconds / _PARTS
        self._head_timer = self.loop.call_later(seconds, self._no_head, parts - 1)

    def _no_head(self, parts: int) -> None:
        if parts:
            self._wait_for_head(parts)
        elif self.conn.our_state is h11.IDLE and not self.transport.is_closing():
            self._answer(408, "The headers did not arrive in time.")
        else:
            self.transport.abort()

    def _answer(self, status: int, message: str) -> None:
        body = json.dumps(error_body(status, message)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        reason = STATUS_PHRASES[status]
        head = h11.Response(status_code=status, headers=headers, reason=reason)
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    # ---- readers that do not read ----------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        super().resume_writing()

    def _watch_reading(self) -> None:
        left, seconds = self.transport.get_write_buffer_size(), self.policy.send_seconds
        self._read_timer = self.loop.call_later(seconds, self._still_unread, left)

    def _still_unread(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._watch_reading()  # slowly, but it reads
        else:
            self.transport.abort()


def protocol(policy: Policy) -> type[Connection]:
    """For uvicorn's option `http`."""
    return cast("type[Connection]", type("Connection", (Connection,), {"policy": policy}))


async def _too_many(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application for connections beyond the limit."""
    body = json.dumps(error_body(503, "The server has too many connections.")).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"1"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
