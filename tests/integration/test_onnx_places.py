"""Places of largest elements, deformed convolutions, selections by known values and arcs, as ONNX
Runtime and numpy compute them: drawn sizes, strides, paddings, groups, NaN and infinities."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import rm_abstract as rm

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import helper  # noqa: E402


def _both(op: str, given: list[Any], outputs: int = 1, **attributes: Any) -> tuple[Any, Any]:
    """What we and ONNX Runtime give for one node of opset 19."""
    names = [f"x{k}" if value is not None else "" for k, value in enumerate(given)]
    values = {n: v for n, v in zip(names, given, strict=True) if v is not None}
    node = helper.make_node(op, names, [f"y{k}" for k in range(outputs)], **attributes)
    dtype = helper.np_dtype_to_tensor_dtype
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, dtype(v.dtype), v.shape) for n, v in values.items()],
        [helper.make_empty_tensor_value_info(n) for n in node.output],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    theirs = ort.InferenceSession(model.SerializeToString()).run(None, values)
    return list(rm.onnx.run_model(model, list(values.values()))), theirs


def _same(ours: Any, theirs: Any, tolerance: float = 0.0) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_places_of_the_largest_elements_are_those_of_onnx_runtime(axes: int) -> None:
    rng = np.random.default_rng(random.getrandbits(32))
    for _ in range(6):
        kernel = rng.integers(1, 4, axes).tolist()
        dilations = rng.integers(1, 3, axes).tolist() if axes < 3 else [1] * axes
        size = [
            int((k - 1) * d + 1 + rng.integers(0, 5))
            for k, d in zip(kernel, dilations, strict=True)
        ]
        pads = [int(rng.integers(0, (k + 1) // 2)) for k in kernel] * 2
        x = rng.integers(-3, 4, (2, 3, *size)).astype(np.float32)  # many are equal
        ours, theirs = _both(
            "MaxPool",
            [x],
            2,
            kernel_shape=kernel,
            dilations=dilations,
            pads=pads,
            strides=rng.integers(1, 4, axes).tolist(),
            ceil_mode=int(rng.integers(0, 2)),
        )
        _same(ours, theirs)


def test_elements_go_back_to_their_places() -> None:
    rng = np.random.default_rng(random.getrandbits(32))
    x = rng.standard_normal((2, 3, 8, 6)).astype(np.float32)
    (values, places), _ = _both("MaxPool", [x], 2, kernel_shape=[2, 2], strides=[2, 2])
    ours, theirs = _both("MaxUnpool", [values, places], kernel_shape=[2, 2], strides=[2, 2])
    _same(ours, theirs)
    assert np.count_nonzero(ours[0]) == values.size


def test_deformed_convolutions_read_between_elements_and_zeros_outside() -> None:
    rng = np.random.default_rng(random.getrandbits(32))
    for groups, moving, has_mask in ((1, 1, True), (2, 1, False), (1, 2, True), (4, 4, True)):
        kernel = [int(n) for n in rng.integers(1, 4, 2)]
        x = rng.standard_normal((2, 8, 7, 6)).astype(np.float32)
        w = rng.standard_normal((4, 8 // groups, *kernel)).astype(np.float32)
        stride, pads = [int(n) for n in rng.integers(1, 3, 2)], [1, 0, 1, 0]
        out = [
            (n + p - k) // s + 1 for n, p, k, s in zip((7, 6), (2, 0), kernel, stride, strict=True)
        ]
        count = moving * kernel[0] * kernel[1]
        offset = (rng.standard_normal((2, 2 * count, *out)) * 2.5).astype(np.float32)
        mask = rng.random((2, count, *out)).astype(np.float32) if has_mask else None
        bias = rng.standard_normal(4).astype(np.float32)
        ours, theirs = _both(
            "DeformConv",
            [x, w, offset, bias, mask] if has_mask else [x, w, offset, bias],
            strides=stride,
            pads=pads,
            kernel_shape=kernel,
            group=groups,
            offset_group=moving,
        )
        _same(ours, theirs, 1e-4)


def test_what_known_values_select_is_selected() -> None:
    rng = np.random.default_rng(random.getrandbits(32))
    x = rng.integers(-2, 3, (4, 5)).astype(np.float32)
    for axis in (0, 1, -1):
        size = x.shape[axis]
        for chosen in (np.zeros(size, bool), np.ones(size, bool), rng.integers(0, 2, size - 1) > 0):
            _same(*_both("Compress", [x, chosen], axis=axis))
    _same(*_both("Compress", [x, rng.integers(0, 2, 17) > 0]))
    _same(*_both("NonZero", [x]))
    _same(*_both("NonZero", [np.zeros((2, 3), np.int64)]))
    for attributes in ({}, {"axis": 0}, {"axis": -1}, {"sorted": 0}, {"axis": 1, "sorted": 0}):
        _same(*_both("Unique", [x], 4, **attributes))
    with pytest.raises(rm.CompileError, match="Unique"):
        rm.onnx.run_node(helper.make_node("Unique", ["x"], ["y"]), [np.array([1.0, np.nan])])
    with pytest.raises(rm.CompileError) as caught:  # what a program computes decides no size
        nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("NonZero", ["h"], ["y"])]
        ports = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [5000])]
        graph = helper.make_graph(nodes, "g", ports, [helper.make_empty_tensor_value_info("y")])
        rm.onnx.prepare(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    assert caught.value.code == "RM342"


@pytest.mark.parametrize("op", ["Asin", "Acos", "Atan"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_arcs_are_numpys(op: str, dtype: Any) -> None:
    edges = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        1.5,
        np.nan,
        np.inf,
        -np.inf,
        1e-30,
        -0.9999999,
        0.41421357,
        2.4142137,
    ]
    x = np.concatenate([edges, np.random.default_rng(random.getrandbits(32)).uniform(-3, 3, 500)])
    x = x.astype(dtype)
    got = rm.onnx.run_node(helper.make_node(op, ["x"], ["y"]), [x])[0]
    with np.errstate(invalid="ignore"):
        wanted = {"Asin": np.arcsin, "Acos": np.arccos, "Atan": np.arctan}[op](x)
    tolerance = {np.float32: 2e-6, np.float64: 2e-12, np.float16: 2e-3}[dtype]
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def test_files_of_old_opsets_run_where_operators_mean_the_same() -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    x = np.array([-1, 2], np.float32)
    assert rm.onnx.run_node(node, [x], opset_version=6)[0].tolist() == [0, 2]
    with pytest.raises(rm.CompileError, match="opset from 7"):
        rm.onnx.run_node(helper.make_node("Add", ["x", "x"], ["y"]), [x], opset_version=6)
