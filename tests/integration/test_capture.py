"""Capture declines what is no data, names what it cannot export, and keeps the output's type."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from rm_abstract import _core
from rm_abstract.base.decline import Decline
from rm_abstract.capture.dims import evaluate
from rm_abstract.capture.errors import CaptureError
from rm_abstract.capture.export import capture
from rm_abstract.capture.outputs import builder

logging.getLogger("torch.__trace").disabled = True


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(1))
        self.table = torch.arange(3.0)

    def forward(self, x: torch.Tensor, mode: Any = "plain", extra: Any = None) -> Any:
        if mode == "nested":
            return {"y": self.layer(x), "rest": [x, None, 3, Pair(x + 1, (extra,))]}
        if mode == "data":
            return x if x.sum() > 0 else -x
        if mode == "buffer":
            self.count.add_(1)
        if mode == "resized":  # an assertion of torch's own, when it traces the program again
            return x.clone().resize_as_(extra)
        if mode == "object":
            return object()
        if mode == "table":
            return x * self.table
        if mode == "guard" and x.shape[0] > 5:
            return self.layer(x) * 2
        return self.layer(x)


def test_a_graph_that_nobody_runs_is_not_written_as_code_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = []
    stock = torch.fx.Graph.python_code

    def counted(graph: torch.fx.Graph, *args: Any, **kwargs: Any) -> Any:
        written.append(graph)
        return stock(graph, *args, **kwargs)

    monkeypatch.setattr(torch.fx.Graph, "python_code", counted)
    capture(Linear().eval(), (torch.randn(4, 3),), {})
    assert len(written) <= 1  # six times by default


def test_the_program_is_the_same_text_each_time() -> None:
    captured = capture(Linear().eval(), (torch.randn(4, 3),), {})
    assert captured.ir == (
        "rmir 1\n"
        "sym s0 [2,9223372036854775807]\n"
        'input %0 "input0" : f32[s0,3]\n'
        'weight %1 "layer.weight" : f32[2,3]\n'
        'weight %2 "layer.bias" : f32[2]\n'
        "%3 = linear(%0, %1, %2) : f32[s0,2]\n"
        "return %3\n"
    )
    assert captured.weights == ["layer.weight", "layer.bias"]
    assert captured.input_dims == [["s0", "3"]] and captured.output == ["tensor", 0]


def test_a_tensor_attribute_is_a_weight() -> None:
    captured = capture(Linear().eval(), (torch.randn(4, 3), "table"), {})
    assert captured.weights == ["table"] and not captured.constants


@pytest.mark.parametrize("value", [object(), {1: torch.ones(2)}, {torch.float32}, lambda: 0])
def test_a_value_that_is_no_data_is_declined_by_name(value: Any) -> None:
    with pytest.raises(Decline, match=r"RM104.*'extra'"):
        capture(Linear().eval(), (torch.randn(4, 3),), {"extra": value})


@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("data", "RM203", __file__),
        ("buffer", "RM204", "count"),
        ("object", "RM204", "object"),
        ("resized", "RM201", "Linear"),
    ],
)
def test_a_failure_has_a_code_and_says_where(mode: str, code: str, said: str) -> None:
    with pytest.raises(CaptureError) as failure:
        capture(Linear().eval(), (torch.randn(4, 3), mode, torch.randn(4, 3)), {})
    assert failure.value.code == code and said in str(failure.value)
    assert "expected" in str(failure.value) and "try" in str(failure.value)


def test_nested_outputs_are_rebuilt_with_their_types() -> None:
    module = Linear().eval()
    x, extra = torch.randn(4, 3), torch.randn(2)
    captured = capture(module, (x, "nested", extra), {})
    made = builder_for_test(captured.output, [x, extra])
    assert list(made) == ["y", "rest"]
    assert made["rest"][0] is x and made["rest"][1:3] == [None, 3]
    assert isinstance(made["rest"], list) and made["rest"][3][1][0] is extra


def builder_for_test(structure: Any, leaves: list[Any]) -> Any:
    """A Pair of this file is no importable output class: it is stored as a plain tuple here."""

    def plain(node: Any) -> Any:
        if isinstance(node, list) and node and node[0] == "named":
            return ["tuple", *[plain(n) for n in node[3:]]]
        return [plain(n) for n in node] if isinstance(node, list) else node

    return builder(plain(structure))([torch.zeros(1)] * 4, leaves)


def test_a_guard_of_the_python_code_becomes_a_condition() -> None:
    module = Linear().eval()
    small = capture(module, (torch.randn(4, 3), "guard"), {})
    large = capture(module, (torch.randn(8, 3), "guard"), {})
    for captured, yes, no in ((small, 3, 7), (large, 7, 3)):
        fits = _core.ir.Signature(captured.ir).test()
        assert fits([(yes, 3)]) and not fits([(no, 3)]) and not fits([(yes, 4)])


def test_dim_expressions_are_integer_arithmetic() -> None:
    sizes = {"s0": 7, "s1": 3}
    assert evaluate("2*s0+floordiv(s1-10,2)*(s0-s1)+mod(-s0,s1)", sizes) == 14 - 16 + 2
    assert evaluate("min(s0,max(s1,5))", sizes) == 5
    for bad in ("s0+", "s0)", "s0.x", "s0 if s1 else 2", "__import__('os')"):
        with pytest.raises((ValueError, KeyError)):
            evaluate(bad, sizes)


@pytest.mark.parametrize("text", ["s0.__class__==1", "__import__('os')==0", "s0==1;x==2", "s0=1"])
def test_relations_of_sizes_are_nothing_but_that(text: str) -> None:
    program = f'rmir 1\nsym s0 [0,9]\ninput %0 "x" : f32[s0]\nwhere {text}\nreturn %0\n'
    with pytest.raises(_core.CoreError, match="expected"):
        _core.ir.Signature(program)


def test_the_users_module_keeps_its_weights_while_it_is_captured() -> None:
    """Another thread may run the model at that time."""
    seen: list[type] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(type(original.linear.weight))
            return self.linear(x)

    original = Watched().eval()
    weight = original.linear.weight
    with torch.no_grad():
        captured = capture(original, (torch.randn(2, 3),), {})
    assert set(captured.weights) == {
        "linear.bias",
        "linear.weight",
    }
    assert seen and set(seen) == {nn.Parameter}
    assert original.linear.weight is weight
