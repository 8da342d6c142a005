"""ONNX: shapes from values, functions, subgraphs, and node tests of the onnx package."""

from __future__ import annotations

import collections
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rm_abstract as rm

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

HEAVY = os.environ.get("RM_HEAVY") == "1"
FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def _save(
    path: Path, nodes: list[Any], inputs: dict[str, Any], outputs: list[str], **more: Any
) -> Path:
    """inputs: name to (element type, shape); more: weights, functions, imports."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()],
        [helper.make_empty_tensor_value_info(n) for n in outputs],
        [numpy_helper.from_array(w, n) for n, w in more.get("weights", {}).items()],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    model = helper.make_model(
        graph, opset_imports=imports, ir_version=9, functions=more.get("functions", [])
    )
    path.write_bytes(model.SerializeToString())
    return path


def _agree(path: Path, run: Any, **inputs: Any) -> None:
    wanted = ort.InferenceSession(str(path)).run(None, inputs)
    for ours, theirs in zip(run(**inputs), wanted, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_values_that_decide_shapes_may_differ_from_call_to_call(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Tile", ["x", "times"], ["t"]),
        helper.make_node("ReduceSum", ["t", "axes"], ["y"], keepdims=0),
    ]
    inputs = {"x": (FLOAT, ["n", 3]), "times": (INT, [2]), "axes": (INT, [1])}
    path = _save(tmp_path / "m.onnx", nodes, inputs, ["y"])
    run = rm.compile(str(path), device="cpu")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for times in ([1, 2], [3, 1], [1, 2], [2, 2]):
        for axes in ([0], [-1]):
            _agree(path, run, x=x, times=np.array(times), axes=np.array(axes))
    assert len(run._programs) == 6
    for k in range(1, 30):  # only so many programs are kept, and one made anew is right again
        _agree(path, run, x=x, times=np.array([k, 1]), axes=np.array([0]))
    assert len(run._programs) == 16
    with pytest.raises(rm.CompileError, match="Tile"):
        run(x=x, times=np.array([-1, 1]), axes=np.array([0]))


def test_sizes_that_an_operator_needs_as_numbers_may_differ_from_call_to_call(
    tmp_path: Path,
) -> None:
    nodes = [helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="cubic")]
    inputs = {"x": (FLOAT, ["n", 2, "h", "w"])}
    weights = {"scales": np.array([1, 1, 1.5, 2], np.float32)}
    path = _save(tmp_path / "m.onnx", nodes, inputs, ["y"], weights=weights)
    run = rm.compile(str(path), device="cpu")
    for shape in ((1, 2, 4, 6), (2, 2, 5, 3), (1, 2, 4, 6)):
        _agree(path, run, x=np.random.default_rng(0).standard_normal(shape, np.float32))
    for wrong in (np.ones((1, 3, 4, 6), np.float32), np.ones((1, 2, 4, 6)), np.ones(3, np.float32)):
        with pytest.raises(rm.ExecutionError, match="'x' as f32"):
            run(x=wrong)


def test_shapes_from_computed_values_are_refused_by_name(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["high"], keepdims=1),
        helper.make_node("Cast", ["high"], ["shape"], to=INT),
        helper.make_node("Reshape", ["x", "shape"], ["y"], name="here"),
    ]
    path = _save(tmp_path / "m.onnx", nodes, {"x": (FLOAT, [5000])}, ["y"])
    with pytest.raises(rm.CompileError, match="Reshape 'here'") as caught:
        rm.compile(str(path), device="cpu")
    assert caught.value.code == "RM342"


def _function(name: str, nodes: list[Any], attributes: list[str] | None = None) -> Any:
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, ["a", "b"], ["c"], nodes, imports, attributes or [])


def test_functions_of_the_file_are_expanded(tmp_path: Path) -> None:
    leaky = helper.make_node("LeakyRelu", ["a"], ["h"])
    slope = leaky.attribute.add(name="alpha", ref_attr_name="slope")
    slope.type = onnx.AttributeProto.FLOAT
    inner = _function("Leak", [leaky, helper.make_node("Add", ["h", "b"], ["c"])], ["slope"])
    outer = _function(
        "Twice",
        [
            helper.make_node("Leak", ["a", "b"], ["h"], domain="local", slope=0.5),
            helper.make_node("Leak", ["h", "a"], ["c"], domain="local", slope=0.25),
        ],
    )
    nodes = [helper.make_node("Twice", ["x", "w"], ["y"], domain="local")]
    weights = {"w": np.array([1, -2, 3], np.float32)}
    path = _save(
        tmp_path / "m.onnx",
        nodes,
        {"x": (FLOAT, ["n", 3])},
        ["y"],
        weights=weights,
        functions=[inner, outer],
    )
    run = rm.compile(str(path), device="cpu")
    _agree(path, run, x=np.array([[-4, 5, -6]], np.float32))


@pytest.mark.parametrize("kind", ["itself", "doubling"])
def test_functions_without_end_are_refused(tmp_path: Path, kind: str) -> None:
    def calls(name: str) -> list[Any]:
        return [
            helper.make_node(name, ["a", "b"], ["h"], domain="local"),
            helper.make_node(name, ["h", "a"], ["c"], domain="local"),
        ]

    if kind == "itself":
        functions = [_function("F0", calls("F0"))]
    else:  # 2^40 sums
        functions = [_function(f"F{k}", calls(f"F{k + 1}")) for k in range(40)]
        functions.append(_function("F40", [helper.make_node("Add", ["a", "b"], ["c"])]))
    nodes = [helper.make_node("F0", ["x", "x"], ["y"], domain="local")]
    path = _save(tmp_path / "m.onnx", nodes, {"x": (FLOAT, [2])}, ["y"], functions=functions)
    with pytest.raises(rm.CompileError, match=r"local\.F|Add 'c'") as caught:
        rm.compile(str(path), device="cpu")
    assert caught.value.code == "RM341"


def _body(
    nodes: list[Any], inputs: list[tuple[str, int, Any]], outputs: list[tuple[str, int, Any]]
) -> Any:
    return helper.make_graph(
        nodes,
        "body",
        [helper.make_tensor_value_info(*i) for i in inputs],
        [helper.make_tensor_value_info(*o) for o in outputs],
    )


def test_branches_and_loops_are_their_steps(tmp_path: Path) -> None:
    step = _body(
        [
            helper.make_node("Add", ["s", "x"], ["next"]),  # x is seen from outside
            helper.make_node("Mul", ["next", "next"], ["square"]),
            helper.make_node("Identity", ["go"], ["goes"]),
        ],
        [("k", INT, []), ("go", TensorProto.BOOL, []), ("s", FLOAT, [3])],
        [("goes", TensorProto.BOOL, []), ("next", FLOAT, [3]), ("square", FLOAT, [3])],
    )
    scan = _body(
        [
            helper.make_node("Add", ["s", "row"], ["next"]),
            helper.make_node("Identity", ["next"], ["shown"]),
        ],
        [("s", FLOAT, [3]), ("row", FLOAT, [3])],
        [("next", FLOAT, [3]), ("shown", FLOAT, [3])],
    )
    yes = _body([helper.make_node("Neg", ["last"], ["r"])], [], [("r", FLOAT, [3])])
    no = _body([helper.make_node("Abs", ["last"], ["r"])], [], [("r", FLOAT, [3])])
    nodes = [
        helper.make_node("Loop", ["count", "", "x"], ["end", "squares"], body=step),
        helper.make_node(
            "Scan", ["end", "squares"], ["last", "sums"], body=scan, num_scan_inputs=1
        ),
        helper.make_node("If", ["choice"], ["y"], then_branch=yes, else_branch=no),
    ]
    inputs = {"x": (FLOAT, [3]), "count": (INT, []), "choice": (TensorProto.BOOL, [])}
    path = _save(tmp_path / "m.onnx", nodes, inputs, ["y", "sums"])
    run = rm.compile(str(path), device="cpu")
    x = np.array([1, -2, 0.5], np.float32)
    for count, choice in ((1, True), (4, False)):
        _agree(path, run, x=x, count=np.array(count), choice=np.array(choice))
    with pytest.raises(rm.CompileError, match="Loop"):
        run(x=x, count=np.array(10**9), choice=np.array(True))


PINNED = """
averagepool_2d_ceil averagepool_2d_pads_count_include_pad maxpool_2d_uint8 lppool_2d_pads
col2im_pads argmax_keepdims_random_select_last_index cumsum_2d_axis_1 cumprod_2d_axis_1 top_k
onehot_with_axis einsum_batch_diagonal einsum_batch_matmul scatter_elements_with_reduction_max
scatternd_add gathernd_example_int32_batch_dim1 reflect_pad wrap_pad center_crop_pad_crop_and_pad
tile slice_neg_steps resize_downsample_sizes_cubic resize_upsample_scales_linear_align_corners
resize_tf_crop_and_resize resize_downsample_scales_linear_antialias
resize_upsample_sizes_nearest_floor_align_corners gridsample_bicubic gridsample_reflection_padding
gridsample_volumetric_bilinear_align_corners_1 affine_grid_3d lstm_with_peepholes gru_seq_length
simple_rnn_bidirectional attention_4d_gqa_softcap attention_3d_with_past_and_present
attention_4d_causal attention_4d_attn_mask_bool_4d qlinearconv qlinearmatmul_2D_uint8_float32
dynamicquantizelinear quantizelinear_axis dequantizelinear_blocked matmulinteger
convinteger_with_padding rotary_embedding_interleaved linear_attention_gated_delta
causal_conv_with_state_silu layer_normalization_4d_axis1 rms_normalization_4d_axis1
group_normalization_example mvn lrn nllloss_NCd1d2_with_weight bitshift_right_uint8
mod_mixed_sign_float32 reversesequence_batch eyelike_populate_off_main_diagonal
convtranspose_output_shape hardmax_axis_1 batchnorm_example_training_mode affine_grid_2d_expanded
linear_attention_delta_expanded if loop11 scan9_sum
reduce_log_sum_exp_negative_axes_keepdims_random constant_pad depthtospace_crd_mode_example
gemm_all_attributes instancenorm_example
""".split()


def test_node_tests_of_the_onnx_package_are_right(tmp_path: Path) -> None:
    """The pinned ones pass; with RM_HEAVY=1 the others are right, refused or fail by name."""
    from onnx.backend.test.loader import load_model_tests

    said: collections.Counter[str] = collections.Counter()
    path = tmp_path / "case.onnx"
    for case in load_model_tests(kind="node"):
        is_pinned = case.name.removeprefix("test_") in PINNED
        if case.model is None or not (is_pinned or HEAVY):
            continue
        onnx.save(case.model, path)
        try:
            run = rm.compile(str(path), device="cpu")
            results = [run(*given) for given, _ in case.data_sets]
        except rm.Error as error:
            assert not is_pinned and error.code.startswith("RM3"), f"{case.name}: {error}"
            said["refused"] += 1
            continue
        for got, (_, wanted) in zip(results, case.data_sets, strict=True):
            for ours, right in zip(got, wanted, strict=True):
                np.testing.assert_allclose(ours, right, rtol=1e-3, atol=1e-5, err_msg=case.name)
                assert ours.dtype == right.dtype and ours.shape == right.shape, case.name
        said["pinned" if is_pinned else "passed"] += 1
    print(dict(said))
    assert said["pinned"] == len(PINNED), sorted(PINNED)
