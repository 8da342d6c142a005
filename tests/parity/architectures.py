"""Tiny random models of several architectures and the calls they are tried with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

Inputs = Callable[[int, int], dict[str, Any]]


def tokens(batch: int, length: int) -> dict[str, Any]:
    """Ids and a mask; the first row is padded on the left when there is room."""
    mask = torch.ones(batch, length, dtype=torch.long)
    if batch > 1 and length > 3:
        mask[0, :2] = 0
    return {"input_ids": torch.randint(2, 100, (batch, length)), "attention_mask": mask}


def pixels(batch: int, _: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


@dataclass
class Architecture:
    build: Callable[[], Any]
    inputs: Inputs = tokens
    fully_native: bool = True


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
TOKENS = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 1}


def gpt2() -> Any:
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_embd=64, n_head=4, **TOKENS))


def llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **SMALL, **TOKENS))


def t5_encoder() -> Any:
    config = hf.T5Config(num_layers=2, d_model=64, d_kv=16, d_ff=128, num_heads=4, vocab_size=100)
    return hf.T5EncoderModel(config)


def vit() -> Any:
    return hf.ViTModel(hf.ViTConfig(image_size=32, patch_size=8, **SMALL))


def resnet() -> Any:
    return hf.ResNetModel(hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]))


ARCHITECTURES = {
    "bert": Architecture(lambda: hf.BertModel(hf.BertConfig(vocab_size=100, **SMALL))),
    "gpt2": Architecture(gpt2),
    "llama": Architecture(llama),
    "t5_encoder": Architecture(t5_encoder),
    "vit": Architecture(vit, pixels),
    "resnet": Architecture(resnet, pixels),
}


def make(name: str, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """A model with weights large enough that an error shows in its output."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[name].build().eval().to(dtype)
    with torch.no_grad():
        for name_, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name_:
                parameter.mul_(2)
    return model
