"""Unmodified models on the simulated NPU: same answers, buckets, one compile a key, switching."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTModel,
)

import rm_abstract as rm

FAULT_TESTS = Path(__file__).resolve().parents[1] / "fault"
STRICT = "error:capture,compile,device,correctness"
SMALL_BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
}


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RM_SIM_COMPILE_S", "0")
    monkeypatch.setenv("RM_SIM_NPU", "1")
    torch.manual_seed(0)
    yield rm.init("npu:0", fallback=STRICT)
    rm.shutdown()


def entries(model: Any) -> list[dict[str, Any]]:
    return list(rm.explain(model).to_dict()["models"][0]["entries"])


def check(model: Any, calls: int = 3, **inputs: Any) -> None:
    """The original's answer, from the first call on."""
    with torch.no_grad():
        with rm.disabled():
            expected = model(**inputs).last_hidden_state
        for _ in range(calls):
            actual = model(**inputs).last_hidden_state
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def test_an_encoder_runs_in_buckets_and_padding_changes_nothing(npu: Any) -> None:
    assert rm.current_device() == "sim:0"
    model = BertModel._from_config(BertConfig(**SMALL_BERT)).eval()
    for batch, length in [(2, 5), (2, 9), (3, 16), (4, 7), (2, 20)]:
        ids = torch.randint(1, 49, (batch, length))
        mask = torch.ones_like(ids)
        mask[0, length // 2 :] = 0  # the user's own padding
        check(model, input_ids=ids, attention_mask=mask)
    rows = entries(model)
    assert {row["signature"].split()[0] for row in rows} == {"[2,16]", "[4,16]", "[2,32]"}
    assert all(row["engine"] == "whole_program" and row["parity"] == "passed" for row in rows)
    assert sum(row["calls"] for row in rows) >= 10
    assert any("gather" in why for why in rows[0]["kept"]) and rows[0]["native_share"] > 0.5


def test_an_encoder_without_a_mask_is_padded_too(npu: Any) -> None:
    model = BertModel._from_config(BertConfig(**SMALL_BERT)).eval()
    for length in (5, 6, 7):
        check(model, input_ids=torch.randint(1, 49, (2, length)))
    assert len(entries(model)) == 1


def test_images_are_padded_in_the_batch_only(npu: Any) -> None:
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
    )
    model = ViTModel._from_config(config).eval()
    for batch in (3, 4):
        check(model, pixel_values=torch.randn(batch, 3, 16, 16))
    assert [row["signature"].split(",")[0] for row in entries(model)] == ["[4"]


def generated(model: Any, ids: torch.Tensor, mask: torch.Tensor, new: int) -> list[list[int]]:
    tokens = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=new, pad_token_id=0
    )
    return list(tokens.tolist())


@pytest.mark.parametrize("rows", [1, 2])
def test_gpt2_generates_the_same_tokens(npu: Any, rows: int) -> None:
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=64)
    config.bos_token_id = config.eos_token_id = 0
    model = GPT2LMHeadModel._from_config(config).eval()
    ids = torch.randint(1, 63, (rows, 6))
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[0, :2] = 0
    with rm.disabled():
        expected = generated(model, ids, mask, 16)
    for _ in range(2):
        assert generated(model, ids, mask, 16) == expected
    assert len(entries(model)) <= 4  # prompt, and past tokens in powers of two
    assert sum(row["calls"] for row in entries(model)) >= 24


def test_the_trained_llama_generates_the_same_tokens(npu: Any, tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_llama), padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(str(tiny_llama), dtype=torch.float32).eval()
    batch = tokenizer(["Once upon a time", "The"], return_tensors="pt", padding=True)
    with rm.disabled():
        expected = generated(model, batch["input_ids"], batch["attention_mask"], 12)
    for _ in range(2):
        assert generated(model, batch["input_ids"], batch["attention_mask"], 12) == expected
    assert sum(row["calls"] for row in entries(model)) >= 12


def test_sizes_outside_the_lists_stay_eager_and_the_others_do_not() -> None:
    options = {"batch_size": [2, 4], "sequence_length": [8, 16]}
    torch.manual_seed(0)
    with rm.init("sim:0", compile_options=options, fallback=STRICT):
        model = BertModel._from_config(BertConfig(**SMALL_BERT)).eval()
        for batch, length in [(5, 8), (3, 7), (2, 16), (2, 30), (4, 8)]:
            ids = torch.randint(1, 49, (batch, length))
            check(model, input_ids=ids, attention_mask=torch.ones_like(ids))
        sizes = {row["signature"].split()[0] for row in entries(model)}
        reasons = rm.explain(model).to_dict()["models"][0]["reasons"]
    assert sizes == {"[4,8]", "[2,16]"}
    assert "batch_size=2,4" in str(reasons) or "sequence_length=8,16" in str(reasons)
    assert "RM105" in {reason["code"] for reason in reasons}


def test_a_model_moves_between_devices_while_it_lives(npu: Any) -> None:
    model = BertModel._from_config(BertConfig(**SMALL_BERT)).eval()
    ids = torch.randint(1, 49, (2, 6))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for device, engine in [
        ("sim:0", "whole_program"),
        ("cpu", "native"),
        ("npu:0", "whole_program"),
    ]:
        rm.switch_device(device)
        check(model, **inputs)
        assert entries(model)[0]["engine"] == engine
        assert entries(model)[0]["calls"] > 0
    assert entries(model)[0]["cache"] == "hit"


def test_changed_weights_are_compared_again_and_nothing_is_compiled(npu: Any) -> None:
    model = BertModel._from_config(BertConfig(**SMALL_BERT)).eval()
    ids = torch.randint(1, 49, (2, 6))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    check(model, **inputs)
    stored = npu.compile_cache().counters()["store"]
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight.mul_(2)
    check(model, **inputs)
    # Nor is a verdict stored: an evaluation an epoch would leave a file an epoch (decision 0081).
    assert npu.compile_cache().counters()["store"] == stored
    assert entries(model)[0]["parity"] == "passed"
    assert sum(row["calls"] for row in entries(model)) >= 2


PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {tests!r})
import torch
from npu_support import Encoder, call_of, rm

def serve(length=6, changed=False, half=False, options=None):
    with rm.init("sim:0", compile_options=options or {{}}):
        model = Encoder().eval()
        if changed:
            with torch.no_grad(): model.first.weight.add_(0.5)
        if half:
            model.bfloat16()
        rm.accelerate(model)
        inputs = call_of(2, length)
        with torch.no_grad():
            with rm.disabled(): expected = model(**inputs)
            for _ in range(3): output = model(**inputs)
        report = rm.explain(model).to_dict()["models"][0]
        return {{
            "compiles": sum(row["cache"] == "miss" for row in report["entries"]),
            "routed": report["routed"], "codes": [r["code"] for r in report["reasons"]],
            "error": float((output - expected).abs().max()),
        }}

print(json.dumps([serve(**call) for call in json.loads({calls!r})]))
"""


def serve(calls: list[dict[str, Any]], **environment: str) -> list[dict[str, Any]]:
    """One process with the cache of this test: what each of its sessions compiled and served."""
    source = PROGRAM.format(tests=str(FAULT_TESTS), calls=json.dumps(calls))
    package = os.path.dirname(os.path.dirname(rm.__file__))
    env = {**os.environ, "PYTHONPATH": package, "RM_SIM_COMPILE_S": "0", **environment}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, list) and len(found) == len(calls)
    return found


@pytest.mark.sampled(1, of="npu with real models")
def test_every_part_of_the_key_makes_exactly_one_compile(seed: int) -> None:
    of_the_call = [{}, {"length": 20}, {"half": True}, {"options": {"optimization_level": 0}}]
    processes: list[tuple[list[dict[str, Any]], dict[str, str]]] = [
        (of_the_call, {}),
        ([{}], {"RM_SIM_COMPILER": "1.1"}),
        ([{}], {"RM_SIM_TARGET": "sim-2"}),
        ([{}, {"changed": True}], {"RM_SIM_EMBED": "1"}),
    ]
    if os.environ.get("RM_HEAVY") != "1":  # each is two processes
        processes[1:] = random.Random(seed).sample(processes[1:], 1)
    for calls, environment in processes:
        for call, first in zip(calls, serve(calls, **environment), strict=True):
            assert first["compiles"] == 1 and first["error"] < 0.05, (call, environment, first)
    processes[0][0].append({"changed": True})  # weights are not in these artefacts
    for calls, environment in processes:
        for call, again in zip(calls, serve(calls, **environment), strict=True):
            assert again["compiles"] == 0 and again["routed"] == 2, (call, environment, again)


def test_a_device_of_less_precision_serves_only_who_allows_it() -> None:
    calls: list[dict[str, Any]] = [{}, {"options": {"precision": "bf16"}}]
    refused, allowed = serve(calls, RM_SIM_NUMERICS="bf16")
    assert refused["routed"] == 0 and "RM501" in refused["codes"]
    assert allowed["routed"] == 2 and 1e-6 < allowed["error"] < 0.1


@pytest.mark.sampled(1, of="npu with real models")
def test_a_second_process_compiles_nothing_of_a_real_model(minilm: Path) -> None:
    source = (
        "import rm_abstract as rm, torch, json; rm.init('npu:0', fallback='error:compile')\n"
        "from transformers import AutoModel, AutoTokenizer\n"
        f"path = {str(minilm)!r}\n"
        "model = AutoModel.from_pretrained(path).eval()\n"
        "tokenizer = AutoTokenizer.from_pretrained(path)\n"
        "batch = tokenizer(['a first sentence', 'and a longer second one'], padding=True,"
        " return_tensors='pt')\n"
        "with torch.no_grad():\n"
        "    with rm.disabled(): expected = model(**batch).last_hidden_state\n"
        "    for _ in range(2): output = model(**batch).last_hidden_state\n"
        "rows = rm.explain(model).to_dict()['models'][0]['entries']\n"
        "print(json.dumps([float((output - expected).abs().max()), [r['cache'] for r in rows],"
        " [r['calls'] for r in rows]]))\n"
    )
    package = os.path.dirname(os.path.dirname(rm.__file__))
    env = {**os.environ, "PYTHONPATH": package, "RM_SIM_NPU": "1", "RM_SIM_COMPILE_S": "0"}
    for cache, calls in (("miss", 1), ("hit", 2)):
        done = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, env=env, timeout=300
        )
        assert done.returncode == 0, done.stderr
        error, caches, served = json.loads(done.stdout.splitlines()[-1])
        assert error < 1e-4 and caches == [cache] and served == [calls]


def test_check_says_what_a_device_keeps_back(tiny_llama: Path) -> None:
    from rm_abstract.cli.main import cli

    done = CliRunner().invoke(cli, ["check", str(tiny_llama), "--device", "sim", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report["model"] == "LlamaForCausalLM"
    assert 0 < report["device_nodes"] <= report["nodes"]
    done = CliRunner().invoke(cli, ["check", str(tiny_llama), "--device", "cpu"])
    assert done.exit_code == 1 and "RM304" in done.output


def test_a_made_up_machine_is_reported_as_it_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_HARDWARE_ROOT", str(tmp_path))
    (tmp_path / "dev" / "rngd").mkdir(parents=True)
    (tmp_path / "dev" / "rngd" / "npu0mgmt").touch()
    with pytest.raises(rm.DeviceUnavailableError) as caught:
        rm.init("npu:0", fallback="error")
    assert caught.value.code == "RM401" and "furiosa-torch" in str(caught.value)
    with pytest.raises(rm.DeviceUnavailableError) as caught:
        rm.init("furiosa:0", fallback="error")
    assert caught.value.code == "RM401" and "furiosa-torch" in str(caught.value)
    with pytest.warns(rm.RoutingWarning, match="furiosa-torch"), rm.init("npu:0"):
        assert rm.current_device() == "cpu"
