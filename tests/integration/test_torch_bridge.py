"""The torch bridge against eager, bit for bit: it runs the same kernels on our memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from bridge_runner import Bridge, flatten

from rm_abstract.capture.aten_args import UnsupportedCall, decode_call, encode_call
from rm_abstract.testing import host, plugins

A = torch.ops.aten
INF = float("inf")


@pytest.fixture(scope="module")
def bridge() -> Bridge:
    return Bridge(plugins.built_plugin("torch"))


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*shape: int, high: int = 5) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


x4 = rand(2, 4, 9, 9)
x3 = rand(2, 5, 7)
x2 = rand(6, 8)
mask = rand(6, 8) > 0

# One row an overload: operator, positional arguments, keyword arguments.
CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (
        A.convolution.default,
        (x4, rand(6, 2, 3, 3), rand(6), [2, 1], [1, 1], [1, 1], False, [0, 0], 2),
        {},
    ),
    (A.conv2d.default, (x4, rand(3, 4, 3, 3)), {}),
    (A.conv1d.default, (x3, rand(4, 5, 3), rand(4), [1], [1]), {}),
    (A.conv_transpose2d.input, (x4, rand(4, 3, 2, 2), None, [2, 2]), {}),
    (A.max_pool2d.default, (x4, [3, 3], [2, 2], [1, 1]), {}),
    (A.max_pool2d_with_indices.default, (x4, [2, 2]), {}),
    (A.avg_pool2d.default, (x4, [3, 3], [2, 2], [1, 1], False, False, 5), {}),
    (A.avg_pool1d.default, (x3, [2]), {}),
    (A.adaptive_avg_pool2d.default, (x4, [3, 2]), {}),
    (A._adaptive_avg_pool2d.default, (x4, [1, 1]), {}),
    (A.adaptive_max_pool2d.default, (x4, [2, 2]), {}),
    (
        A.batch_norm.default,
        (x4, rand(4), rand(4), rand(4), rand(4).abs(), False, 0.1, 1e-5, True),
        {},
    ),
    (
        A._native_batch_norm_legit_no_training.default,
        (x4, rand(4), rand(4), rand(4), rand(4).abs(), 0.1, 1e-5),
        {},
    ),
    (A.native_layer_norm.default, (x3, [7], rand(7), None, 1e-5), {}),
    (A.layer_norm.default, (x3, [5, 7]), {}),
    (A.native_group_norm.default, (x4, rand(4), rand(4), 2, 4, 81, 2, 1e-5), {}),
    (A.group_norm.default, (x4, 2), {}),
    (A.instance_norm.default, (x4, None, None, None, None, True, 0.1, 1e-5, False), {}),
    (A.topk.default, (x2, 3), {}),
    (A.topk.default, (x2, 2, 0, False), {"sorted": True}),
    (A.sort.default, (x2, 0, True), {}),
    (A.sort.stable, (x2,), {"stable": True, "dim": 1}),
    (A.argsort.default, (x2,), {}),
    (A.split.Tensor, (x2, 4, 1), {}),
    (A.split_with_sizes.default, (x2, [1, 2, 3]), {}),
    (A.chunk.default, (x2, 4, 1), {}),
    (A.unbind.int, (x3, 1), {}),
    (A.cumsum.default, (x2, 1), {}),
    (A.cumsum.default, (ints(4, 4), 0), {"dtype": torch.float32}),
    (A.cumprod.default, (x2, 0), {}),
    (A.index_put.default, (x2, [ints(3), None], rand(3, 8)), {"accumulate": False}),
    (A.index.Tensor, (x3, [None, ints(2, 3), ints(2, 3)]), {}),
    (A.index_select.default, (x2, 0, ints(4)), {}),
    (A.gather.default, (x2, 1, ints(6, 3)), {}),
    (A.scatter.src, (x2, 0, ints(2, 8), rand(2, 8)), {}),
    (A.scatter.value, (x2, 0, ints(2, 8), 3.5), {}),
    (A.scatter_add.default, (x2, 1, ints(6, 8), rand(6, 8)), {}),
    (A.index_add.default, (x2, 0, ints(3), rand(3, 8)), {"alpha": 2}),
    (A.grid_sampler_2d.default, (x4, rand(2, 5, 5, 2).clamp(-1, 1), 0, 0, False), {}),
    (A.grid_sampler.default, (x4, rand(2, 3, 3, 2), 1, 1, True), {}),
    (
        A.scaled_dot_product_attention.default,
        (rand(1, 2, 5, 8), rand(1, 2, 5, 8), rand(1, 2, 5, 8)),
        {"is_causal": True},
    ),
    (
        A.scaled_dot_product_attention.default,
        (rand(1, 2, 5, 8), rand(1, 2, 6, 8), rand(1, 2, 6, 8), rand(1, 1, 5, 6)),
        {"scale": 0.25},
    ),
    (A.upsample_nearest2d.vec, (x4, None, [2.0, 2.0]), {}),
    (A.upsample_bilinear2d.vec, (x4, [12, 13], False, None), {}),
    (A.upsample_bicubic2d.default, (x4, [5, 5], True), {}),
    (A._softmax.default, (x2, -1, False), {}),
    (A.softmax.int, (x2, 0, torch.float64), {}),
    (A._log_softmax.default, (x2, 1, False), {}),
    (A.gelu.default, (x2,), {"approximate": "tanh"}),
    (A.elu.default, (x2, 0.7), {}),
    (A.leaky_relu.default, (x2, 0.2), {}),
    (A.hardtanh.default, (x2, -0.5, 0.5), {}),
    (A.softplus.default, (x2, 2, 20.0), {}),
    (A.clamp.default, (x2, -0.5), {}),
    (A.clamp.default, (x2, None, 0.25), {}),
    (A.add.Tensor, (x2, 2.5), {}),
    (A.add.Tensor, (ints(3, 3), rand(3, 3)), {"alpha": 2}),
    (A.sub.Tensor, (x2, x2.flip(0)), {"alpha": 0.5}),
    (A.pow.Tensor_Scalar, (x2, 3), {}),
    (A.pow.Scalar, (2, x2), {}),
    (A.div.Tensor_mode, (x2, x2.flip(1)), {"rounding_mode": "floor"}),
    (A.where.self, (mask, x2, x2.flip(0)), {}),
    (A.masked_fill.Scalar, (x2, mask, -INF), {}),
    (A.full.default, ([2, 3], INF), {"dtype": torch.float64}),
    (A.full_like.default, (x2, float("nan")), {"memory_format": torch.preserve_format}),
    (A.arange.start_step, (0, 10, 2), {"dtype": torch.int64, "device": torch.device("cpu")}),
    (A.zeros.default, ([2, 0, 3],), {"layout": torch.strided}),
    (A.triu_indices.default, (3, 4), {}),
    (A.constant_pad_nd.default, (x2, [1, 2], 7), {}),
    (A.reflection_pad2d.default, (x4, [1, 2, 1, 2]), {}),
    (A.pad.default, (x4, [1, 1, 2, 0], "circular"), {}),
    (A.mm.default, (x2, x2.t()), {}),
    (A.addmm.default, (rand(6), x2, x2.t()), {"beta": 0.5, "alpha": 2}),
    (A.bmm.default, (x3, x3.transpose(1, 2)), {}),
    (A.linear.default, (x3, rand(4, 7), rand(4)), {}),
    (A.einsum.default, ("ij,kj->ik", [x2, x2]), {}),
    (A.cat.default, ([x2, x2, rand(1, 8)],), {}),
    (A.stack.default, ([x2, x2], 1), {}),
    (A.mean.dim, (x3, [0, 2], True), {}),
    (A.sum.dim_IntList, (ints(3, 4), [1]), {}),
    (A.sum.dim_IntList, (x2, None), {"dtype": torch.float64}),
    (A.var.correction, (x2, [1]), {"correction": 0}),
    (A.amax.default, (x3, [1]), {}),
    (A.max.dim, (x2, 1), {}),
    (A.argmax.default, (x2,), {}),
    (A.any.dim, (mask, 0), {}),
    (A.linalg_vector_norm.default, (x2, 2, [1], True), {}),
    (A.view.default, (x2, [8, 6]), {}),
    (A.permute.default, (x3, [2, 0, 1]), {}),
    (A.expand.default, (rand(1, 8), [3, 8]), {}),
    (A.slice.Tensor, (x2, 1, 1, 7, 2), {}),
    (A.roll.default, (x2, [1, 2], [0, 1]), {}),
    (A.flip.default, (x3, [0, 2]), {}),
    (A.repeat.default, (x2, [2, 1, 3]), {}),
    (A.tril.default, (x2, -1), {}),
    (A.embedding.default, (rand(10, 4), ints(2, 3)), {}),
    (A.one_hot.default, (ints(4), 6), {}),
    (A.bitwise_and.Tensor, (mask, ~mask), {}),
    (A.eq.Scalar, (ints(3, 3), 2), {}),
    (A._to_copy.default, (x2,), {"dtype": torch.bfloat16}),
    (A.contiguous.default, (x2.t(),), {}),
    (A.clone.default, (x4,), {"memory_format": torch.channels_last}),
    (A.pixel_shuffle.default, (x4, 2), {}),
    (
        A.lstm.input,
        (
            rand(5, 2, 3),
            [rand(1, 2, 4), rand(1, 2, 4)],
            [rand(16, 3), rand(16, 4), rand(16), rand(16)],
            True,
            1,
            0.0,
            False,
            False,
            False,
        ),
        {},
    ),
    (A.cdist.default, (x3, x3), {}),
    (A.histc.default, (x2, 4, -1, 1), {}),
    (A.nan_to_num.default, (torch.tensor([INF, -INF, float("nan")]), 0.5), {}),
    (A.view_as_complex.default, (rand(3, 2),), {}),
    (A.mul.Tensor, (torch.tensor(2.0), torch.tensor([3, 4])), {}),
]


def case_id(case: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> str:
    return str(case[0]).removeprefix("aten.")


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_operator_gives_eagers_bits(bridge: Bridge, case: Any) -> None:
    op, args, kwargs = case
    with torch.no_grad():
        expected = flatten(op(*args, **kwargs))
    for result, want in zip(bridge.call(op, *args, **kwargs), expected, strict=True):
        torch.testing.assert_close(result, want, rtol=0, atol=0, equal_nan=True)


def test_cases_cover_many_overloads() -> None:
    assert len({str(op) for op, _, _ in CASES}) >= 60


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_description_decodes_to_the_same_call(case: Any) -> None:
    op, args, kwargs = case
    tensors, attrs = encode_call(op, args, kwargs)
    values, _ = decode_call(attrs["schema_args"], attrs.get("sym_args", []), tensors)
    split = sum(not a.kwarg_only for a in op._schema.arguments)
    names = [a.name for a in op._schema.arguments][split:]
    with torch.no_grad():
        again = flatten(op(*values[:split], **dict(zip(names, values[split:], strict=True))))
        expected = flatten(op(*args, **kwargs))
    for result, want in zip(again, expected, strict=True):
        torch.testing.assert_close(result, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_cross(bridge: Bridge, dtype: torch.dtype) -> None:
    x = rand(4, 6, dtype=dtype)
    (result,) = bridge.call(A.silu.default, x)
    assert torch.equal(result, A.silu.default(x))


@pytest.mark.parametrize(
    "view",
    [
        lambda: rand(8, 6).t(),
        lambda: rand(6, 16)[:, ::2],
        lambda: rand(1, 8).expand(6, 8),
        lambda: rand(20, 8)[7:13],
        lambda: torch.tensor(3.0).expand(6, 8),
    ],
)
def test_strided_views_are_read_as_they_lie(bridge: Bridge, view: Any) -> None:
    x = view()
    (result,) = bridge.call(A.gelu.default, x)
    assert torch.equal(result, A.gelu.default(x))


def test_results_are_written_with_the_outputs_own_strides(bridge: Bridge) -> None:
    memory = torch.full((8, 6), -1.0)
    (result,) = bridge.call(A.exp.default, x2, like=lambda t: memory.t())
    assert result.data_ptr() == memory.data_ptr()
    assert torch.equal(memory.t(), x2.exp())


def test_a_result_nobody_wants_is_dropped(bridge: Bridge) -> None:
    values = torch.empty(6, 3)
    kernel, inputs, _ = bridge.prepare(A.topk.default, (x2, 3), {}, [values, None])
    kernel.launch([i.data for i in inputs], [values.data_ptr(), None])
    kernel.close()
    assert torch.equal(values, x2.topk(3).values)


def test_symbolic_integers_take_their_value_from_sym_args(bridge: Bridge) -> None:
    tensors, attrs = encode_call(A.view.default, (x2, [8, 6]))
    attrs = {"schema_args": attrs["schema_args"].replace("[8,6]", '[{"s":1},{"s":0}]')}
    attrs["sym_args"] = [4, 12]
    out = torch.empty(12, 4)
    from bridge_runner import operand

    ins, outs = [operand(t) for t in tensors], [operand(out)]
    problem = host.make_problem("aten.view.default", ins, outs, attrs)
    kernel = host.PreparedKernel(bridge.plugin, bridge.row, problem, bridge.info)
    kernel.launch([ins[0].data], [outs[0].data])
    kernel.close()
    assert torch.equal(out, x2.view(12, 4))


def test_symbolic_integers_of_an_exported_graph_become_sym_args() -> None:
    class Flatten(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cumsum(x.reshape(x.shape[0] * x.shape[1], -1), 1)

    dims = {0: torch.export.Dim("b", min=2, max=64), 1: torch.export.Dim("s", min=2, max=64)}
    program = torch.export.export(Flatten(), (rand(3, 4, 5),), dynamic_shapes=(dims,))
    described = [
        encode_call(node.target, node.args, node.kwargs)
        for node in program.graph.nodes
        if node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "aten"
        and "sym_size" not in str(node.target)
    ]
    assert any(attrs.get("sym_args") for _, attrs in described)
    for operands, _ in described:
        assert all(isinstance(n, torch.fx.Node) for n in operands)


def test_gradients_are_off_inside_and_restored_outside(bridge: Bridge) -> None:
    x = rand(3, 3).requires_grad_()
    assert torch.is_grad_enabled()
    (result,) = bridge.call(A.sigmoid.default, x)
    assert torch.is_grad_enabled()
    assert not result.requires_grad


@pytest.mark.parametrize("op,args", [(A.silu.default, (x2,)), (A.add.Tensor, (x2, 2.0))])
def test_launches_run_from_many_threads(bridge: Bridge, op: Any, args: Any) -> None:
    outs = [torch.empty(6, 8) for _ in range(8)]
    kernel, inputs, _ = bridge.prepare(op, args, {}, [outs[0]])
    errors: list[BaseException] = []

    def work(out: torch.Tensor) -> None:
        try:
            for _ in range(50):
                kernel.launch([i.data for i in inputs], [out.data_ptr()])
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kernel.close()
    assert not errors
    for out in outs:
        assert torch.equal(out, op(*args))


def test_torchs_own_error_message_comes_back(bridge: Bridge) -> None:
    ok = encode_call(A.cat.default, ([x2, x2],))
    out = torch.empty(12, 8)
    from bridge_runner import operand

    ins = [operand(x2), operand(rand(6, 7))]
    attrs = {"schema_args": ok[1]["schema_args"].replace('{"t":0}]', '{"t":1}]')}
    assert '{"t":1}' in attrs["schema_args"]
    problem = host.make_problem("aten.cat.default", ins, [operand(out)], attrs)
    kernel = host.PreparedKernel(bridge.plugin, bridge.row, problem, bridge.info)
    with pytest.raises(host.PluginFailure, match=r"Sizes of tensors must match|stderr"):
        kernel.launch([i.data for i in ins], [out.data_ptr()])
    kernel.close()


@pytest.mark.parametrize("wrong", [torch.empty(6, 9), torch.empty(6, 8, dtype=torch.float64)])
def test_an_output_that_was_planned_wrongly_is_an_error(
    bridge: Bridge, wrong: torch.Tensor
) -> None:
    kernel, inputs, _ = bridge.prepare(A.silu.default, (x2,), {}, [wrong])
    with pytest.raises(host.PluginFailure, match="expected shape"):
        kernel.launch([i.data for i in inputs], [wrong.data_ptr()])
    kernel.close()


def test_an_unknown_operator_and_malformed_descriptions_are_refused(bridge: Bridge) -> None:
    good = encode_call(A.silu.default, (x2,))[1]["schema_args"]
    for op, text in [
        ("prims.add.default", good),
        ("aten.silu", good),
        ("aten.silu.default", "{"),
        ("aten.silu.default", '{"v":2,"args":[],"returns":[]}'),
        ("aten.silu.default", good.replace('"Tensor"', '"Tensr"')),
        ("aten.silu.default", good.replace('"t"', '"u"')),
    ]:
        problem = host.make_problem(op, [], [], {"schema_args": text})
        with pytest.raises(host.PluginFailure):
            host.PreparedKernel(bridge.plugin, bridge.row, problem, bridge.info)
    problem = host.make_problem("aten.silu.default", [], [], {"schema_args": good})
    with pytest.raises(host.PluginFailure, match="operand below 0"):
        host.PreparedKernel(bridge.plugin, bridge.row, problem, bridge.info)


def test_calls_that_are_no_data_are_refused_by_the_encoder() -> None:
    with pytest.raises(UnsupportedCall, match="functional"):
        encode_call(A.add_.Tensor, (x2, x2))
    with pytest.raises(UnsupportedCall, match="tensors as results"):
        encode_call(A.item.default, (torch.tensor(1),))
    with pytest.raises(UnsupportedCall, match="'dim'"):
        encode_call(A.cumsum.default, (x2,))
    with pytest.raises(UnsupportedCall, match="colour"):
        encode_call(A.silu.default, (x2,), {"colour": 1})


def test_without_torch_the_bridge_says_so() -> None:
    code = (
        "from rm_abstract.testing import abi, host, plugins\n"
        "p = host.Plugin(plugins.built_plugin('torch'))\n"
        "assert p.api.probe_score() == 0\n"
        "try:\n    p.initialize()\n"
        "except host.PluginFailure as e:\n    assert 'import torch' in str(e), e\n"
        "else:\n    raise SystemExit('initialized without torch')\n"
        "import torch\nassert p.api.probe_score() == 1\np.initialize()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # the same package as this process
