"""``disabled()``: this thread or task runs the original; nests. The router reads the variable."""

from __future__ import annotations

from contextlib import ContextDecorator
from contextvars import ContextVar, Token
from types import TracebackType

# Not None: every routed call of this context is served by eager.
disabled_var: ContextVar[str | None] = ContextVar("rm_abstract_disabled", default=None)


class disabled(ContextDecorator):
    """Context manager and decorator: armed models run as if rm_abstract were not there."""

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

    def _recreate_cm(self) -> disabled:
        return disabled()  # one object a call: a decorated function may recurse or run in threads
