"""Tiny random causal language models, saved to a folder and loaded from it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import transformers as hf

# vLLM's attention on the CPU wants heads of 32.
TOKENS = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
ROPE = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "max_position_embeddings": 256,
    **TOKENS,
}
GPT = {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 256, **TOKENS}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", ROPE),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", ROPE),
}


def saved(family: str, folder: Path, seed: int) -> Path:
    """The folder of a new model with weights that lead to varied tokens."""
    model_class, config_class, options = FAMILIES[family]
    torch.manual_seed(seed)
    model = getattr(hf, model_class)(getattr(hf, config_class)(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    model.save_pretrained(folder)
    return folder


def prompts(rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Rows of several lengths, padded on the left."""
    draws = torch.Generator().manual_seed(seed)
    lengths = [3 + int(torch.randint(0, 12, (1,), generator=draws)) for _ in range(rows)]
    width = max(lengths)
    ids = torch.zeros(rows, width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(2, 128, (length,), generator=draws)
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


class KillsAtTheFifthToken:
    """A streamer: whatever a generation's speed, its worker is killed in the middle of it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.steps, self.killed = pid, -1, 0.0  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self.steps += 1
        if self.steps >= 5 and not self.killed:
            os.kill(self.pid, signal.SIGKILL)
            self.killed = time.monotonic()

    def end(self) -> None:
        pass
