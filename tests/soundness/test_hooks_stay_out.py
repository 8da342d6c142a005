"""What runs inside the user's lines never raises there, and sessions nest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from soundness import Base, X, quiet, routed
from torch import nn

import rm_abstract as rm
from rm_abstract.base.scope import disabled_var
from rm_abstract.hooks import attaching
from rm_abstract.hooks.install import Installation
from rm_abstract.hooks.weight_writes import WeightWrites


def test_a_failure_while_a_module_is_caught_is_logged_once_and_not_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def renamed(*_: Any) -> None:
        raise AttributeError("module 'torch' has no attribute '_renamed'")

    monkeypatch.setattr(attaching, "attach", renamed)
    with caplog.at_level(logging.WARNING, "rm_abstract"):
        models = [nn.Linear(2, 2).eval().to("cpu") for _ in range(3)]
    assert all(not m.training for m in models)
    assert sum("_renamed" in r.getMessage() for r in caplog.records) <= 1


def test_a_patch_that_fails_leaves_init_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(self: Any, module: Any) -> None:
        raise AttributeError("no attribute 'PreTrainedModel'")

    rm.shutdown()
    monkeypatch.setattr(Installation, "_patch_transformers", renamed)
    rm.init("cpu")
    model = nn.Linear(8, 8).eval()
    for _ in range(3):
        quiet(lambda: model(X))
    assert routed(model) == 2


def test_nothing_is_compiled_where_writes_to_weights_cannot_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def renamed(self: Any, module: Any) -> None:
        raise AttributeError("no attribute 'data'")

    rm.shutdown()
    monkeypatch.setattr(WeightWrites, "_patch_parameter", renamed)
    rm.init("cpu")
    model = nn.Linear(8, 8).eval()
    assert "_compiled_call_impl" not in vars(model)
    with pytest.raises(rm.Error, match="writes to weights"):
        rm.accelerate(model)


def test_a_module_without_a_hash_runs_as_in_eager() -> None:
    @dataclass
    class Compared(nn.Module):
        width: int = 8

        def __post_init__(self) -> None:
            super().__init__()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.width

    model = Compared()
    assert model.eval() is model
    torch.testing.assert_close(model(X), X * 8)


def test_disabled_covers_the_body_of_a_coroutine() -> None:
    @rm.disabled()
    async def body() -> str | None:
        await asyncio.sleep(0)
        return disabled_var.get()

    assert asyncio.run(body()) == "user"
    assert asyncio.iscoroutinefunction(body)


def test_disabled_covers_a_generators_body_and_not_its_caller() -> None:
    @rm.disabled()
    def body() -> Iterator[str | None]:
        for _ in range(2):
            yield disabled_var.get()

    seen = []
    for inside in body():
        seen.append((inside, disabled_var.get()))
    assert seen == [("user", None)] * 2


def test_a_disabled_generator_gets_what_is_sent_and_thrown() -> None:
    @rm.disabled()
    def body() -> Any:
        got = yield "first"
        with contextlib.suppress(KeyError):
            yield got
        yield disabled_var.get()
        return "result"

    generator = body()
    assert next(generator) == "first"
    assert generator.send("sent") == "sent"
    assert generator.throw(KeyError("thrown")) == "user"
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value == "result"
    assert disabled_var.get() is None


def test_disabled_covers_an_asynchronous_generator() -> None:
    @rm.disabled()
    async def body() -> AsyncIterator[str | None]:
        for _ in range(2):
            await asyncio.sleep(0)
            yield disabled_var.get()

    async def consume() -> list[tuple[str | None, str | None]]:
        return [(inside, disabled_var.get()) async for inside in body()]

    assert asyncio.run(consume()) == [("user", None)] * 2


def test_a_with_block_inside_a_session_ends_only_itself() -> None:
    model = Base()
    outer = rm.init("cpu")
    with rm.init("cpu", compile_options={"pack_weights": "never"}) as inner:
        assert inner is outer
        assert inner.settings.text("pack_weights") == "never"
    assert rm.is_initialized()
    assert outer.settings.text("pack_weights") == "auto"
    assert model is not None
    rm.shutdown()
    with rm.init("cpu"):
        assert rm.is_initialized()
    assert not rm.is_initialized()
