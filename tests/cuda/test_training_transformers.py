"""Models of transformers in training steps on a GPU: what is recognised in their forwards trains as
in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
rm = pytest.importorskip("rm_abstract")

pytestmark = pytest.mark.cuda


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=1003,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=1003,
        n_embd=128,
        n_layer=2,
        n_head=4,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=1003,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


# What the plan of each is made of; a sum over keys for the whole of attention would be a softmax.
MODELS = {
    "llama": (llama, ["sdpa_backward", "cross_entropy"]),
    "gpt2": (gpt2, ["sdpa_backward", "cross_entropy"]),
    "bert": (bert, ["sdpa_backward", "cross_entropy"]),
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("llama", None),
        ("llama", "bf16"),
        ("gpt2", None),
        ("gpt2", "bf16"),
        ("bert", None),
        ("bert", "bf16"),
    ],
)
def test_a_model_trains_as_in_eager(name: str, precision: str | None) -> None:
    make, wanted = MODELS[name]
    torch.manual_seed(0)
    model = make().train().cuda()
    other = copy.deepcopy(model)
    optimizer, beside = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, other))
    how: dict[str, Any] = {} if precision is None else {"precision": precision}
    step = rm.compile_step(model, None, optimizer, options={"fallback": "error"}, **how)
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(3):
        ids = torch.randint(0, 1003, (4, 96), generator=generator)
        labels = ids.clone()
        labels[:, :5] = -100
        mask = torch.ones_like(ids)
        if name == "bert":
            mask[1, 70:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    batches = [{k: v.cuda() for k, v in batch.items()} for batch in batches]
    bound = 3e-4 if precision is None else 0.03
    for i in range(12):
        batch = batches[i % len(batches)]
        beside.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision is not None):
            loss = other(**batch).loss
        loss.backward()
        beside.step()
        assert float(step(batch)) == pytest.approx(float(loss), rel=bound), i
    report = step.report()
    assert report["reasons"] == {} and report["compiled"] >= 9, report
    kernels = report["programs"][0]["kernels"]
    for part in wanted:
        assert any(part in kernel for kernel in kernels), kernels
    assert not any("softmax" in kernel for kernel in kernels), kernels
