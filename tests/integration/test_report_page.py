"""The page of `compile --report`: what it draws is what was captured and what ran."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import rm_abstract as rm
from rm_abstract.cli.main import cli
from rm_abstract.report_page import Drawn, Rates, captured, edges, executed, flops, page

RATES = Rates(1e9, {"f32": 2e9})
STEPS = [
    ("gemm ( f32[4,8]@0 f32[16,8]@-1 _ _ ) -> f32[4,16]@3  gemm_packed_avx512", 2000.0),
    ("softmax ( f32[4,16]@3 ) -> f32[4,16]@4  softmax_rows_avx512", 500.0),
    ("ewise ( f32[4,16]@3 f32[4,16]@4 ) -> f32[4,16]@3  ewise_blocks_avx512", 0.0),
    ("copy ( f32[4,16]@3 ) -> f32[4,16]@5  copy_strided", 100.0),
]


class Rows(HTMLParser):
    """Text of the cells by row, and that every element which is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "path", "th"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open:
            self.rows[-1][-1] += data


def test_a_step_has_its_bytes_and_its_share_of_the_bound() -> None:
    product, softmax, inplace, _ = executed(STEPS, RATES)
    assert product.op == "gemm" and product.detail == "gemm_packed_avx512"
    assert product.bytes == 4 * (4 * 8 + 16 * 8 + 4 * 16)
    # 1024 operations take 512 ns, 896 bytes 896 ns.
    assert product.bound_ns == pytest.approx(896) and product.share == pytest.approx(0.448)
    assert softmax.reads == ("3",) and softmax.types == "f32[4, 16] → f32[4, 16]"
    assert inplace.share is None


def test_arcs_lead_from_the_last_writer_of_a_value_to_its_readers() -> None:
    assert edges(executed(STEPS, RATES)) == [(0, 1), (0, 2), (1, 2), (2, 3)]


def test_operations_of_products() -> None:
    assert flops("conv", [(2, 4, 9, 9), (8, 2, 3, 3)], [(2, 8, 7, 7)]) == 2 * 2 * 8 * 49 * 2 * 9
    turned = flops("conv", [(1, 4, 5, 5), (4, 6, 3, 3)], [(1, 6, 11, 11)])
    assert turned == 2 * 25 * 4 * 6 * 9
    assert (
        flops("sdpa", [(1, 2, 3, 8), (1, 2, 5, 8), (1, 2, 5, 8)], [(1, 2, 3, 8)]) == 2 * 6 * 5 * 16
    )
    quantised = [(1, 256), (256,), (64, 128), (2, 64), (64,), (32, 128), (2, 32)]
    assert flops("quant_linears", quantised, [(1, 64), (1, 32)]) == 2 * 256 * (64 + 32)
    assert flops("recurrent", [(7, 2, 12), (12, 3), (2, 3)], [(7, 2, 3)]) == 2 * 7 * 2 * 3 * 12


def test_names_that_look_like_markup_are_text() -> None:
    text = page("<b>&", [Drawn("<script>", "%1 = add(%0, %0) : f32[2]\n", STEPS)], RATES)
    assert "<b>" not in text and "&lt;script&gt;" in text and text.count("<script>") == 1


def test_two_thousand_nodes_are_one_readable_file() -> None:
    lines = [f"ewise ( f32[8]@{i} ) -> f32[8]@{i + 1}  e" for i in range(2000)]
    text = page("many", [Drawn("many", "", [(line, 1000.0) for line in lines])], RATES)
    rows = Rows(text).rows
    assert len(rows) == 1 + 12 + 2000 and text.count("<path ") == 1999
    assert len(text) < 2_000_000 and "http" not in text


def test_the_page_of_a_model_has_its_operators_and_its_steps() -> None:
    rm.init("cpu")
    try:
        model = rm.accelerate(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Softmax(-1)).eval())
        x = torch.randn(5, 3, 8)
        with torch.no_grad():
            for _ in range(2):
                model(x)
            with rm.profile() as profile:
                for _ in range(3):
                    model(x)
        (drawn,) = profile.drawn()
    finally:
        rm.shutdown()
    before = [node.op for node in captured(drawn.captured)]
    assert before == ["linear", "gelu", "softmax"]
    assert drawn.name.endswith("3 runs") and all(ns > 0 for _, ns in drawn.steps)
    rows = Rows(page("a model", [drawn], RATES)).rows
    assert len(rows) == 1 + min(len(drawn.steps), 12) + len(drawn.steps) + len(before)
    kernels = {row[6] for row in rows if len(row) == 8}
    assert any(kernel.startswith("softmax_") for kernel in kernels)


def test_the_command_draws_an_onnx_file_and_a_folder(tmp_path: Path, tiny_llama: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 4]),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 4]),
        ],
        [helper.make_empty_tensor_value_info("y")],
    )
    file, out = tmp_path / "model.onnx", tmp_path / "out.html"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), file)
    command = ["compile", str(file), "--batch-size", "6", "--report", str(out)]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    text = out.read_text()
    assert "x [6, 4], w [4, 4]" in text and "f32[6, 4]" in text and ">relu<" in text
    rm.shutdown()
    done = CliRunner().invoke(cli, ["compile", str(tiny_llama), "--report", str(out)])
    assert done.exit_code == 0, done.output
    text = out.read_text()
    assert len(re.findall("<h2>", text)) >= 2  # a prompt and a step of the generation
    assert ">sdpa<" in text and "% of the bound" in text
    Rows(text)
