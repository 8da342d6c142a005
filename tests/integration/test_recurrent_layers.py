"""nn.LSTM, nn.GRU, nn.RNN and their cells: equal to PyTorch's, on our kernels, one program for all
lengths; what stays with PyTorch says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm
from rm_abstract import _core
from rm_abstract.capture.export import capture
from rm_abstract.verification import parity
from rm_abstract.worker.ir_to_torch import ir_to_torch

Build = Callable[[], nn.Module]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 12), nn.Linear(40, 7)
        self.lstm = nn.LSTM(12, 20, 2, batch_first=True, bidirectional=True, dropout=0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.embed(ids))[0])


class Cells(nn.Module):
    """One step of each kind of cell after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(6, 9), nn.GRUCell(9, 9, bias=False)
        self.plain, self.relu = nn.RNNCell(9, 9), nn.RNNCell(9, 4, nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, c = self.lstm(x)
        g = self.gru(h, c)
        return c, g, self.relu(self.plain(g, h))


def sequences(*shapes: tuple[int, ...]) -> list[tuple[Any, ...]]:
    return [(torch.randn(shape),) for shape in shapes]


def with_states(
    inputs: list[tuple[int, int]], width: int, *sizes: tuple[int, int]
) -> list[tuple[Any, ...]]:
    """x [T,B,width] and states [n,B,size] for each (n, size): one tensor, or a tuple of two."""
    calls = []
    for steps, batch in inputs:
        states = tuple(torch.randn(n, batch, size) for n, size in sizes)
        calls.append((torch.randn(steps, batch, width), states if len(sizes) > 1 else states[0]))
    return calls


LINES = ((5, 3, 8), (9, 3, 8), (2, 4, 8))  # [T,B,I]
CASES: dict[str, tuple[Build, Callable[[], list[tuple[Any, ...]]]]] = {
    "lstm": (lambda: nn.LSTM(8, 16), lambda: sequences(*LINES)),
    "lstm, two layers both ways, dropout": (
        lambda: nn.LSTM(8, 17, 2, batch_first=True, bidirectional=True, dropout=0.3),
        lambda: sequences(*LINES),
    ),
    "lstm with a projection": (
        lambda: nn.LSTM(8, 20, 2, proj_size=5, bidirectional=True),
        lambda: sequences(*LINES),
    ),
    "lstm without bias, states given": (
        lambda: nn.LSTM(8, 10, 2, bias=False),
        lambda: with_states([(4, 3), (7, 2)], 8, (2, 10), (2, 10)),
    ),
    "lstm with a projection, states given": (
        lambda: nn.LSTM(8, 10, proj_size=3, bias=False),
        lambda: with_states([(4, 3), (7, 2)], 8, (1, 3), (1, 10)),
    ),
    "gru": (lambda: nn.GRU(8, 16, 2, bidirectional=True), lambda: sequences(*LINES)),
    "gru, states given": (
        lambda: nn.GRU(8, 6),
        lambda: with_states([(4, 3), (7, 2)], 8, (1, 6)),
    ),
    "gru without bias": (
        lambda: nn.GRU(8, 5, batch_first=True, bias=False),
        lambda: sequences(*LINES),
    ),
    "rnn": (lambda: nn.RNN(8, 33, 2), lambda: sequences(*LINES)),
    "rnn of relu": (
        lambda: nn.RNN(8, 9, nonlinearity="relu", bidirectional=True, batch_first=True),
        lambda: sequences(*LINES),
    ),
    "no batch": (lambda: nn.LSTM(8, 12), lambda: sequences((5, 8), (11, 8))),
    "one step of one row": (lambda: nn.GRU(8, 12), lambda: sequences((1, 1, 8))),
    "no rows": (lambda: nn.LSTM(8, 12), lambda: sequences((4, 0, 8))),
    "turned and cut inputs": (
        lambda: nn.LSTM(8, 12),
        lambda: [(torch.randn(6, 5, 16).transpose(0, 1)[:, ::2, 4:12],)],
    ),
    "tagger": (Tagger, lambda: [(torch.randint(0, 50, s),) for s in ((2, 9), (3, 4))]),
    "cells": (Cells, lambda: sequences((3, 6), (5, 6))),
}


@pytest.fixture(autouse=True)
def session() -> Iterator[Any]:
    torch.manual_seed(0)
    yield rm.init("cpu")
    rm.shutdown()


def check(name: str, precision: torch.dtype) -> Any:
    """Every call twice: the first of a kind is eager's. The report of the module."""
    build, inputs = CASES[name]
    module = build().eval().to(precision)
    rm.accelerate(module)
    for args in inputs():
        args = torch.utils._pytree.tree_map(
            lambda t: t.to(precision) if t.is_floating_point() else t, args
        )
        with torch.no_grad():
            with rm.disabled():
                expected = module(*args)
            for _ in range(2):
                given = module(*args)
        for want, got in zip(*map(torch.utils._pytree.tree_leaves, (expected, given)), strict=True):
            verdict = parity.compare(want, got, precision)
            assert verdict.passed, verdict.detail
            if precision is torch.float32:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    report = rm.explain(module)
    # Of no rows nothing is computed, and of nothing no share is ours.
    assert name == "no rows" or report.native_share == 1.0, report
    return report


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_torchs_and_all_of_it_is_ours(name: str) -> None:
    calls = len(CASES[name][1]())
    assert check(name, torch.float32).routed >= calls


@pytest.mark.parametrize("name", ["lstm with a projection", "gru", "rnn of relu", "tagger"])
def test_half_precision_too(name: str) -> None:
    assert check(name, torch.bfloat16).routed > 0


def test_one_program_serves_all_lengths_and_batches() -> None:
    module = nn.LSTM(8, 16, bidirectional=True, batch_first=True).eval()
    rm.accelerate(module)
    with torch.no_grad():
        for batch, steps in ((2, 3), (4, 100), (3, 7), (2, 2)):
            x = torch.randn(batch, steps, 8)
            with rm.disabled():
                expected = module(x)
            torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-6)
    (model,) = rm.explain(module).models
    assert model["routed"] == 3 and len(model["entries"]) == 1, model


@pytest.mark.parametrize("name", ["lstm with a projection", "gru", "rnn of relu"])
def test_the_program_in_torch_for_vendors_compilers_gives_the_same(name: str) -> None:
    build, inputs = CASES[name]
    module = build().eval()
    (x,) = inputs()[0]
    captured = capture(module, (x,), {})
    sizes = {s: x.shape[i] for i, s in enumerate(captured.input_dims[0]) if s.isidentifier()}
    state = dict(module.named_parameters())
    weights = {n: state[n].detach() for n in captured.weights} | captured.constants
    text = _core.ir.substitute(captured.ir, sizes)
    with torch.no_grad():
        given = ir_to_torch(text, weights)(x)
        expected = torch.utils._pytree.tree_leaves(module(x))
    torch.testing.assert_close(list(given), expected, rtol=1e-5, atol=1e-6)


def test_weights_changed_in_place_are_the_ones_of_the_next_call() -> None:
    module = nn.GRU(4, 6).eval()
    rm.accelerate(module)
    x = torch.randn(3, 2, 4)
    with torch.no_grad():
        for _ in range(3):
            module(x)
        module.weight_hh_l0.mul_(0.5)
        with rm.disabled():
            expected = module(x)
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-6)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


def test_packed_sequences_f64_and_dropout_left_on_stay_with_pytorch() -> None:
    x = torch.randn(2, 3, 4)
    packed, double = Packed().eval(), nn.LSTM(4, 5).double().eval()
    dropped = nn.GRU(4, 4, 2, dropout=0.5).eval()
    whole = nn.Sequential(dropped).eval()
    dropped.training = True
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", rm.RoutingWarning)
        for module, args in (
            (packed, (x, torch.tensor([3, 2]))),
            (double, (x.double(),)),
            (whole, (x,)),
        ):
            rm.accelerate(module)
            torch.manual_seed(1)
            given = [module(*args) for _ in range(3)]
            with rm.disabled():
                torch.manual_seed(1)
                expected = [module(*args) for _ in range(3)]
            torch.testing.assert_close(given, expected)
    codes = {r["code"] for m in rm.explain().models for r in m["reasons"]}
    assert rm.explain().routed == 0 and {"RM101", "RM203", "RM207"} <= codes, rm.explain()
