"""The real optimum-rbln on the stand-in for `rebel`, where RM_TEST_RBLN_PYTHON names an environment
that has it (rm-abstract env create rbln): a client of the vendor's own finds in the stand-in what
it calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

VENDOR = Path(__file__).resolve().parents[1] / "vendor"
PYTHON = os.environ.get("RM_TEST_RBLN_PYTHON", "")
HEAVY = os.environ.get("RM_HEAVY") == "1"
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="no RM_TEST_RBLN_PYTHON (rm-abstract env create rbln)"
)

SMALL = (
    "hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, "
    "intermediate_size=64, vocab_size=100, max_position_embeddings=256"
)
MODELS = {
    "Llama": f"LlamaForCausalLM(LlamaConfig({SMALL}))",
    "Qwen2": f"Qwen2ForCausalLM(Qwen2Config({SMALL}))",
    "GPT2": "GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, "
    "n_positions=256, bos_token_id=1, eos_token_id=2))",
}
SOURCE = """
import torch, optimum.rbln
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import Qwen2Config, Qwen2ForCausalLM
torch.manual_seed(0)
pairs = [(model.eval(), rows) for model in ({models},) for rows in {batches}]
for model, rows in pairs:
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    made = getattr(optimum.rbln, "RBLN" + type(model).__name__)
    config = dict(batch_size=rows, max_seq_len=256, npu="RBLN-CA22", device=0)
    compiled = made.from_model(model, rbln_config=config)
    ids = torch.randint(3, 100, (rows, 9))
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[0, :3], ids[0, :3] = 0, 0
    how = dict(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    print(type(model).__name__, torch.equal(model.generate(**how), compiled.generate(**how)))
"""


def answers(models: list[str], batches: list[int], **environment: str) -> list[str]:
    """A line for each model and batch, of one process: importing optimum takes seconds."""
    env = {**os.environ, "PYTHONPATH": str(VENDOR), "REBEL_NPUS": "RBLN-CA22", **environment}
    made = ", ".join(MODELS[model] for model in models)
    source = SOURCE.format(models=made, batches=batches)
    done = subprocess.run(
        [PYTHON, "-c", source], capture_output=True, text=True, env=env, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_optimums_own_generate_gives_transformers_tokens() -> None:
    batches = [1, 2, 4] if HEAVY else [2]
    classes = ("LlamaForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel")
    expected = [f"{name} True" for name in classes for _ in batches]
    assert answers(list(MODELS), batches) == expected


def test_an_older_compilers_name_of_a_keyword_is_found() -> None:
    assert answers(["GPT2"], [1], REBEL_OLD_NAMES="1") == ["GPT2LMHeadModel True"]


ENCODERS = """
import sys, torch, optimum.rbln, transformers as hf
torch.manual_seed(0)
ids = torch.arange(33).reshape(3, 11) % 90 + 5
mask = torch.ones_like(ids)
mask[-1, -4:] = 0
small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
text = dict(max_seq_len=11)
given = dict(input_ids=ids, attention_mask=mask)
positions = dict(vocab_size=100, max_position_embeddings=64)
rows = [
    (hf.BertForMaskedLM(hf.BertConfig(**positions, **small)), text,
     dict(given, token_type_ids=mask * 0)),
    (hf.RobertaForSequenceClassification(hf.RobertaConfig(**positions, **small)), text, given),
    (hf.ViTForImageClassification(hf.ViTConfig(image_size=32, patch_size=8, **small)),
     dict(image_size=32), dict(pixel_values=torch.randn(3, 3, 32, 32))),
    (hf.AutoModel.from_pretrained(sys.argv[1]), text, given),
]
for model, sizes, inputs in rows:
    model.eval()
    made = getattr(optimum.rbln, "RBLN" + type(model).__name__)
    config = dict(batch_size=3, npu="RBLN-CA22", device=0, **sizes)
    compiled = made.from_model(model, rbln_config=config)
    with torch.no_grad():
        expected, got = model(**inputs)[0], compiled(**inputs)[0]
    keep = inputs["attention_mask"].bool() if got.dim() == 3 else slice(None)
    print(type(model).__name__, torch.allclose(got[keep], expected[keep], atol=1e-5, rtol=1e-4))
"""


def test_optimums_own_encoders_give_transformers_results(minilm: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(VENDOR), "REBEL_NPUS": "RBLN-CA22"}
    done = subprocess.run(
        [PYTHON, "-c", ENCODERS, str(minilm)], capture_output=True, text=True, env=env, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "BertForMaskedLM True",
        "RobertaForSequenceClassification True",
        "ViTForImageClassification True",
        "BertModel True",
    ]
