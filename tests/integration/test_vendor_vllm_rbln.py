"""vLLM on Rebellions' NPUs: the real vllm-rbln with the real vLLM and optimum-rbln, on the stand-in
of `rebel`.

RM_TEST_VLLM_RBLN_PYTHON names the Python of `rm-abstract env create vllm-rbln FOLDER`. It needs
neither torch-rbln nor rm_abstract, and its torchvision may be the build for another torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rm_abstract as rm

VENDOR = Path(__file__).resolve().parents[1] / "vendor"
PYTHON = os.environ.get("RM_TEST_VLLM_RBLN_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="no RM_TEST_VLLM_RBLN_PYTHON (with vllm-rbln)"),
    pytest.mark.timeout(1200),
]
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "root" / "dev").mkdir(parents=True)
    for name in ("rbln0", "rbln1"):
        (tmp_path / "root" / "dev" / name).touch()
    monkeypatch.setenv("RM_HARDWARE_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("RM_RBLN_PYTHON", PYTHON)
    path = [str(VENDOR), str(VENDOR / "torchvision_without_operators")]
    monkeypatch.setenv("RM_RBLN_PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("REBEL_NPUS", "RBLN-CA22,RBLN-CA25")
    monkeypatch.setenv("RBLN_TARGET_SOC", "RBLN-CA22")
    yield
    rm.shutdown()


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, vocab_size=128, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = [7, 41]
    return rm.accelerate(model)


def call(rows: int) -> dict[str, Any]:
    """Prompts of which the first is padded on the left."""
    ids = torch.arange(rows * 9).reshape(rows, 9) * 7 % 90 + 8
    mask = torch.ones_like(ids)
    if rows > 1:
        ids[0, :3] = mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, **GREEDY}


def engine_of(model: Any) -> dict[str, Any]:
    (seen,) = rm.explain(model).to_dict()["models"]
    return dict(seen["generation_engine"])


def expected(model: Any, given: dict[str, Any]) -> torch.Tensor:
    with rm.disabled():
        return model.generate(**given)


def test_vllm_generates_what_transformers_does_and_takes_weights_that_changed() -> None:
    options = {"max_model_len": 128, "max_num_seqs": 4, "start_timeout_s": 1000}
    with rm.init("rbln:0", inference_engine="vllm", engine_options=options, fallback="error"):
        model = llama()
        for rows in (1, 2, 4):
            given = call(rows)
            assert torch.equal(model.generate(**given), expected(model, given))
        found = engine_of(model)
        assert found["engine"] == "vllm" and found["facts"]["platform"] == "rbln"
        assert found["starts"] == 1 and found["requests"] == 3 and "within" in found["checked"]
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(-1)
        given = call(2)
        assert torch.equal(model.generate(**given), expected(model, given))
        assert engine_of(model)["starts"] == 2  # its compiled programs have the weights


@pytest.mark.parametrize(
    ("fault", "npus", "said"),
    [("compile_error", "RBLN-CA22", "Graph Generation"), ("", "", "NPU")],
)
def test_what_does_not_start_is_said_and_the_core_generates(
    fault: str, npus: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REBEL_FAULT", fault)
    monkeypatch.setenv("REBEL_NPUS", npus)
    options = {"max_model_len": 128, "start_timeout_s": 1000}
    with rm.init("rbln:0", inference_engine="vllm", engine_options=options):
        model = llama()
        given = call(1)
        with pytest.warns(rm.RoutingWarning, match="RM331") as caught:
            assert torch.equal(model.generate(**given), expected(model, given))
        assert any(said in str(one.message) for one in caught), [str(w.message) for w in caught]
