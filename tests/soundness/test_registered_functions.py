"""Functions of the user's in tables of transformers (AttentionInterface.register): what they read
is watched, and another process knows them by it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from soundness import quiet, routed, same_as_eager
from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertModel

import rm_abstract as rm
from rm_abstract.guards import identity, sources

GAIN = 1.0
IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 1]])
SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def gained(values: torch.Tensor) -> torch.Tensor:
    return values * GAIN


def by_values(module: Any, q: Any, k: Any, v: torch.Tensor, mask: Any, **_: Any) -> Any:
    return gained(v).transpose(1, 2).contiguous(), None


def with_mask(module: Any, q: Any, k: Any, v: Any, mask: torch.Tensor, **_: Any) -> Any:
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).contiguous(), None


GAINS = [1.0]


def by_gains(module: Any, q: Any, k: Any, v: torch.Tensor, mask: Any, **_: Any) -> Any:
    return (v * GAINS[0]).transpose(1, 2).contiguous(), None


def by_list(gains: list[float], module: Any, q: Any, k: Any, v: Any, mask: Any, **_: Any) -> Any:
    return (v * gains[0]).transpose(1, 2).contiguous(), None


class Entered(contextlib.ContextDecorator):
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def first_key(batch_size: int, **_: Any) -> torch.Tensor:
    return torch.arange(4).sub(3).mul(GAIN).expand(batch_size, 1, 4, 4).clone()


class Attention:
    def __init__(self) -> None:
        self.gain = 1.0

    def __call__(self, module: Any, q: Any, k: Any, v: torch.Tensor, mask: Any, **_: Any) -> Any:
        return (v * self.gain).transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def _tables() -> Iterator[None]:
    tables = [kind._global_mapping for kind in (AttentionInterface, AttentionMaskInterface)]
    before = [dict(table) for table in tables]
    GAINS[0] = 1.0
    torch.manual_seed(0)
    rm.init("cpu", fallback="allow")
    yield
    rm.shutdown()
    for table, was in zip(tables, before, strict=True):
        table.clear()
        table.update(was)


def bert() -> BertModel:
    return BertModel(BertConfig(**SMALL, attn_implementation="mine")).eval()


def register(attention: Any, mask: Any = None) -> None:
    AttentionInterface.register("mine", attention)
    if mask is not None:
        AttentionMaskInterface.register("mine", mask)


def described(model: torch.nn.Module) -> str:
    return identity.describe(model, lambda data: hashlib.sha256(data).digest())


@pytest.mark.parametrize(
    ("attention", "mask"), [(by_values, None), (with_mask, first_key)], ids=["attention", "mask"]
)
def test_a_global_that_a_registered_function_reads_is_watched(
    monkeypatch: pytest.MonkeyPatch, attention: Any, mask: Any
) -> None:
    register(attention, mask)
    model = bert()
    for _ in range(3):
        same_as_eager(model, IDS)
    assert routed(model) == 2
    here = described(model)
    monkeypatch.setitem(globals(), "GAIN", 3.0)
    for _ in range(3):
        same_as_eager(model, IDS)
    assert described(model) != here  # a process that starts with this value


def test_the_state_of_a_registered_object_is_watched() -> None:
    attention = Attention()
    register(attention)
    model = bert()
    for _ in range(3):
        same_as_eager(model, IDS)
    attention.gain = 3.0
    for _ in range(3):
        same_as_eager(model, IDS)


@pytest.mark.parametrize(
    "attention",
    [
        torch.no_grad()(by_gains),
        torch.autocast("cpu", enabled=False)(by_gains),
        torch.compiler.disable(by_gains, recursive=False),
        Entered()(by_gains),
        functools.singledispatch(by_gains),
        functools.partial(by_list, GAINS),
        functools.partial(functools.partial, by_gains)(),
    ],
    ids=["no_grad", "autocast", "disable", "entered", "singledispatch", "partial", "partials"],
)
def test_what_a_decorated_function_reads_is_watched(attention: Callable[..., Any]) -> None:
    register(attention)
    model = bert()
    for _ in range(3):
        same_as_eager(model, IDS)
    GAINS[0] = 3.0
    for _ in range(2):
        same_as_eager(model, IDS)


def test_a_function_that_is_added_for_a_type_is_noticed() -> None:
    attention = functools.singledispatch(by_gains)
    register(attention)
    model = bert()
    for _ in range(3):
        same_as_eager(model, IDS)
    attention.register(torch.nn.Module, functools.partial(by_list, [3.0]))
    for _ in range(2):
        same_as_eager(model, IDS)


def test_another_function_of_that_name_is_noticed() -> None:
    register(by_values)
    model = bert()
    for _ in range(3):
        same_as_eager(model, IDS)
    register(lambda module, q, k, v, mask, **_: (k.transpose(1, 2).contiguous(), None))
    for _ in range(3):
        same_as_eager(model, IDS)


def test_a_verdict_of_another_process_is_not_believed_for_it() -> None:
    register(by_values)
    model = bert()
    quiet(lambda: model(IDS))
    assert sources.of_module(model).user_code
