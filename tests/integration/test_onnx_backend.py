"""``rm_abstract.onnx`` under the backend tests of the onnx package, and by itself."""

from __future__ import annotations

import os
import unittest
from typing import Any

import numpy as np
import pytest

import rm_abstract as rm

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper  # noqa: E402

HEAVY = os.environ.get("RM_HEAVY") == "1"
PINNED = """
abs add_bcast argmax_default_axis_example averagepool_2d_pads cast_FLOAT_to_DOUBLE
concat_2d_axis_0 convtranspose_1d gather_1 gemm_default_vector_bias layer_normalization_2d_axis0
logsoftmax_axis_1 lstm_defaults matmul_3d nllloss_NC reduce_mean_keepdims_random
reduce_l1_default_axes_keepdims_example reshape_reduced_dims resize_upsample_scales_nearest
scatternd slice softmax_axis_0 split_equal_parts_2d squeeze top_k where_example
""".split()


def _add_model() -> Any:
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in "abs"]
    graph = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["s"])], "g", ports[:2], ports[2:]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def test_prepared_models_run_by_position_and_by_name() -> None:
    x, y = np.arange(3, dtype=np.float32), np.ones(3, np.float32)
    prepared = rm.onnx.prepare(_add_model())
    for outputs in (
        prepared.run([x, y]),
        prepared.run({"a": x, "b": y}),
        rm.onnx.run_model(_add_model(), [x, y]),
        rm.onnx.run_node(helper.make_node("Add", ["a", "b"], ["s"]), [x, y]),
    ):
        np.testing.assert_array_equal(outputs[0], x + 1)
    np.testing.assert_array_equal(prepared.run([x, y])["s"], x + 1)
    node = helper.make_node("ReduceSum", ["a"], ["s"], axes=[0], keepdims=0)
    assert rm.onnx.run_node(node, [x], opset_version=11)[0] == 3


def test_other_devices_options_and_operators_are_refused() -> None:
    assert rm.onnx.supports_device("CPU") and not rm.onnx.supports_device("CUDA")
    with pytest.raises(rm.ConfigError, match="CUDA"):
        rm.onnx.prepare(_add_model(), "CUDA")
    with pytest.raises(rm.ConfigError, match="threads"):
        rm.onnx.prepare(_add_model(), threads=1)
    node = helper.make_node("StringNormalizer", ["a"], ["s"])
    with pytest.raises(rm.CompileError, match="StringNormalizer"):
        rm.onnx.run_node(node, [np.ones(2, np.float32)])
    model = _add_model()
    assert rm.onnx.is_compatible(model)
    model.graph.node[0].op_type = "NoSuchOperator"
    assert not rm.onnx.is_compatible(model)


def test_the_backend_tests_of_the_onnx_package_pass() -> None:
    """Pinned ones; with RM_HEAVY=1 all node tests, of which what is refused counts as skipped."""
    from onnx.backend.test import BackendTest
    from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt

    refused: list[str] = []

    def refuse(error: rm.Error) -> None:
        assert error.code.startswith("RM34"), str(error)
        refused.append(str(error))
        raise BackendIsNotSupposedToImplementIt(str(error)) from None

    class Backend(rm.onnx.RmBackend):  # type: ignore[misc, name-defined]
        @classmethod
        def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> Any:
            try:
                prepared = super().prepare(model, device, **kwargs)
            except rm.CompileError as error:
                return refuse(error)
            run = prepared.run

            def tried(inputs: Any, **options: Any) -> Any:
                try:
                    return run(inputs, **options)
                except rm.CompileError as error:  # what only a call can say
                    return refuse(error)

            prepared.run = tried
            return prepared

    tests = BackendTest(Backend, __name__)
    if HEAVY:
        tests.include(r"^test_.*_cpu$")
    for name in PINNED:
        tests.include(f"^test_{name}_cpu$")
    cases = tests.test_cases["OnnxBackendNodeModelTest"]
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(cases)
    result = unittest.TestResult()
    suite.run(result)
    failed = [(str(test), said[-300:]) for test, said in [*result.failures, *result.errors]]
    passed = result.testsRun - len(result.skipped) - len(failed) - len(refused)
    print(f"{passed} passed, {len(refused)} refused, {len(failed)} failed: {failed}")
    if HEAVY:
        assert not failed and passed >= 1480, failed
    else:
        assert not failed and not refused and passed == len(PINNED), (failed, refused, passed)
