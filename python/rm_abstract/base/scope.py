"""``disabled()``: this thread or task runs the original; nests. The router reads the variable."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ContextDecorator
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

# Not None: every routed call of this context is served by eager. "user": counted as declined;
# anything else: a call of ours, which captures, compares or recomputes, and counts nowhere.
disabled_var: ContextVar[str | None] = ContextVar("rm_abstract_disabled", default=None)


class disabled(ContextDecorator):
    """Context manager and decorator: routed models run as if rm_abstract were not there."""

    def __init__(self) -> None:
        self._tokens: list[Token[str | None]] = []

    def __enter__(self) -> disabled:
        self._tokens.append(disabled_var.set("user"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        disabled_var.reset(self._tokens.pop())

    def __call__(self, function: Any) -> Any:
        """Decorates a function, a coroutine function or a generator function of either kind."""
        for is_kind, wrap in _WRAPPERS:
            if is_kind(function):
                return functools.wraps(function)(wrap(function))
        return super().__call__(function)

    def _recreate_cm(self) -> disabled:
        return disabled()  # one object a call: a decorated function may recurse or run in threads


def _coroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        with disabled():
            return await function(*args, **kwargs)

    return run


def _generator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Disabled while the body runs, and not between two items: the caller's code runs there."""

    def run(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        body = function(*args, **kwargs)
        resume = functools.partial(body.send, None)
        while True:
            try:
                with disabled():
                    item = resume()
            except StopIteration as stop:
                return stop.value
            try:
                resume = functools.partial(body.send, (yield item))
            except GeneratorExit:
                with disabled():
                    body.close()
                raise
            except BaseException as error:
                resume = functools.partial(body.throw, error)

    return run


def _async_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        body = function(*args, **kwargs)
        resume = functools.partial(body.asend, None)
        while True:
            try:
                with disabled():
                    item = await resume()
            except StopAsyncIteration:
                return
            try:
                resume = functools.partial(body.asend, (yield item))
            except GeneratorExit:
                with disabled():
                    await body.aclose()
                raise
            except BaseException as error:
                resume = functools.partial(body.athrow, error)

    return run


_WRAPPERS = (
    (inspect.iscoroutinefunction, _coroutine),
    (inspect.isasyncgenfunction, _async_generator),
    (inspect.isgeneratorfunction, _generator),
)
