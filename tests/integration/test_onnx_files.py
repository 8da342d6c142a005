"""ONNX files as compiled programs, against ONNX Runtime and PyTorch; damaged files are refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rm_abstract as rm

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402


def _agree(path: Path, inputs: dict[str, Any], tolerance: float = 2e-5) -> None:
    wanted = ort.InferenceSession(str(path)).run(None, inputs)
    got = rm.compile(str(path), device="cpu")(**inputs)
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def _graph(
    nodes: list[Any], inputs: dict[str, Any], outputs: list[str], weights: dict[str, Any]
) -> Any:
    """A model of float inputs; sizes may be names."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_empty_tensor_value_info(n) for n in outputs],
        [numpy_helper.from_array(w, n) for n, w in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _mlp() -> Any:
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((32, 16), np.float32),
        "b": rng.standard_normal(32, np.float32),
        "v": rng.standard_normal((32, 8), np.float32),
        "half": np.array(0.5, np.float32),
        "root": np.array(2**0.5, np.float32),
        "one": np.array(1, np.float32),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"], transB=1),
        helper.make_node("Div", ["h", "root"], ["h1"]),
        helper.make_node("Erf", ["h1"], ["h2"]),
        helper.make_node("Add", ["h2", "one"], ["h3"]),
        helper.make_node("Mul", ["h", "h3"], ["h4"]),
        helper.make_node("Mul", ["h4", "half"], ["h5"]),
        helper.make_node("MatMul", ["h5", "v"], ["o"], name="last"),
        helper.make_node("Softmax", ["o"], ["y"]),
    ]
    return _graph(nodes, {"x": ["n", 16]}, ["y"], weights)


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    path = tmp_path / "mlp.onnx"
    onnx.save(_mlp(), path)
    return path


def test_one_program_serves_every_size(mlp: Path) -> None:
    for rows in (1, 3, 8):
        _agree(mlp, {"x": np.random.default_rng(rows).standard_normal((rows, 16), np.float32)})


def test_tensors_go_in_and_out_as_tensors(mlp: Path) -> None:
    run = rm.compile(str(mlp), device="cpu")
    assert run.input_names == ["x"] and run.output_names == ["y"]
    (y,) = run(torch.ones(2, 16))
    assert isinstance(y, torch.Tensor)
    torch.testing.assert_close(y.sum(-1), torch.ones(2))
    with pytest.raises(rm.ConfigError, match="expected the inputs"):
        run(z=torch.ones(2, 16))


def test_external_data_is_read_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "mlp.onnx"
    onnx.save(_mlp(), path, save_as_external_data=True, location="w.bin", size_threshold=64)
    assert (tmp_path / "w.bin").is_file()
    _agree(path, {"x": np.ones((2, 16), np.float32)})


def test_the_command_line_runs_a_file(mlp: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from rm_abstract.cli.main import cli

    x = np.ones((2, 16), np.float32)
    np.save(tmp_path / "x.npy", x)
    command = ["run", str(mlp), "--input", f"x={tmp_path / 'x.npy'}"]
    done = CliRunner().invoke(cli, [*command, "--output-dir", str(tmp_path)])
    assert done.exit_code == 0 and done.output == "y: float32[2, 8]\n", done.output
    (wanted,) = ort.InferenceSession(str(mlp)).run(None, {"x": x})
    np.testing.assert_allclose(np.load(tmp_path / "0.npy"), wanted, rtol=2e-5, atol=2e-5)
    assert CliRunner().invoke(cli, ["run", str(mlp), "--input", "x=missing.npy"]).exit_code == 2
    assert "expected the inputs ['x']" in CliRunner().invoke(cli, ["run", str(mlp)]).output


def test_the_command_line_compiles_a_file_ahead(mlp: Path) -> None:
    from click.testing import CliRunner

    from rm_abstract.cli.main import cli

    done = CliRunner().invoke(cli, ["compile", str(mlp)])
    assert done.exit_code == 0 and done.output == "inputs: x; outputs: y\ncompiled\n", done.output
    mlp.write_bytes(mlp.read_bytes()[:100])
    done = CliRunner().invoke(cli, ["compile", str(mlp)])
    assert done.exit_code == 1 and "RM340" in done.output


def test_a_model_in_memory_has_no_external_data(mlp: Path, tmp_path: Path) -> None:
    (y,) = rm.compile(mlp.read_bytes(), device="cpu")(np.ones((2, 16), np.float32))
    assert y.shape == (2, 8)
    onnx.save(_mlp(), mlp, save_as_external_data=True, location="w.bin", size_threshold=64)
    with pytest.raises(rm.CompileError, match="model in memory"):
        rm.compile(mlp.read_bytes(), device="cpu")


@pytest.mark.parametrize("location", ["../w.bin", "/etc/hostname", "missing.bin"])
def test_external_data_outside_of_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "w.bin").write_bytes(b"\0" * 4096)
    (tmp_path / "model").mkdir()
    model = _mlp()
    for weight in model.graph.initializer:
        if weight.name == "w":
            onnx.external_data_helper.set_external_data(weight, location)
            weight.ClearField("raw_data")
    path = tmp_path / "model" / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(rm.CompileError):
        rm.compile(str(path), device="cpu")


class _Images(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.b = torch.nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.out = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.a(x)))
        x = torch.nn.functional.max_pool2d(x + self.b(x), 2)
        return self.out(x.mean((2, 3)))


class _Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 32)
        self.norm = torch.nn.LayerNorm(32)
        self.qkv = torch.nn.Linear(32, 96)
        self.out = torch.nn.Linear(32, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(ids))
        q, k, v = self.qkv(x).chunk(3, -1)
        heads = [t.view(t.shape[0], t.shape[1], 4, 8).transpose(1, 2) for t in (q, k, v)]
        y = torch.nn.functional.scaled_dot_product_attention(*heads)
        y = y.transpose(1, 2).reshape(x.shape)
        return x + torch.nn.functional.gelu(self.out(y))


@pytest.mark.parametrize("name", ["images", "attention"])
def test_exported_modules_agree(tmp_path: Path, name: str) -> None:
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    path = tmp_path / f"{name}.onnx"
    if name == "images":
        model, x = _Images().eval(), rng.standard_normal((2, 3, 16, 16), np.float32)
        dims: Any = {"x": {0: torch.export.Dim("n")}}
    else:
        model, x = _Attention().eval(), rng.integers(0, 50, (2, 6))
        dims = {"ids": {0: torch.export.Dim("n"), 1: torch.export.Dim("t")}}
    torch.onnx.export(model, (torch.from_numpy(x),), path, dynamic_shapes=dims, verbose=False)
    run = rm.compile(str(path), device="cpu")
    with torch.no_grad():
        wanted = model(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(run(x)[0], wanted, rtol=2e-5, atol=2e-5)
    _agree(path, {run.input_names[0]: x[:1]})


def test_an_operator_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    nodes = [helper.make_node("Fancy", ["x"], ["y"], name="here", domain="com.example")]
    path.write_bytes(_graph(nodes, {"x": [2]}, ["y"], {}).SerializeToString())
    with pytest.raises(rm.CompileError, match=r"com\.example\.Fancy 'here'") as caught:
        rm.compile(str(path), device="cpu")
    assert caught.value.code == "RM341"


@pytest.mark.parametrize("dims", [[2**62, 16], [-5], [2**31, 2**31]])
def test_shapes_that_no_memory_holds_are_refused(tmp_path: Path, dims: list[int]) -> None:
    model = _mlp()
    for weight in model.graph.initializer:
        if weight.name == "w":
            del weight.dims[:]
            weight.dims.extend(dims)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(rm.CompileError, match="'w'"):
        rm.compile(str(path), device="cpu")


def test_a_circle_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Neg", ["a"], ["b"])]
    path = tmp_path / "m.onnx"
    path.write_bytes(_graph(nodes, {"x": [2]}, ["b"], {}).SerializeToString())
    with pytest.raises(rm.CompileError, match="Add 'a'"):
        rm.compile(str(path), device="cpu")


@pytest.mark.parametrize("shape", [[], [3], [2, 3]])
def test_operators_given_too_few_axes_or_odd_attributes_are_refused(shape: list[int]) -> None:
    """Each of ONNX's operators, its lists of numbers of length one or five: a program or a code."""
    import onnx

    from rm_abstract import _core

    lists, number = onnx.AttributeProto.INTS, onnx.AttributeProto.INT
    refused = 0
    for schema in onnx.defs.get_all_schemas():
        if schema.domain != "":
            continue
        for length in (1, 5):
            names = [f"x{i}" for i in range(min(schema.max_input, 8) if length == 5 else 3)]
            names = names[: max(schema.min_input, 1 if length == 1 else len(names))]
            node = helper.make_node(schema.name, names, ["y"])
            for a in schema.attributes.values():
                if int(a.type) == lists:
                    made = helper.make_attribute(a.name, [1] * length, attr_type=lists)
                    node.attribute.append(made)
                elif a.required and int(a.type) == number:
                    node.attribute.append(helper.make_attribute(a.name, 1))
            given = [helper.make_tensor_value_info(x, onnx.TensorProto.FLOAT, shape) for x in names]
            result = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
            graph = helper.make_graph([node], "g", given, [result])
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)])
            try:
                _core.onnx.import_model(model.SerializeToString())
            except _core.CoreError as error:
                assert error.reason in ("RM340", "RM341", "RM342"), str(error)
                refused += 1
    assert refused > 100


@pytest.mark.parametrize("scalar", ["B", "initial_h", "sequence_lens"])
def test_a_recurrent_layer_given_a_scalar_is_refused(scalar: str) -> None:
    from rm_abstract import _core

    shapes: dict[str, list[int]] = {"X": [2, 3, 3], "W": [1, 15, 3], "R": [1, 15, 5]}
    shapes |= {"B": [1, 30], "sequence_lens": [3], "initial_h": [1, 3, 5]} | {scalar: []}
    node = helper.make_node("GRU", list(shapes), ["", "y"], hidden_size=5)
    model = _graph([node], shapes, ["y"], {})
    for port in model.graph.input:
        if port.name == "sequence_lens":
            port.type.tensor_type.elem_type = 6
    with pytest.raises(_core.CoreError, match="GRU") as caught:
        _core.onnx.import_model(model.SerializeToString())
    assert caught.value.reason == "RM341"


def _scan(opset: int, initial: list[int], results: int) -> bytes:
    """y[t] = s + x[t] over the rows of x; the node names `results` results, its body has two."""
    import onnx

    real = onnx.TensorProto.FLOAT
    add = helper.make_node("Add", ["s_in", "x_in"], ["s_out"])
    copy = helper.make_node("Identity", ["s_out"], ["y_out"])
    ports = [helper.make_tensor_value_info(n, real, None) for n in ("s_in", "x_in")]
    outs = [helper.make_tensor_value_info(n, real, None) for n in ("s_out", "y_out")]
    body = helper.make_graph([add, copy], "body", ports, outs)
    inputs = ["", "s", "x"] if opset < 9 else ["s", "x"]
    names = [f"y{k}" for k in range(results)]
    node = helper.make_node("Scan", inputs, names, body=body, num_scan_inputs=1)
    given = [
        helper.make_tensor_value_info("s", real, initial),
        helper.make_tensor_value_info("x", real, [1, 3, 2]),
    ]
    result = [helper.make_tensor_value_info(names[-1], real, None)]
    graph = helper.make_graph([node], "g", given, result)
    opsets = [helper.make_opsetid("", opset)]
    return bytes(helper.make_model(graph, opset_imports=opsets).SerializeToString())


@pytest.mark.parametrize("opset, initial, results", [(8, [], 2), (8, [1, 2], 3), (16, [3, 2], 4)])
def test_a_scan_of_a_scalar_or_with_more_results_than_its_body_is_refused(
    opset: int, initial: list[int], results: int
) -> None:
    from rm_abstract import _core

    _core.onnx.import_model(_scan(8, [1, 2], 2))
    _core.onnx.import_model(_scan(16, [3, 2], 2))
    with pytest.raises(_core.CoreError, match="Scan") as caught:
        _core.onnx.import_model(_scan(opset, initial, results))
    assert caught.value.reason == "RM341"


def test_damaged_files_end_in_errors() -> None:
    """Truncated at every length and changed at random: an error with a code, or a program."""
    from rm_abstract import _core

    whole = _mlp().SerializeToString()
    damaged = [whole[:n] for n in range(0, len(whole), 7)]
    for _ in range(3000):
        changed = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            # the structure lies at both ends, the weights between them
            near = random.choice([random.randrange(400), len(whole) - 1 - random.randrange(900)])
            changed[near] = random.randrange(256)
        damaged.append(bytes(changed))
    refused = 0
    for file in damaged:
        try:
            _core.onnx.import_model(file)
        except _core.CoreError as error:
            assert error.reason in ("RM340", "RM341", "RM342"), str(error)
            refused += 1
    assert refused > len(damaged) // 4
