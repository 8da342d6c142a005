"""Import hook: calls back right after a watched module was executed, or at once if it was already.

Invariant: the module is found and executed by whoever would have done it anyway, under its own
loader; only the moment after is ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]


class _LoaderWithCallback(Loader):
    """Stands in for a loader during one execution and puts the original back."""

    def __init__(self, original: Any, callback: Callback) -> None:
        self._original = original
        self._callback = callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._original.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        module.__loader__ = self._original
        self._original.exec_module(module)
        self._callback(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class ImportWatch(MetaPathFinder):
    """Watches a few module names; ``install`` first, ``remove`` to leave no trace."""

    def __init__(self, callbacks: Mapping[str, Callback]) -> None:
        self._callbacks = dict(callbacks)

    def install(self) -> None:
        for name, callback in self._callbacks.items():
            module = sys.modules.get(name)
            # A module still being executed is caught neither here nor later: nobody can import
            # rm_abstract from inside torch or transformers before that point.
            if module is not None:
                callback(module)
        if any(name not in sys.modules for name in self._callbacks):
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    @property
    def installed(self) -> bool:
        return self in sys.meta_path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        callback = self._callbacks.get(fullname)
        if callback is None:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _LoaderWithCallback(spec.loader, callback)
                return spec
        return None
