"""Sizes that an ONNX file names and that are 0 or 1 in a call, against ONNX Runtime."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import rm_abstract as rm

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper  # noqa: E402


def _file(nodes: list[Any], inputs: dict[str, list[Any]], opset: int = 17) -> bytes:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_empty_tensor_value_info(nodes[-1].output[0])],
    )
    opsets = [helper.make_opsetid("", opset)]
    made: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    return made


def _given(seed: int, **shapes: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def _agree(run: Any, session: Any, given: dict[str, Any]) -> None:
    (got,), (wanted,) = run(**given), session.run(None, given)
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


TWO = {"x": ["a", 4], "y": ["b", "c"]}
FILES: dict[str, tuple[list[Any], dict[str, list[Any]]]] = {
    "expand": (
        [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("Expand", ["y", "s"], ["z"]),
        ],
        TWO,
    ),
    "add": ([helper.make_node("Add", ["x", "y"], ["z"])], TWO),
    "less": ([helper.make_node("Less", ["y", "x"], ["z"])], TWO),
    "several": (
        [
            helper.make_node("Mul", ["y", "x"], ["p"]),
            helper.make_node("Max", ["p", "x", "y"], ["z"]),
        ],
        TWO,
    ),
    "products": (
        [helper.make_node("MatMul", ["x", "y"], ["z"])],
        {"x": ["a", 2, 4], "y": ["b", 4, 3]},
    ),
    "squeeze": ([helper.make_node("Squeeze", ["x"], ["z"])], {"x": ["a", 4, "b"]}),
    "concat": (
        [helper.make_node("Concat", ["x", "y"], ["z"], axis=0)],
        {"x": ["a", 4], "y": ["b", 4]},
    ),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("seed", range(3))
def test_named_sizes_may_be_0_and_1(name: str, seed: int) -> None:
    nodes, inputs = FILES[name]
    file = _file(nodes, inputs)
    run, session = rm.compile(file), ort.InferenceSession(file)
    draw, compared = random.Random(seed), 0
    for number in range(12):
        sizes = {s: draw.choice([0, 1, 1, 3]) for s in "ab"} | {"c": draw.choice([1, 4])}
        shapes = {n: tuple(sizes.get(s, s) for s in shape) for n, shape in inputs.items()}
        given = _given(number, **shapes)
        try:
            session.run(None, given)
        except Exception:
            continue  # sizes that do not broadcast
        compared += 1
        _agree(run, session, given)
    assert compared > 3


def test_sizes_that_do_not_fit_stay_an_error() -> None:
    run = rm.compile(_file(*FILES["add"]))
    for a, b in ((2, 3), (0, 3), (3, 0)):
        with pytest.raises(rm.Error):
            run(**_given(0, x=(a, 4), y=(b, 4)))
    with pytest.raises(rm.Error):
        run(x=np.ones((1, 4)), y=np.ones((3, 4), np.float32))


NORMS = {
    "ReduceL1": np.abs,
    "ReduceL2": np.abs,
    "ReduceSumSquare": np.square,
    "ReduceLogSum": lambda x: np.log(np.abs(x)),
    "ReduceLogSumExp": lambda x: x,
    "ReduceSum": lambda x: x,
    "ReduceMax": lambda x: x,
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("axes", ["none", "empty"])
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_a_reduction_over_no_axis_is_of_each_element(
    name: str, axes: str, shape: tuple[int, ...]
) -> None:
    (x,) = _given(0, x=shape).values()
    given = [np.abs(x) if name == "ReduceLogSum" else x]
    given += [np.zeros(0, np.int64)] if axes == "empty" else []
    node = helper.make_node(name, ["x", "axes"][: len(given)], ["z"], noop_with_empty_axes=1)
    (got,) = rm.onnx.run_node(node, given, opset_version=18)
    np.testing.assert_allclose(got, NORMS[name](x), rtol=1e-5, atol=1e-6)
