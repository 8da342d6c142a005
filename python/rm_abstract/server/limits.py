"""What every request must keep to before the application sees it: key, size, pace.

Plain ASGI, so that bodies are counted as they arrive and a reader that stops reading is let go.
Limits of time are anyio's: before Python 3.12, `asyncio.wait_for` loses the cancellation of a task
whose wait ends in the same turn of the loop, and the task of a client that left would go on.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import types
from collections.abc import Awaitable, Callable, Generator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from rm_abstract.server.errors import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

OPEN = ("/health", "/")  # need no key: they tell nothing but whether it serves


@dataclass(frozen=True)
class Policy:
    keys: tuple[str, ...] = ()  # none: everybody may ask
    body_bytes: int = 4 << 20
    body_seconds: float = 30.0  # between two parts of a body
    send_seconds: float = 60.0  # until a client takes what is sent
    header_seconds: float = 10.0  # until all headers of a request are here
    connections: int = 512  # at once


def digests(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def allowed(given: bytes, known: Sequence[bytes]) -> bool:
    """Compares with every key, all of it: the time tells nothing about how much was right."""
    mine, found = hashlib.sha256(given).digest(), False
    for digest in known:
        found |= hmac.compare_digest(mine, digest)
    return found


async def within(seconds: float, work: Awaitable[None]) -> None:
    """Raises TimeoutError after `seconds`. Work that waits for nothing, as sending what a client
    takes at once, needs no timer: that costs more than sending a token."""
    running = work.__await__()
    try:
        waits_for = next(running)
    except StopIteration:
        return
    with anyio.fail_after(seconds):
        await _rest(running, waits_for)


@types.coroutine
def _rest(running: Any, waits_for: Any) -> Generator[Any, Any, None]:
    """`running`, which has begun, to its end: as `yield from`, which would lose `waits_for`."""
    while True:
        try:
            given = yield waits_for
        except BaseException as error:  # a cancellation mostly: the work decides what it means
            go_on = functools.partial(running.throw, error)
        else:
            go_on = functools.partial(running.send, given)
        try:
            waits_for = go_on()
        except StopIteration:
            return


class Guarded:
    """An ASGI application behind a policy."""

    def __init__(self, app: Any, policy: Policy) -> None:
        self._app, self._policy = app, policy
        self._known = digests(policy.keys)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        broken: list[ApiError] = []  # what was wrong with the body, as the application was told

        async def in_time(message: Message) -> None:
            await within(self._policy.send_seconds, send(message))

        async def sending(message: Message) -> None:
            if not broken:
                await in_time(message)
            elif message["type"] == "http.response.start":
                await _answer(broken[0], in_time)  # frameworks make a plain 400 of it

        try:
            self._check(scope)
            await self._app(scope, self._counted(receive, broken), sending)
        except ApiError as error:
            await _answer(error, in_time)
        except TimeoutError:
            pass  # the client does not read: uvicorn closes what was not completed

    def _check(self, scope: Message) -> None:
        headers = dict(scope["headers"])
        if self._known and scope["path"] not in OPEN:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            right = allowed(key.strip(), self._known)
            if scheme.lower() != b"bearer" or not right:
                raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._policy.body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        most = self._policy.body_bytes
        return ApiError(413, f"The body is larger than {most} bytes.", code="body_too_large")

    def _counted(self, receive: Receive, broken: list[ApiError]) -> Receive:
        taken, complete = 0, False

        async def counted() -> Message:
            nonlocal taken, complete
            if complete:
                return await receive()
            if broken:
                raise broken[0]
            try:
                with anyio.fail_after(self._policy.body_seconds):
                    message = await receive()
            except TimeoutError:
                broken.append(ApiError(408, "The body did not arrive in time."))
                raise broken[0] from None
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                complete = not message.get("more_body", False)
                if taken > self._policy.body_bytes:
                    broken.append(self._too_large())
                    raise broken[0]
            return message

        return counted


async def _answer(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),  # what is left of the body is not read
    ]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
