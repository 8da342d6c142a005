"""Transformers architectures called without no_grad: served, with eager's loss and gradients.

RM_HEAVY=1 tries more decoders, and gradients of inputs and fine-tuning with all architectures.
"""

from __future__ import annotations

import os

import pytest
import torch
import transformers as hf
from architectures import SMALL
from families import FAMILIES

import rm_abstract as rm

ENCODERS = {
    "bert": (hf.BertForSequenceClassification, hf.BertConfig),
    "roberta": (hf.RobertaForSequenceClassification, hf.RobertaConfig),
    "electra": (hf.ElectraForSequenceClassification, hf.ElectraConfig),
    "albert": (hf.AlbertForSequenceClassification, hf.AlbertConfig),
    "mpnet": (hf.MPNetForSequenceClassification, hf.MPNetConfig),
    "camembert": (hf.CamembertForSequenceClassification, hf.CamembertConfig),
}
DECODERS = [
    *("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "llama", "mistral"),
    *("qwen2", "qwen3", "gemma", "gemma2", "phi", "stablelm"),
]
HEAVY = os.environ.get("RM_HEAVY") == "1"
DECODERS += ["olmo2", "granite"] if HEAVY else []
SOME = [*ENCODERS, *DECODERS] if HEAVY else ["bert", "llama"]
SLIDING = {"mistral", "gemma2"}  # caches of sliding windows are not served as outputs


def build(name: str):
    torch.manual_seed(1)
    if name in ENCODERS:
        model, config = ENCODERS[name]
        return model(config(vocab_size=100, **SMALL)).eval()
    family = FAMILIES[name]
    config = getattr(hf, family.config)(**family.options)
    return getattr(hf, family.model)(config).eval()


def routed_calls(model) -> int:
    return vars(model)["_compiled_call_impl"].route.routed()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_a_call_without_no_grad_is_served_with_eager_s_loss_and_gradients(name):
    with rm.init("cpu"):
        model = build(name)
        rm.accelerate(model)
        torch.manual_seed(0)
        ids = torch.randint(2, 100, (2, 9))
        labels = torch.tensor([0, 1]) if name in ENCODERS else ids
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        if name in SLIDING:
            inputs["use_cache"] = False
        for _ in range(3):  # learns (an encoder's first call sets its problem type), compiles
            model(**inputs)
        before = routed_calls(model)
        output = model(**inputs)
        assert routed_calls(model) == before + 1, rm.explain()
        output.loss.backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        with rm.disabled():
            expected = model(**inputs)
            expected.loss.backward()
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-4, atol=1e-5)
        assert found.keys() == {n for n, p in model.named_parameters() if p.grad is not None}
        for n, p in model.named_parameters():
            if p.grad is not None:
                scale = float(p.grad.abs().max()) or 1.0
                torch.testing.assert_close(
                    found[n] / scale, p.grad / scale, rtol=1e-3, atol=1e-4, msg=n
                )


def call_of(name: str, model) -> dict:
    """A call with inputs that gradients flow to, as prompts that are learned are given."""
    torch.manual_seed(0)
    ids = torch.randint(2, 100, (2, 9))
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    inputs = {"inputs_embeds": embedded, "attention_mask": torch.ones_like(ids)}
    inputs["labels"] = torch.tensor([0, 1]) if name in ENCODERS else ids
    if name in SLIDING:
        inputs["use_cache"] = False
    return inputs


@pytest.mark.parametrize("name", SOME)
def test_gradients_of_inputs_equal_eager_s(name):
    with rm.init("cpu"):
        model = build(name)
        rm.accelerate(model)
        for parameter in model.parameters():  # frozen, as where prompts are learned
            parameter.requires_grad_(False)
        inputs = call_of(name, model)
        for _ in range(3):
            model(**inputs)
        before = routed_calls(model)
        loss = model(**inputs).loss
        assert routed_calls(model) == before + 1, rm.explain()
        (found,) = torch.autograd.grad(loss, inputs["inputs_embeds"])
        with rm.disabled():
            (expected,) = torch.autograd.grad(model(**inputs).loss, inputs["inputs_embeds"])
        scale = float(expected.abs().max())
        assert scale > 0
        torch.testing.assert_close(found / scale, expected / scale, rtol=1e-3, atol=1e-4)


def fine_tuned(name: str) -> dict[str, torch.Tensor]:
    """The state after three steps in training mode, with dropout, and an evaluation in between."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(2)
    for _ in range(3):
        ids = torch.randint(2, 100, (2, 9))
        labels = torch.tensor([0, 1]) if name in ENCODERS else ids
        model.train()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(input_ids=ids)
    return {"loss": loss.detach(), **model.state_dict()}


@pytest.mark.parametrize("name", SOME)
def test_fine_tuning_is_eager_s_bit_by_bit(name):
    expected = fine_tuned(name)
    with rm.init("cpu"):
        found = fine_tuned(name)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
