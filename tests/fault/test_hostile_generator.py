"""A runtime of a plugin that generates and misbehaves (hostile/hostile_generator.py): tokens are
transformers' all the same, what is wrong with it is told once and the death of a process once each.
RM_HEAVY=1: a process each, which imports torch and transformers."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import rm_abstract as rm

HOSTILE = Path(__file__).parent / "hostile"
pytestmark = [
    pytest.mark.skipif(os.environ.get("RM_HEAVY") != "1", reason="RM_HEAVY=1 runs it"),
    pytest.mark.timeout(1800),
]
# What is said; the second generation is the one that is cut off.
CASES = {
    **{f"gen_later.{kind}": "RM331" for kind in ("beyond", "negative", "huge", "short", "long")},
    **{f"gen_later.{kind}": "RM331" for kind in ("nothing", "words", "nan", "end", "error")},
    **{f"gen_later.{kind}": "RM303" for kind in ("kill", "exit", "abort")},
    "gen_later.garbage": "RM331",
    "gen_later.hang": "RM308",
    "gen_first.huge": "RM331",
    "gen_init.error": "RM331",
}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=64, vocab_size=100, max_position_embeddings=96,
        )
    ).eval()  # fmt: skip
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("case", CASES)
def test_whatever_it_does_the_tokens_are_right(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_BACKEND_PATH", str(HOSTILE))
    monkeypatch.setenv("HOSTILE", case)
    monkeypatch.setenv("HOSTILE_FOLDER", str(tmp_path))
    ids = torch.arange(18).reshape(2, 9) * 7 % 90 + 5
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
    # Starting has long, on a busy machine; only what is to hang has not.
    limits = {"timeout_s": 900, "execute_timeout_s": 5 if case.endswith("hang") else 300}
    with rm.init("hostile:0", compile_options=limits):
        model = llama()
        with rm.disabled():
            expected = model.generate(**call, max_new_tokens=12)
        rm.accelerate(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                assert torch.equal(model.generate(**call, max_new_tokens=12), expected)
        told = [str(one.message) for one in caught if CASES[case] in str(one.message)]
        (seen,) = rm.explain(model).to_dict()["models"]
    deaths = 2 if CASES[case] in ("RM303", "RM308") else 1  # a process of each call may end
    assert 1 <= len(told) <= deaths, [str(one.message) for one in caught]
    assert all(len(one) < 20_000 for one in told)
    assert seen["generation_engine"]["starts"] >= 1
