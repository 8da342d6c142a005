"""Kernel rows of the GPU check themselves before they serve, and what they found is remembered."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
rm = pytest.importorskip("rm_abstract")

pytestmark = pytest.mark.cuda

TEXT = """rmir 1
sym s0 [1,64]
input %0 "x" : bf16[s0,256]
weight %1 "n" : bf16[256]
weight %2 "w" : bf16[300,256]
%3 = rms_norm(%0, %1) {eps=0x1p-10} : bf16[s0,256]
%4 = gemm(%3, %2, _, _) {activation="silu", trans_b=1} : bf16[s0,300]
%5 = softmax(%4) {axis=1} : bf16[s0,300]
return %5
"""


def run_with(checks: Any) -> None:
    from rm_abstract import _core, device

    device.load_plugins(gpu=True)
    weights = {"n": torch.ones(256), "w": torch.randn(300, 256)}
    there = {name: w.bfloat16().cuda() for name, w in weights.items()}
    program = _core.Program(TEXT, there, ["cuda"], checks=checks)
    for rows in (1, 40):
        program.run([torch.randn(rows, 256, device="cuda").bfloat16()])
    torch.cuda.synchronize()


def test_rows_of_the_gpu_are_checked_once_a_machine(tmp_path: Path) -> None:
    from rm_abstract import _core

    cache = _core.cache.CompileCache({"cache_dir": str(tmp_path)})
    first = _core.SelfCheck("auto", cache)
    run_with(first)
    report = first.report()
    assert report["refused"] == []
    assert report["checked"] >= 4  # norms, products, softmax, of one row and of many
    assert report["milliseconds"] < 100 * report["checked"]
    second = _core.SelfCheck("auto", cache)
    run_with(second)
    assert second.report()["checked"] == 0
    assert second.report()["remembered"] >= report["checked"]


def test_explain_says_what_the_checks_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_CACHE_DIR", str(tmp_path / "cache"))
    rm.init("gpu:0", fallback="error")
    try:
        config = transformers.BertConfig(
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=128,
            vocab_size=100,
        )
        transformers.BertModel(config).save_pretrained(tmp_path / "bert")
        model = transformers.BertModel.from_pretrained(tmp_path / "bert").eval().cuda()
        with torch.no_grad():
            for _ in range(2):
                model(torch.arange(12, device="cuda")[None])
        checks = rm.explain().to_dict()["kernel_checks"]
        assert checks["checked"] >= 1
        assert checks["refused"] == []
        assert " checked in " in str(rm.explain())
    finally:
        rm.shutdown()


@pytest.mark.skipif("RM_SELFCHECK_TEST" not in os.environ, reason="names the built selfcheck_test")
@pytest.mark.parametrize(
    "case", ["every row passes its self-check", "a row that is wrong in a column*"]
)
def test_the_rows_of_the_plugin_pass_and_wrong_ones_are_refused(case: str) -> None:
    """The C++ tests of the self-check, on this plugin's rows in place of the CPU's."""
    plugin = Path(rm.__file__).parent / "backends" / "rm_backend_cuda.so"
    done = subprocess.run(
        [os.environ["RM_SELFCHECK_TEST"], f"-tc={case}"],
        env={**os.environ, "RM_TEST_KERNELS": str(plugin), "RM_TEST_TIMES": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(done.stdout[-20000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
