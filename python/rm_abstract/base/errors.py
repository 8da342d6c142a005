"""The exceptions users see. Each carries a reason code ("RM301") and a remedy, both may be empty.

Message form: `[where] expected …, got …; try …`.
"""

from __future__ import annotations


class Error(RuntimeError):
    """Base of everything raised by rm_abstract itself; errors of the user's own code pass through
    unchanged."""

    default_code = ""
    served = False  # raised after the original served the call: it must not run again

    def __init__(self, message: str, *, code: str | None = None, remedy: str = "") -> None:
        super().__init__(message)
        self.code = self.default_code if code is None else code
        self.remedy = remedy or _remedy_of(message)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), str(self), self.code, self.remedy, self.__dict__))


class ConfigError(Error, ValueError):
    """A setting that is not understood; the message names its source and the accepted values."""


class DeviceUnavailableError(Error):
    """The requested device does not exist or cannot be used (RM4xx)."""

    default_code = "RM402"


class CompileError(Error):
    """Capture or compilation failed (RM2xx, RM3xx)."""

    default_code = "RM201"


class ParityError(Error):
    """A compiled artefact disagrees with the original (RM5xx)."""

    default_code = "RM501"


class ExecutionError(Error):
    """A compiled artefact failed while running. ``committed`` says that state (a KV cache, an input
    written in place) was already changed: then the call is never replayed on the original."""

    def __init__(
        self, message: str, *, code: str | None = None, remedy: str = "", committed: bool = False
    ) -> None:
        super().__init__(message, code=code, remedy=remedy)
        self.committed = committed


class CacheError(Error):
    """The compile cache cannot do what was asked (RM6xx)."""

    default_code = "RM601"


class PluginError(Error):
    """A backend plugin cannot be loaded or broke its contract."""

    default_code = "RM403"


class RoutingWarning(UserWarning):
    """Something was not accelerated; shown once per model and reason under ``fallback="warn"``."""


def from_core(error: BaseException, kind: type[Error] = Error) -> Error:
    """The public form of a ``_core.CoreError``: same message, its reason as code."""
    reason = getattr(error, "reason", "")
    return kind(str(error), code=reason or None)


def internal(error: Exception, where: str) -> Error:
    """The public form of an exception that our own code should not have raised."""
    return CompileError(
        f"[{where}] an error inside rm_abstract: {type(error).__name__}: {error}; "
        "try rm_abstract.disabled() around this call, and please report it",
        code="RM306",
    )


def _remedy_of(message: str) -> str:
    return message.rpartition("; try ")[2] if "; try " in message else ""


def _rebuild(
    kind: type[Error], message: str, code: str, remedy: str, state: dict[str, object]
) -> Error:
    error = kind(message, code=code, remedy=remedy)
    error.__dict__.update(state)
    return error
