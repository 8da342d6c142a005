"""An engine for hook tests: its entries rebuild the call from the flat inputs and run the original,
so every routing decision can be tested without a compiler. It counts what it was asked to do."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.base.entry_report import EntryReport
from rm_abstract.base.scope import disabled
from rm_abstract.engines import registry
from rm_abstract.engines.context import EngineContext


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict) and type(value) is dict:
        for item in value.values():
            yield from _leaves(item)
    elif type(value) in (list, tuple):
        for item in value:
            yield from _leaves(item)
    elif value is not None and not isinstance(value, (bool, int, float, str, torch.dtype)):
        yield value


def _kind(value: Any) -> Any:
    """Plain values by value and type, tensors by dtype and rank, containers by content."""
    if torch.is_tensor(value):
        return (value.dtype, value.dim())
    if type(value) is dict:
        return [(key, _kind(item)) for key, item in value.items()]
    if type(value) in (list, tuple):
        return (type(value), [_kind(item) for item in value])
    plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype))
    return (type(value), repr(value) if plain else None)


def _refill(value: Any, flat: Iterator[Any]) -> Any:
    if isinstance(value, dict) and type(value) is dict:
        return {key: _refill(item, flat) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_refill(item, flat) for item in value)
    return next(flat) if list(_leaves(value)) else value


class EagerEntry:
    def __init__(self, engine: EagerEngine, signature: Any, bound: inspect.BoundArguments) -> None:
        self.engine, self.signature = engine, signature
        self.arguments = dict(bound.arguments)
        self.bound = bound
        self.runs = 0
        self.fail_with: Exception | None = None

    direct = None

    def run(self, flat_inputs: tuple[Any, ...]) -> Any:
        self.runs += 1
        if self.fail_with is not None:
            raise self.fail_with
        flat = iter(flat_inputs)
        self.bound.arguments.update(
            {name: _refill(value, flat) for name, value in self.arguments.items()}
        )
        assert next(flat, None) is None, "more flat inputs than the signature has"
        with disabled():
            return self.engine.module()._call_impl(*self.bound.args, **self.bound.kwargs)

    def report(self) -> EntryReport:
        return EntryReport(
            signature=str(self.signature), engine="eager", device="cpu", calls=self.runs
        )


class EagerEngine:
    name = "eager"

    def __init__(self, module: Any, context: EngineContext) -> None:
        self.module = weakref.ref(module)
        self.entries: dict[Any, EagerEntry] = {}
        self.first_calls = 0
        self.invalidated: list[tuple[str, str]] = []
        self.closed = False
        self.before_first_call = lambda: None
        ENGINES.append(self)

    def _bind(self, args: Any, kwargs: Any) -> inspect.BoundArguments:
        return inspect.signature(self.module().forward).bind(*args, **kwargs)

    def signature_of(self, args: Any, kwargs: Any) -> Any:
        if "refuse_me" in kwargs:
            return Decline("RM104", "refuse_me: not supported")
        bound = self._bind(args, kwargs)
        return repr([(name, _kind(value)) for name, value in bound.arguments.items()])

    def first_call(self, args: Any, kwargs: Any, run_eager: Any) -> Any:
        self.first_calls += 1
        self.before_first_call()
        output = run_eager()
        signature = self.signature_of(args, kwargs)
        self.entries[signature] = EagerEntry(self, signature, self._bind(args, kwargs))
        return output

    def entry(self, signature: Any) -> EagerEntry | None:
        return self.entries.get(signature)

    def weights(self) -> list[Any]:
        return []

    def invalidate(self, what: str, where: str) -> None:
        self.invalidated.append((what, where))
        self.entries.clear()

    def reports(self) -> list[EntryReport]:
        return [entry.report() for entry in self.entries.values()]

    def close(self) -> None:
        self.closed = True
        self.entries.clear()


ENGINES: list[EagerEngine] = []


def use() -> None:
    """Makes EagerEngine the native engine until ``drop()``."""
    ENGINES.clear()
    registry.register("native", EagerEngine)


def drop() -> None:
    registry.unregister("native")
    ENGINES.clear()


def routed(model: Any) -> int:
    import rm_abstract as rm

    return rm.explain(model).routed


def reasons(model: Any) -> dict[str, int]:
    import rm_abstract as rm

    (record,) = rm.explain(model).models
    return {row["code"]: row["calls"] for row in record["reasons"]}
