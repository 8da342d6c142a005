"""Transformers architectures called without no_grad: served, with eager's loss and gradients."""

from __future__ import annotations

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
SLIDING = {"mistral", "gemma2"}  # caches of sliding windows are not served as outputs


def build(name: str):
    torch.manual_seed(1)
    if name in ENCODERS:
        model, config = ENCODERS[name]
        return model(config(vocab_size=100, **SMALL)).eval()
    family = FAMILIES[name]
    config = getattr(hf, family.config)(**family.options)
    return getattr(hf, family.model)(config).eval()


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
        route = vars(model)["_compiled_call_impl"].route
        before = route.routed()
        output = model(**inputs)
        assert route.routed() == before + 1, rm.explain()
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
