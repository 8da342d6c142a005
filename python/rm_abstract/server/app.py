"""The HTTP application: routes, and errors in OpenAI's shape. Everything slow is done elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import anyio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from rm_abstract.generation.jobs import Sampling
from rm_abstract.server import answers
from rm_abstract.server.choices import Bell, Choices, Piece, Wanted
from rm_abstract.server.errors import ApiError, ClientGone, error_body
from rm_abstract.server.limits import Guarded, Policy
from rm_abstract.server.metrics import Metrics
from rm_abstract.server.models import Served
from rm_abstract.server.schemas import (
    MOST_CHOICES,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
)

T = TypeVar("T")
_PAGE = Path(__file__).with_name("status.html")
_PAGE_MAY = (  # what is in the file, and ask this server
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
)


@dataclass
class Server:
    """What the routes share."""

    models: dict[str, Served]
    policy: Policy = field(default_factory=Policy)
    seconds: float | None = 600.0  # a request may take; None: for ever
    waiting: int = 64  # requests for embeddings of one model that may wait
    device: str = ""  # for the status page
    metrics: Metrics = field(default_factory=Metrics)
    bell: Bell = field(default_factory=Bell)
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        for name, served in self.models.items():
            self.metrics.watch(name, served.facts)

    def model(self, name: str) -> Served:
        if name not in self.models:
            raise ApiError(
                404, f"The model {name!r} does not exist.", param="model", code="model_not_found"
            )
        return self.models[name]

    def close(self) -> None:
        for served in self.models.values():
            served.close()


def create_app(server: Server) -> Any:
    """An ASGI application. The caller closes the server."""
    app = FastAPI(openapi_url=None, title="rm_abstract")
    app.state.server = server
    app.add_api_route("/", page, methods=["GET"])
    app.add_api_route("/status", status, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"])
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"])
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_api_route("/v1/embeddings", embeddings, methods=["POST"])
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _failed)
    return Guarded(app, server.policy)


# ---- routes --------------------------------------------------------------------------------------


async def page(request: Request) -> Response:
    headers = {"content-security-policy": _PAGE_MAY, "x-content-type-options": "nosniff"}
    return Response(_PAGE.read_text("utf-8"), media_type="text/html", headers=headers)


async def status(request: Request) -> Response:
    server = _server(request)
    rows = []
    for served in server.models.values():
        engine = served.text if served.text is not None else served.embeddings
        rows.append(
            {
                "name": served.name,
                "serves": "text" if served.text is not None else "embeddings",
                "engine": "" if engine is None else engine.name,
                "facts": served.facts(),
                "fault": served.fault(),
            }
        )
    up_seconds = time.monotonic() - server.started
    return JSONResponse({"device": server.device, "up_seconds": up_seconds, "models": rows})


async def health(request: Request) -> Response:
    """Answers without a key: which model failed, and why, is told by /status."""
    if any(served.fault() for served in _server(request).models.values()):
        return JSONResponse({"status": "failed"}, 503)
    return JSONResponse({"status": "ok"})


async def metrics(request: Request) -> Response:
    text = _server(request).metrics.text()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def models(request: Request) -> Response:
    rows = [_described(served) for served in _server(request).models.values()]
    return JSONResponse({"object": "list", "data": rows})


async def model(name: str, request: Request) -> Response:
    return JSONResponse(_described(_server(request).model(name)))


async def completions(body: CompletionRequest, request: Request) -> Response:
    served = _server(request).model(body.model)
    prompts: list[list[int]] = []
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given or len(given) * (body.n or 1) > MOST_CHOICES:
        raise ApiError(400, f"Expected 1 to {MOST_CHOICES} choices.", param="prompt")
    for one in given:
        prompts.append(await served.prompt_of_text(one) if isinstance(one, str) else one)
    answer = answers.Completion(served.name, served.tokenizer, body.logprobs is not None)
    limit = 16 if body.max_tokens is None else body.max_tokens
    return await _text(request, body, served, prompts, limit, body.logprobs, answer)


async def chat_completions(body: ChatRequest, request: Request) -> Response:
    served = _server(request).model(body.model)
    try:
        messages = [message.for_template() for message in body.messages]
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from None
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs.", param="top_logprobs")
    settings = body.chat_template_kwargs or {}
    tools = None if body.tool_choice == "none" else body.tools
    prompt = await served.prompt_of_chat(messages, tools, settings)
    answer = answers.Chat(served.name, served.tokenizer, bool(body.logprobs))
    limit = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return await _text(request, body, served, [prompt], limit, logprobs, answer)


async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    server = _server(request)
    served = server.model(body.model)
    engine = served.embeddings
    if engine is None:
        raise ApiError(400, f"{served.name} makes text, no embeddings.", param="model")
    texts = [body.input] if isinstance(body.input, str) else body.input
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ApiError(400, "A text has half of a surrogate pair.", param="input") from None
    if served.pending > server.waiting:
        raise ApiError(429, "The queue is full.", code="queue_full")
    served.pending += 1
    started = time.monotonic()
    try:
        with anyio.fail_after(server.seconds):
            vectors, tokens = await _until_gone(request, served.apart(lambda: engine.embed(texts)))
    except TimeoutError:
        raise ApiError(504, "The request took too long.", code="timeout") from None
    finally:
        served.pending -= 1
    _measured(server, "/v1/embeddings", started)
    as_base64 = body.encoding_format == "base64"
    return JSONResponse(answers.embeddings(served.name, vectors, tokens, as_base64))


# ---- text ----------------------------------------------------------------------------------------


async def _text(
    request: Request,
    body: CompletionRequest | ChatRequest,
    served: Served,
    prompts: Sequence[list[int]],
    limit: int | None,
    logprobs: int | None,
    answer: answers.Answer,
) -> Response:
    server, engine = _server(request), served.text
    if engine is None:
        raise ApiError(400, f"{served.name} makes embeddings, no text.", param="model")
    longest = max(len(prompt) for prompt in prompts)
    room = engine.context_length - longest
    if not all(prompts) or any(t >= engine.vocabulary for p in prompts for t in p):
        message = "A prompt is empty, or has tokens the model lacks."
        raise ApiError(400, message, param=answer.asks)
    if room < 1 or (limit or 1) > room:
        message = (
            f"The model takes {engine.context_length} tokens in all; "
            f"the prompt has {longest} and {limit or 1} were asked for."
        )
        newer = bool(getattr(body, "max_completion_tokens", None))
        limiting = "max_completion_tokens" if newer else "max_tokens"
        at_fault = limiting if room > 0 else answer.asks
        raise ApiError(400, message, param=at_fault, code="context_length_exceeded")
    if any(token not in range(engine.vocabulary) for token in body.logit_bias or {}):
        raise ApiError(400, "logit_bias names a token the model lacks.", param="logit_bias")
    wanted = Wanted(
        limit=limit or room,
        sampling=_sampling(body, logprobs),
        n=body.n or 1,
        stops=body.stops(),
        stop_tokens=frozenset() if body.ignore_eos else served.stop_tokens,
        priority=body.priority,
        seconds=server.seconds,
    )
    choices = Choices(engine, served.tokenizer, prompts, wanted, server.bell)
    count = len(prompts) * wanted.n
    if body.stream:
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        return _Stream(server, request.url.path, choices, answer, count, with_usage)
    found: list[list[Piece]] = [[] for _ in range(count)]

    async def collect() -> None:
        async for piece in choices.pieces():
            found[piece.index].append(piece)

    try:
        await _until_gone(request, collect())
    finally:
        choices.close()
    _measured(server, request.url.path, choices.started, choices.first_token_s)
    return JSONResponse(answer.body(found, choices.usage))


def _sampling(body: CompletionRequest | ChatRequest, logprobs: int | None) -> Sampling:
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        seed=body.seed,
        logprobs=logprobs,
    )


class _Stream(Response):
    """Server-sent events; ends its jobs when the client leaves."""

    def __init__(
        self,
        server: Server,
        path: str,
        choices: Choices,
        answer: answers.Answer,
        count: int,
        with_usage: bool,
    ) -> None:
        super().__init__(status_code=200, media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        del self.headers["content-length"]
        self._server, self._path, self._choices = server, path, choices
        self._answer, self._count, self._with_usage = answer, count, with_usage

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def produce() -> None:
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(head)
            async for chunk in self._chunks():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        try:
            await _first_of(produce(), _disconnected(receive))
        except ClientGone:
            self._server.metrics.cancelled.inc()
        else:
            choices = self._choices
            _measured(self._server, self._path, choices.started, choices.first_token_s)
        finally:
            self._choices.close()

    async def _chunks(self) -> AsyncIterator[bytes]:
        answer, choices = self._answer, self._choices
        for index in range(self._count):
            first = answer.first(index)
            if first is not None:
                yield answers.sse(answer.chunk([first]))
        try:
            async for piece in choices.pieces():
                yield answers.sse(answer.chunk([answer.delta(piece)]))
        except ApiError as error:
            yield answers.sse(error.body())
            return
        if self._with_usage:
            yield answers.sse(answer.chunk([], choices.usage))
        yield answers.DONE


# ---- clients that leave --------------------------------------------------------------------------


async def _until_gone(request: Request, work: Awaitable[T]) -> T:
    """Raises ClientGone when nobody waits for the result any more; `work` is cancelled then."""
    return await _first_of(work, _disconnected(request.receive))


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(work: Awaitable[T], gone: Awaitable[None]) -> T:
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in (task, leaving):
            while not one.done():  # a library may lose a cancellation: then it is told again
                one.cancel()
                await asyncio.wait({one}, timeout=1)
            if not one.cancelled():
                one.exception()  # was raised above, or came too late to matter to anybody


# ---- errors --------------------------------------------------------------------------------------


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    _counted(_server(request), request.url.path, error.status)
    headers = {"retry-after": "1"} if error.status == 429 else None
    return JSONResponse(error.body(), error.status, headers)


async def _invalid(request: Request, error: Exception) -> Response:
    """Names the first field at fault. What was sent is not repeated: it may be long."""
    assert isinstance(error, RequestValidationError)
    _counted(_server(request), request.url.path, 400)
    first: dict[str, Any] = dict((error.errors() or [{}])[0])
    place = [part for part in first.get("loc", ()) if part != "body"]
    where = ".".join(map(str, place))[:200]
    field = place[0][:200] if place and isinstance(place[0], str) else None
    message = str(first.get("msg", "The request is not understood."))[:500]
    return JSONResponse(error_body(400, f"{where}: {message}".strip(": "), field), 400)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_body(error.status_code, str(error.detail))
    return JSONResponse(body, error.status_code, getattr(error, "headers", None))


async def _gone(request: Request, error: Exception) -> Response:
    _server(request).metrics.cancelled.inc()
    return Response(status_code=499)  # nobody reads it


async def _failed(request: Request, error: Exception) -> Response:
    """The server's own fault: uvicorn logs the traceback, the client learns nothing of it."""
    return JSONResponse(error_body(500, "The server failed."), 500)


# ---- small things --------------------------------------------------------------------------------


def _server(request: Request) -> Server:
    found = request.app.state.server
    assert isinstance(found, Server)
    return found


def _described(served: Served) -> dict[str, Any]:
    row = {"id": served.name, "object": "model", "created": served.created}
    return {**row, "owned_by": "rm_abstract"}


def _counted(server: Server, path: str, status: int) -> None:
    server.metrics.requests.labels(path, str(status)).inc()


def _measured(
    server: Server, path: str, started: float, first_token_s: float | None = None
) -> None:
    _counted(server, path, 200)
    server.metrics.duration.labels(path).observe(time.monotonic() - started)
    if first_token_s is not None:
        server.metrics.first_token.observe(first_token_s)
