"""The original of a call in wider types: what two roundings of one result were meant to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_HALVES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
# Rows are taken as they are: a table is not widened for the few of them that are read.
_LOOKUPS = ("aten::embedding", "aten::index_select")


class InWiderTypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, operators compute in float32 what they are given in a half type, in float64 what they
    are given in float32 when `working` is float32, and so do those that make tensors of a type.

    A tensor that is written in place keeps its type: caches are rounded as in the original. One
    weight at a time is held widened, and no module is changed. Raises TypeError at an operator that
    reads the bits of a tensor, or writes several: what they hold depends on their type.
    """

    def __init__(self, working: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wide = dict(_HALVES)
        if working is torch.float32:
            self._wide[torch.float32] = torch.float64
        self._attention = _Attention(self._widened)

    def __enter__(self) -> Any:
        self._attention.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._attention.__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        if func is torch.ops.aten.view.dtype:
            raise TypeError("an operator reads bits")
        if schema.name in _LOOKUPS or _is_view(schema):
            return func(*args, **kwargs)
        wide_args, wide_kwargs = tree_map(self._widened, (args, kwargs))
        result = func(*wide_args, **wide_kwargs)
        written = [i for i, a in enumerate(schema.arguments) if _is_written(a)]
        if not written:
            return result
        name = schema.arguments[written[0]].name
        at = written[0]
        narrow, wide = (
            (args[at], wide_args[at]) if at < len(args) else (kwargs[name], wide_kwargs[name])
        )
        if len(written) > 1 or not isinstance(narrow, torch.Tensor):
            raise TypeError(f"{schema.name} writes several tensors")
        return narrow if wide is narrow else narrow.copy_(wide)

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self._wide.get(value, value)
        if isinstance(value, torch.Tensor) and value.dtype in self._wide:
            return value.to(self._wide[value.dtype])
        return value


class _Attention(TorchFunctionMode):
    """Widens what attention is given: it compares the types of queries and of keys that a cache
    holds before any operator runs."""

    def __init__(self, widened: Callable[[Any], Any]) -> None:
        super().__init__()
        self._widened = widened

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            args, kwargs = tree_map(self._widened, (args, kwargs))
        return func(*args, **kwargs)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_view(schema: Any) -> bool:
    """Whether what it returns shares memory with what it is given, which it does not write."""
    shared = (r.alias_info for r in schema.returns)
    return any(a is not None and not a.is_write for a in shared)
