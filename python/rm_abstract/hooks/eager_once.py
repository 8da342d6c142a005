"""The original's run of one call that is compiled meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from rm_abstract import _core


class EagerOnce:
    """Runs the original at most once and remembers what it did."""

    def __init__(
        self,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        settled: Callable[[], None],
    ) -> None:
        self._call = (module, args, kwargs)
        self._settled = settled  # called once it ran, before anything looks at the module
        self._done = False
        self._output: Any = None
        self.error: BaseException | None = None

    @property
    def ran(self) -> bool:
        return self._done or self.error is not None

    def raise_error(self) -> NoReturn:
        """Raises the call's own exception, and forgets it: whoever handles it frees its frames, and
        with them the model, without a garbage collection."""
        error, self.error = self.error, None
        assert error is not None
        try:
            raise error from None
        finally:
            del error

    def __call__(self) -> Any:
        if self.error is not None:
            raise self.error
        if not self._done:
            module, args, kwargs = self._call
            try:
                self._output = _core.router.call_original(module, args, kwargs)
            except BaseException as error:
                self.error = error
                raise
            self._done = True
            self._settled()
        return self._output
