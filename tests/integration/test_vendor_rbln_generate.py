"""`generate` on Rebellions' NPUs: unmodified calls, the real optimum-rbln, the stand-in of `rebel`.
Needs RM_TEST_RBLN_PYTHON, as test_vendor_rbln_optimum.py does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rm_abstract as rm

VENDOR = Path(__file__).resolve().parents[1] / "vendor"
PYTHON = os.environ.get("RM_TEST_RBLN_PYTHON", "")
HEAVY = os.environ.get("RM_HEAVY") == "1"
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="no RM_TEST_RBLN_PYTHON (rm-abstract env create rbln)"
)
STRICT = "error:capture,compile,device,correctness,cache"
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(autouse=True)
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "root" / "dev").mkdir(parents=True)
    (tmp_path / "root" / "dev" / "rbln0").touch()
    monkeypatch.setenv("RM_HARDWARE_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("RM_RBLN_PYTHON", PYTHON)
    monkeypatch.setenv("RM_RBLN_PYTHONPATH", str(VENDOR))
    monkeypatch.setenv("REBEL_NPUS", "RBLN-CA22")
    monkeypatch.setenv("RBLN_TARGET_SOC", "RBLN-CA22")
    yield
    rm.shutdown()


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL))


def qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SMALL))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=256, bos_token_id=1,
            eos_token_id=2,
        )
    )  # fmt: skip


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = [7, 41]
    return rm.accelerate(model)


def call(rows: int) -> dict[str, Any]:
    """Prompts of which the first is padded on the left."""
    ids = torch.arange(rows * 9).reshape(rows, 9) * 7 % 90 + 5
    mask = torch.ones_like(ids)
    if rows > 1:
        ids[0, :3] = mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False}


def engine_of(model: Any) -> dict[str, Any]:
    (seen,) = rm.explain(model).to_dict()["models"]
    return dict(seen["generation_engine"])


@pytest.mark.parametrize(
    "make", [llama, qwen2, gpt2] if HEAVY else [llama], ids=lambda make: make.__name__
)
def test_generate_gives_transformers_tokens(make: Callable[[], Any]) -> None:
    batches = [1, 2, 4, 3] if HEAVY else [2, 1]
    with rm.init("npu:0", fallback=STRICT, compile_options={"batch_size": [1, 2, 4]}):
        model = made(make)
        for rows in batches:
            with rm.disabled():
                expected = model.generate(**call(rows))
            for _ in range(2):
                assert torch.equal(model.generate(**call(rows)), expected)
        found = engine_of(model)
    assert found["engine"] == "optimum-rbln" and found["requests"] == 2 * len(batches)
    assert found["starts"] == 1 and "within" in found["checked"]


def test_a_second_session_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in ("", "compile_error"):
        monkeypatch.setenv("REBEL_FAULT", fault)
        with rm.init("npu:0", fallback=STRICT):
            model = made(gpt2)
            model.generate(**call(1))
            assert engine_of(model)["requests"] == 1


def test_other_weights_are_other_programs() -> None:
    with rm.init("npu:0", fallback=STRICT):
        model = made(gpt2)
        model.generate(**call(1))
        with torch.no_grad():
            model.transformer.wte.weight.mul_(-1)
        with rm.disabled():
            expected = model.generate(**call(1))
        assert torch.equal(model.generate(**call(1)), expected)
        assert engine_of(model)["starts"] == 2


def test_another_device_takes_the_model_and_the_engines_process_ends() -> None:
    with rm.init("npu:0", fallback=STRICT):
        model = made(gpt2)
        expected = model.generate(**call(1))
        pid = engine_of(model)["pid"]
        assert Path("/proc", str(pid)).exists()
        rm.switch_device("cpu")
        assert not Path("/proc", str(pid)).exists()
        assert torch.equal(model.generate(**call(1)), expected)
        rm.switch_device("npu:0")
        assert torch.equal(model.generate(**call(1)), expected)
        pid = engine_of(model)["pid"]
    assert not Path("/proc", str(pid)).exists()


def test_what_it_does_not_do_is_named_and_transformers_does_it() -> None:
    with rm.init("npu:0"):
        model = made(gpt2)
        with pytest.warns(rm.RoutingWarning, match="RM332.*do_sample"):
            model.generate(**{**call(1), "do_sample": True})
        assert engine_of(model)["requests"] == 0 and engine_of(model)["starts"] == 0


def test_a_damaged_program_is_made_again(own_cache: Path) -> None:
    with rm.init("npu:0", fallback=STRICT):
        made(gpt2).generate(**call(1))
    (kept,) = (own_cache / "optimum_rbln").iterdir()
    (kept / "prefill.rbln").write_bytes(b"damaged")
    with rm.init("npu:0", fallback=STRICT):
        model = made(gpt2)
        model.generate(**call(1))
        assert engine_of(model)["requests"] == 1
    assert len(list((own_cache / "optimum_rbln").iterdir())) == 1


FAULTS = {
    "compile_crash": "RM331", "compile_hang": "RM331", "compile_error": "RM331",
    "compile_wrong": "RM501", "unsupported": "RM331", "out_of_memory": "RM331",
    "load_crash": "RM331", "load_hang": "RM331", "run_crash": "RM331", "run_hang": "RM331",
    "device_lost": "RM331", "wrong_numbers": "RM501",
}  # fmt: skip
IN_CI = ("run_crash", "wrong_numbers")


def deadlines(fault: str) -> dict[str, float]:
    """Short where the fault is to hang there, and long enough for the rest on a busy machine."""
    return {
        "timeout_s": 15 if fault == "compile_hang" else 250,
        "load_timeout_s": 5 if fault == "load_hang" else 250,
        "execute_timeout_s": 5 if fault == "run_hang" else 100,
    }


@pytest.mark.parametrize("fault", sorted(FAULTS) if HEAVY else IN_CI)
@pytest.mark.parametrize("fallback", ["warn", STRICT], ids=["warn", "strict"])
def test_a_fault_is_told_and_transformers_generates(
    fault: str, fallback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REBEL_FAULT", fault)
    with rm.init("npu:0", fallback=fallback, compile_options=deadlines(fault)):
        model = made(gpt2)
        with rm.disabled():
            expected = model.generate(**call(1))
        if fallback == STRICT:
            with pytest.raises(rm.Error) as caught:
                model.generate(**call(1))
            assert caught.value.code == FAULTS[fault]
        else:
            with pytest.warns(rm.RoutingWarning, match=FAULTS[fault]):
                assert torch.equal(model.generate(**call(1)), expected)


def test_a_crash_in_the_middle_is_generated_anew_and_the_next_one_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = tmp_path / "happened"
    switch.touch()
    monkeypatch.setenv("REBEL_FAULT", "run_crash")
    monkeypatch.setenv("REBEL_FAULT_ONCE", str(switch))
    with rm.init("npu:0"):
        model = made(gpt2)
        expected = model.generate(**call(1))
        switch.unlink()
        with pytest.warns(rm.RoutingWarning, match="RM303"):
            assert torch.equal(model.generate(**call(1)), expected)
        assert switch.exists()
        with warnings.catch_warnings():
            warnings.simplefilter("error", rm.RoutingWarning)
            assert torch.equal(model.generate(**call(1)), expected)
        found = engine_of(model)
    assert found["starts"] == 2 and len(found["crashes"]) == 1
