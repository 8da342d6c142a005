"""`generate` on FuriosaAI's cards by furiosa-llm: unmodified calls, a stand-in of the package and
of its builder `fxb` (tests/vendor/furiosa). The real builder's dry run, where
RM_TEST_FURIOSA_PYTHON names an environment that has it."""

from __future__ import annotations

import os
import sys
import sysconfig
import time
import venv
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rm_abstract as rm
from rm_abstract.vendors.furiosa import llm

STANDIN = Path(__file__).resolve().parents[1] / "vendor" / "furiosa"
SDK = os.environ.get("RM_TEST_FURIOSA_PYTHON", "")
HEAVY = os.environ.get("RM_HEAVY") == "1"
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip
GREEDY = {"max_new_tokens": 20, "do_sample": False}  # more than SamplingParams' own 16


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with one card, and an environment with the stand-ins; its builds are counted."""
    folder = tmp_path / "env"
    venv.EnvBuilder(symlinks=True).create(folder)
    (site,) = (folder / "lib").glob("python*/site-packages")
    own = sysconfig.get_path("purelib")  # with its .pth files: this package may be an editable one
    (site / "standin.pth").write_text(f"{STANDIN}\nimport site; site.addsitedir({own!r})\n")
    python = folder / "bin" / "python"
    for name, source in (("fxb", (STANDIN / "fxb.py").read_text()), ("furiosa-tcc", "")):
        (folder / "bin" / name).write_text(f"#!{python}\n{source}")
        (folder / "bin" / name).chmod(0o700)
    node = tmp_path / "root" / "dev" / "rngd" / "npu0mgmt"
    node.parent.mkdir(parents=True)
    node.touch()
    monkeypatch.setenv("RM_HARDWARE_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("RM_FURIOSA_PYTHON", str(python))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("FXB_COUNT", str(tmp_path / "builds"))
    yield tmp_path
    rm.shutdown()


def builds(folder: Path) -> list[str]:
    counted = folder / "builds"
    return counted.read_text().split() if counted.exists() else []


def llama(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = [7, 41]
    return rm.accelerate(model) if rm.is_initialized() else model


def call(rows: int) -> dict[str, Any]:
    ids = torch.arange(rows * 9).reshape(rows, 9) * 7 % 90 + 5
    mask = torch.ones_like(ids)
    if rows > 1:
        ids[0, :3] = mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, **GREEDY}


def expected(model: Any, **given: Any) -> torch.Tensor:
    with rm.disabled():
        return torch.as_tensor(model.generate(**given))


def engine_of(model: Any) -> dict[str, Any]:
    (seen,) = rm.explain(model).to_dict()["models"]
    return dict(seen["generation_engine"])


def test_generate_gives_transformers_tokens_and_a_bundle_serves_other_weights(
    environment: Path,
) -> None:
    options = {"furiosa": {"fxb_level": "O0"}}
    with rm.init("npu:0", fallback="error", compile_options=options):
        for seed, batches in ((0, (2, 1)), (1, (1,))):
            model = llama(seed)
            for rows in batches:
                assert torch.equal(model.generate(**call(rows)), expected(model, **call(rows)))
            found = engine_of(model)
            assert found["engine"] == "furiosa" and found["requests"] == len(batches), found
            assert "within" in found["checked"] and found["starts"] == 1
    assert builds(environment) == ["O0"]


FAULTS = {
    "build_error": "internal error",
    "build_nothing": "there is none",
    "no_device": "No such device",
    "short": "no stop token",
}


@pytest.mark.skipif(not HEAVY, reason="RM_HEAVY=1 runs it")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_the_tokens_are_transformers(
    fault: str, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FURIOSA_FAULT", fault)
    with rm.init("npu:0"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = llama()
        assert torch.equal(model.generate(**call(2)), expected(model, **call(2)))
        assert engine_of(model)["requests"] == 0
    assert any("RM331" in str(w.message) and FAULTS[fault] in str(w.message) for w in caught)


def test_an_architecture_it_does_not_build_is_named(environment: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    with rm.init("npu:0"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = rm.accelerate(MistralForCausalLM(MistralConfig(**SMALL)).eval())
        given = {**call(1), "pad_token_id": 0}
        assert torch.equal(model.generate(**given), expected(model, **given))
    assert any("unsupported model_type: mistral" in str(w.message) for w in caught)
    assert builds(environment) == []


def test_without_the_package_the_cores_programs_generate(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rm_abstract.generation import registry

    monkeypatch.setenv("RM_FURIOSA_PYTHON", sys.executable)
    with rm.init("npu:0"):
        assert registry._own_generation("furiosa:0") == {}


# ---- the builder ---------------------------------------------------------------------------------


def test_configurations_are_told_as_transformers_4_wrote_them() -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}
    told = llm.old_style({"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32,
                          "rope_parameters": rope, "dtype": "bfloat16"})  # fmt: skip
    assert told == {
        "hidden_size": 64, "num_attention_heads": 2, "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "torch_dtype": "bfloat16",
    }  # fmt: skip
    calls = {"output_hidden_states": False, "return_dict": True, "id2label": {0: "LABEL_0"}}
    assert llm.old_style({**calls, "hidden_size": 64}) == {"hidden_size": 64}
    assert llm.old_style({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}) == {
        "rope_theta": 1e4
    }
    with pytest.raises(ValueError, match="heads of 64"):
        llm.old_style({"hidden_size": 64, "num_attention_heads": 2, "head_dim": 64})


def test_check_asks_the_builder(environment: Path) -> None:
    from rm_abstract.cli.check import _text, examine

    report = examine(llama(), "furiosa", {"input_ids": call(1)["input_ids"]})
    assert report["generation"] == {"engine": "furiosa-llm", "why_not": ""}
    assert "furiosa-llm: it builds this model" in _text(report)
    memory = report["memory"]
    assert memory["device"] == 48 << 30 and memory["weights"] > 4 * 100 * 32
    assert "MiB of weights" in _text(report) and "does not fit" not in _text(report)
    (environment / "env" / "bin" / "fxb").unlink()
    report = examine(llama(), "furiosa", {"input_ids": call(1)["input_ids"]})
    assert "no fxb" in report["generation"]["why_not"]


@pytest.mark.skipif(
    not SDK or not llm.program(SDK), reason="no RM_TEST_FURIOSA_PYTHON with furiosa-llm"
)
def test_the_real_builder_says_what_it_builds() -> None:
    from transformers import BertConfig, LlamaConfig

    big = LlamaConfig(
        hidden_size=4096, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    small = LlamaConfig(
        hidden_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=1024, vocab_size=1024, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    for config in (big, small):
        begun = time.monotonic()
        answer = llm.dry_run(SDK, config.to_dict(), 1024)
        assert not answer.why, answer
        print(f"{time.monotonic() - begun:.1f} s: {answer.said[-300:]}")
    other = BertConfig(architectures=["BertModel"]).to_dict()
    assert llm.dry_run(SDK, other, 512).why
