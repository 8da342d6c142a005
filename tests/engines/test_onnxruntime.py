"""inference_engine="onnxruntime": results as close as the gate asks, weights of now, the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import rm_abstract as rm

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
SCRIPT = """
import json, sys, torch, transformers as hf
import rm_abstract as rm
rm.init("cpu", inference_engine="onnxruntime", fallback="error")
torch.manual_seed(5)
config = hf.BertConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=4,
                       intermediate_size=96, vocab_size=100)
model = rm.accelerate(hf.BertModel(config).eval())
with torch.no_grad():
    outputs = [model(input_ids=torch.arange(8)[None] % 7)[0] for _ in range(2)]
entry = rm.explain(model).models[0]["entries"][0]
print(json.dumps([entry["cache"], entry["parity"], float(outputs[1].sum())]))
"""


@pytest.fixture
def session(tmp_path: Path) -> Any:
    with rm.init("cpu", inference_engine="onnxruntime", fallback="error") as session:
        yield session


def run(model: Any, **inputs: Any) -> tuple[Any, Any]:
    """(what PyTorch gives, what ONNX Runtime gives): the second call is served."""
    with torch.no_grad():
        with rm.disabled():
            want = model(**inputs)
        model(**inputs)
        routed = rm.explain(model).models[0]["routed"]
        got = model(**inputs)
    assert rm.explain(model).models[0]["routed"] == routed + 1
    return want, got


def bert() -> Any:
    from transformers import BertConfig, BertModel

    config = BertConfig(intermediate_size=96, vocab_size=100, **SMALL)
    return rm.accelerate(BertModel(config).eval())


def test_encoders_and_images_have_pytorchs_results(session: Any, minilm: Path) -> None:
    from transformers import AutoModel, ViTConfig, ViTModel

    ids = torch.randint(5, 90, (2, 7))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    vit = ViTModel(ViTConfig(intermediate_size=96, image_size=32, patch_size=8, **SMALL)).eval()
    for model, inputs in (
        (AutoModel.from_pretrained(minilm), {"input_ids": ids + 2000, "attention_mask": mask}),
        (rm.accelerate(vit), {"pixel_values": torch.randn(2, 3, 32, 32)}),
    ):
        want, got = run(model, **inputs)
        assert type(got) is type(want)
        assert torch.allclose(got[0], want[0], atol=2e-5)
        (entry,) = rm.explain(model).models[0]["entries"]
        assert entry["engine"] == "onnxruntime" and entry["parity"] == "passed"
        assert list(entry["kernels"]) == ["onnxruntime CPUExecutionProvider"]


def test_other_sizes_and_changed_weights_are_served(session: Any) -> None:
    model = bert()
    for width in (7, 3):
        want, got = run(model, input_ids=torch.randint(5, 90, (1, width)))
        assert torch.allclose(got[0], want[0], atol=2e-5)
    ids = torch.randint(5, 90, (1, 7))
    before, _ = run(model, input_ids=ids)
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight.mul_(-1.5)
    want, got = run(model, input_ids=ids)
    assert torch.allclose(got[0], want[0], atol=2e-5)
    assert not torch.allclose(got[0], before[0], atol=1e-2)


def test_gpt2_generates_with_its_past(session: Any, tmp_path: Path, seed: int) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models.saved("gpt2", tmp_path / "gpt2", 2))
    inputs = models.prompts(2, seed)
    with rm.disabled():
        want = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=10, do_sample=False), want)
    steps = max(entry["calls"] for entry in rm.explain(model).models[0]["entries"])
    assert steps >= 7


@pytest.mark.sampled(4, of="second process")
def test_a_second_process_starts_from_the_cache() -> None:
    """RM_CACHE_DIR is the test's own, and both processes inherit it."""
    found = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert [found[0][:2], found[1][:2]] == [["miss", "passed"], ["hit", "stored verdict"]]
    assert found[0][2] == found[1][2]


def test_types_it_has_no_words_for_stay_with_pytorch() -> None:
    with rm.init("cpu", inference_engine="onnxruntime", fallback="allow"):
        model = bert().to(torch.bfloat16)
        with torch.no_grad():
            for _ in range(2):
                model(input_ids=torch.randint(5, 90, (1, 7)))
        report = rm.explain(model)
    assert report.routed == 0 and "RM332" in str(report) and "bfloat16" in str(report)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"provider": []}, "try 'providers'"),
        ({"providers": ["CPUExecutionProvidr"]}, "try 'CPUExecutionProvider'"),
        ({"graph_optimization_level": "most"}, "all, extended"),
        ({"intra_op_num_threads": 0}, "intra_op_num_threads"),
    ],
)
def test_options_are_refused_with_the_nearest_name(options: Any, words: str) -> None:
    with pytest.raises(rm.ConfigError, match=words):
        rm.init("cpu", inference_engine="onnxruntime", engine_options=options)
    assert not rm.is_initialized()


def test_options_reach_the_session() -> None:
    options = {"intra_op_num_threads": 1, "graph_optimization_level": "basic"}
    with rm.init("cpu", inference_engine="onnxruntime", engine_options=options, fallback="error"):
        want, got = run(bert(), input_ids=torch.randint(5, 90, (1, 5)))
    assert torch.allclose(got[0], want[0], atol=2e-5)
    with pytest.raises(rm.ConfigError, match="precision"):
        rm.init("cpu", inference_engine="onnxruntime", compile_options={"precision": "int8"})
