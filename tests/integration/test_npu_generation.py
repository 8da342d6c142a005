"""Generation on a device that compiles whole programs: keys and values stay there between steps."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import rm_abstract as rm
from rm_abstract.hooks.attaching import router_of

STRICT = "error:capture,compile,device,correctness"
VOCABULARY = 64


@pytest.fixture(autouse=True)
def own_cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_CACHE_DIR", str(shared_cache))


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_SIM_COMPILE_S", "0")
    torch.manual_seed(0)


@pytest.fixture
def npu() -> Iterator[Any]:
    yield rm.init("sim:0", fallback=STRICT)
    rm.shutdown()


def gpt2() -> Any:
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=512)
    config.bos_token_id = config.eos_token_id = None
    return GPT2LMHeadModel._from_config(config).eval()


def llama(**more: Any) -> Any:
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, vocab_size=VOCABULARY, eos_token_id=None, bos_token_id=None, **more,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config).eval()


def prompt(rows: int, length: int = 6) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY - 1, (rows, length))
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[0, :2] = 0  # padded on the left
    return {"input_ids": ids, "attention_mask": mask}


def tokens(model: Any, inputs: dict[str, Any], new: int = 12, **more: Any) -> list[list[int]]:
    found = model.generate(**inputs, max_new_tokens=new, do_sample=False, pad_token_id=0, **more)
    return list(found.tolist())


def eager(model: Any, *args: Any, **kwargs: Any) -> list[list[int]]:
    with rm.disabled():
        return tokens(model, *args, **kwargs)


def entries(model: Any) -> list[dict[str, Any]]:
    return list(rm.explain(model).to_dict()["models"][0]["entries"])


def traffic(model: Any) -> Any:
    return copy.copy(router_of(model).engine.compiler.device.traffic)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_are_the_originals_by_two_programs(npu: Any, make: Any, rows: int) -> None:
    model = make()
    for length in (6, 9):  # one bucket
        inputs = prompt(rows, length)
        expected = eager(model, inputs)
        for _ in range(2):
            assert tokens(model, inputs) == expected
    assert len(entries(model)) == 2  # a prompt's and a token's
    assert all(row["parity"] == "passed" for row in entries(model))
    assert sum(row["calls"] for row in entries(model)) >= 4 * 12 - 4


def test_what_travels_with_a_token_is_what_goes_in_and_the_logits(npu: Any) -> None:
    model, inputs = llama(), prompt(1)
    tokens(model, inputs, 40)
    tokens(model, inputs, 40)
    moved = []
    for new in (20, 40):
        before = traffic(model)
        tokens(model, inputs, new)
        after = traffic(model)
        assert after.states == before.states  # the cache itself never travels
        moved.append([after.inputs - before.inputs, after.outputs - before.outputs])
    per_token = [(more - less) / 20 for less, more in zip(*moved, strict=True)]
    token, position, length, mask = 8, 8, 8, 64 * 8
    assert per_token[0] == token + position + length + mask
    assert per_token[1] == VOCABULARY * 4 + 8  # and the new length
    cache = 2 * 2 * 2 * 64 * 8 * 4  # layers, keys and values, heads, room, size, bytes
    assert sum(per_token) < cache / 20


def test_room_grows_on_the_device_by_buckets(npu: Any) -> None:
    model, inputs = llama(), prompt(2)
    cache = model.generate(
        **inputs, max_new_tokens=50, return_dict_in_generate=True, pad_token_id=0
    ).past_key_values
    assert cache.capacity == 64
    first = traffic(model)
    long = {k: torch.cat([v, torch.ones(2, 50, dtype=torch.long)], 1) for k, v in inputs.items()}
    more = torch.ones(2, 24, dtype=torch.long)
    with torch.no_grad():
        for step in range(24):
            mask = torch.cat([long["attention_mask"][:, :-1], more[:, : step + 1]], 1)
            model(input_ids=more[:, :1], attention_mask=mask, past_key_values=cache)
    assert cache.capacity == 128 and cache.length == 55 + 24
    # To and fro while a form's first step is compared with eager's, at each size; not with every
    # one of the 24 tokens.
    one_way = 2 * 2 * 2 * 2 * 128 * 8 * 4
    assert traffic(model).states - first.states <= 8 * one_way
    assert len(entries(model)) == 4  # generate's two; this form's, one for each room


def test_beams_are_reordered_on_the_device(npu: Any) -> None:
    model, inputs = llama(), prompt(2)
    expected = eager(model, inputs, num_beams=3)
    assert tokens(model, inputs, num_beams=3) == expected
    before = traffic(model)
    assert tokens(model, inputs, num_beams=3) == expected
    assert traffic(model).states == before.states


def test_prompts_of_every_length_give_the_originals_tokens(npu: Any) -> None:
    model = llama()
    for length in (1, 2, 15, 16, 17, 40):
        inputs = prompt(2, max(length, 3)) if length > 2 else prompt(1, length)
        assert tokens(model, inputs, 4) == eager(model, inputs, 4)
        assert tokens(model, inputs, 4) == eager(model, inputs, 4)


def step(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(input_ids=ids, past_key_values=cache).logits)


OPERATIONS = {
    "crop": lambda cache: cache.crop(-3),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "nothing": lambda cache: None,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_operations_on_a_cache_are_those_of_transformers(npu: Any, name: str) -> None:
    model = llama()
    inputs = {"input_ids": torch.randint(1, 60, (3, 7))}
    logits, kept = [], []
    for where in ("eager", "device", "device"):
        outputs: Any
        if where == "eager":
            with rm.disabled():
                outputs = model.generate(
                    **inputs, max_new_tokens=4, return_dict_in_generate=True, pad_token_id=0
                )
        else:
            outputs = model.generate(
                **inputs, max_new_tokens=4, return_dict_in_generate=True, pad_token_id=0
            )
        cache = outputs.past_key_values
        twin = copy.deepcopy(cache)
        OPERATIONS[name](cache)
        rows = {"select": 2, "repeat": 6}.get(name, 3)
        ids = torch.arange(1, rows * 2 + 1).reshape(rows, 2)
        if where == "eager":
            with rm.disabled():
                logits.append(step(model, cache, ids))
        else:
            logits.append(step(model, cache, ids))
        assert twin.get_seq_length() == 10
        kept.append((cache.layers[1].keys, cache.layers[0].values, twin.layers[1].keys))
    for i in (1, 2):
        torch.testing.assert_close(logits[i], logits[0], rtol=1e-4, atol=1e-4)
        for mine, theirs in zip(kept[i], kept[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_conversation_goes_on_with_its_cache(npu: Any) -> None:
    model = llama()
    first = {"input_ids": torch.randint(1, 60, (1, 7))}
    said = torch.randint(1, 60, (1, 5))

    def talk() -> list[int]:
        cache, ids = None, first["input_ids"]
        for _ in range(3):
            outputs = model.generate(
                input_ids=ids, past_key_values=cache, max_new_tokens=6, do_sample=False,
                return_dict_in_generate=True, pad_token_id=0,
            )  # fmt: skip
            cache, ids = outputs.past_key_values, torch.cat([outputs.sequences, said], 1)
        return list(ids[0].tolist())

    with rm.disabled():
        expected = talk()
    assert [talk() for _ in range(2)] == [expected] * 2
    assert sum(row["calls"] for row in entries(model)) > 20


def test_a_cache_of_the_users_own_is_served_as_it_is(npu: Any) -> None:
    from transformers import DynamicCache

    model, inputs = llama(), prompt(2)
    expected = eager(model, inputs)
    for _ in range(2):
        assert tokens(model, inputs, past_key_values=DynamicCache()) == expected


def test_batches_are_padded_to_the_listed_sizes() -> None:
    with rm.init("sim:0", compile_options={"batch_size": [2, 4]}, fallback=STRICT):
        model = llama()
        for rows in (3, 4, 2, 3):
            inputs = prompt(rows)
            assert tokens(model, inputs) == eager(model, inputs)
        sizes = {row["signature"].split(",")[0] for row in entries(model)}
        assert sizes == {"[4", "[2"}
        inputs = prompt(5)
        assert tokens(model, inputs) == eager(model, inputs)
        reasons = rm.explain(model).to_dict()["models"][0]["reasons"]
        assert "batch_size=2,4" in str(reasons)


def test_states_are_freed_with_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = llama(), prompt(2)
    one = 2 * 2 * 2 * 2 * 64 * 8 * 4
    monkeypatch.setenv("RM_SIM_MEMORY", str(9 * one))  # the programs, and three caches
    with rm.init("sim:0", fallback=STRICT):
        rm.accelerate(model)
        expected = eager(model, inputs)
        for _ in range(8):
            assert tokens(model, inputs) == expected


def test_programs_of_a_model_have_its_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "VOCABULARY", 16384)
    with rm.init("sim:0", fallback=STRICT):
        model = llama()
        weights = sum(p.nbytes for p in model.parameters())
        assert weights > 4 << 20
    # Enough for what one program needs, and not for the weights of two.
    monkeypatch.setenv("RM_SIM_MEMORY", str(int(1.9 * weights) + (3 << 20)))
    with rm.init("sim:0", fallback=STRICT):
        rm.accelerate(model)
        for rows in (1, 2):
            inputs = prompt(rows)
            assert tokens(model, inputs) == eager(model, inputs)
        assert len(entries(model)) == 4  # a prompt's and a token's program, of one row and of two
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)  # the old copy goes, with the programs that had it
        assert tokens(model, inputs) == eager(model, inputs)


HALF = """
with rm.init("sim:0", compile_options={"precision": "bf16"}, fallback=STRICT):
    model, inputs = llama(), prompt(2)
    for _ in range(2):
        cache = model.generate(
            **inputs, max_new_tokens=8, return_dict_in_generate=True, pad_token_id=0
        ).past_key_values
    assert cache.residence.on_device
    keys = cache.layers[1].keys
    assert torch.equal(keys, keys.bfloat16().float()) and keys.abs().max() > 0
"""

NO_UPDATES = """
with rm.init("sim:0"):
    model, inputs = llama(), prompt(2)
    expected = eager(model, inputs)
    for _ in range(3):
        assert tokens(model, inputs) == expected
    report = rm.explain(model).to_dict()["models"][0]
    assert "index_copy" in str(report["reasons"])
    assert sum(row["calls"] for row in report["entries"]) > 12
"""


def on_device(source: str, **environment: str) -> None:
    """Runs `source` where the device is as `environment` says: a plugin reads it when it loads."""
    package = os.path.dirname(os.path.dirname(rm.__file__))
    env = {**os.environ, "PYTHONPATH": package, "RM_SIM_COMPILE_S": "0", **environment}
    head = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", head + "from test_npu_generation import *\n" + source],
        capture_output=True, text=True, env=env, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and "no effect" not in done.stderr, done.stderr


def test_a_device_without_updates_in_place_serves_the_old_way() -> None:
    on_device(NO_UPDATES, RM_SIM_UNSUPPORTED="index_copy")


@pytest.mark.sampled(1, of="npu with real models")
def test_a_device_of_half_precision_keeps_its_states_too() -> None:
    on_device(HALF, RM_SIM_NUMERICS="bf16")


SCRIPT = """
import json, sys, torch, rm_abstract as rm
rm.init("npu:0", fallback="error:capture,compile,device,correctness")
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({path!r}, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained({path!r}, dtype=torch.float32).eval()
batch = tokenizer(["Once upon a time", "The"], return_tensors="pt", padding=True)
def run(): return model.generate(**batch, do_sample=False, max_new_tokens=12).tolist()
with rm.disabled(): expected = run()
right = [run() == expected for _ in range(2)]
rows = rm.explain(model).to_dict()["models"][0]["entries"]
print(json.dumps([right, [r["cache"] for r in rows], sum(r["calls"] for r in rows)]))
"""


@pytest.mark.sampled(1, of="npu with real models")
def test_a_second_process_compiles_nothing_of_the_trained_llama(
    tiny_llama: Path, tmp_path: Path
) -> None:
    package = os.path.dirname(os.path.dirname(rm.__file__))
    env = {**os.environ, "PYTHONPATH": package, "RM_SIM_NPU": "1", "RM_SIM_COMPILE_S": "0"}
    env["RM_CACHE_DIR"] = str(tmp_path)
    for cache, calls in (("miss", 22), ("hit", 24)):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(path=str(tiny_llama))],
            capture_output=True, text=True, env=env, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        right, caches, served = json.loads(done.stdout.splitlines()[-1])
        assert right == [True, True] and caches == [cache] * 2 and served == calls
