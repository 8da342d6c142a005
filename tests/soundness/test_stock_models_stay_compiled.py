"""Denying by default must not cost the ordinary case: models of libraries and plain user modules,
without an edit, are served by programs.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from soundness import X, quiet, report, routed
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTModel,
)

GAIN = 2.0
IDS = torch.arange(12).reshape(2, 6)
SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def bert() -> nn.Module:
    return BertModel(BertConfig(**SMALL, intermediate_size=16))


def distilbert() -> nn.Module:
    return DistilBertModel(DistilBertConfig(vocab_size=64, dim=16, n_layers=2, n_heads=2))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=16))


def vit() -> nn.Module:
    small = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    return ViTModel(ViTConfig(**small, intermediate_size=16, image_size=16, patch_size=8))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.activation = F.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


@dataclass
class Options:
    scale: float = 2.0
    names: list[str] = field(default_factory=lambda: ["a", "b"])


class Configured(nn.Module):
    """A module of a careful user: options, a table, a lock, helpers, a property."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.options = Options()
        self.table = {"gain": 3.0, "sizes": (8, 8)}
        self.pattern = re.compile("a+")
        self.weights = np.ones(8, np.float32)
        self.lock = threading.Lock()
        self.act = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    @property
    def gain(self) -> float:
        return float(self.table["gain"]) * GAIN

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            y = self.act(self.normed(self.inner(x))) * self.gain
        y = y * len([n for n in self.options.names if self.pattern.match(n)])
        return scaled(y.view(x.shape[0], -1), self.options) + math_of(y)


def scaled(x: torch.Tensor, options: Options) -> torch.Tensor:
    return x * options.scale if isinstance(options.scale, float) else x


def math_of(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.softmax(-1), torch.sigmoid(x)]).sum(0)


class UsesGetattr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i in range(3):
            setattr(self, f"layer{i}", nn.Linear(8, 8))
        self.act_name = "relu"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            x = getattr(torch, self.act_name)(getattr(self, f"layer{i}")(x))
        return x


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.SiLU())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = {"features": self.conv(x.view(1, 4, -1))}
        out.update(mean=out["features"].mean(dim=-1))
        return out


CASES: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (bert, {"input_ids": IDS}),
    (distilbert, {"input_ids": IDS}),
    (gpt2, {"input_ids": IDS, "use_cache": False}),
    (llama, {"input_ids": IDS, "use_cache": False}),
    (vit, {"pixel_values": torch.ones(2, 3, 16, 16)}),
    (Mlp, {"x": X}),
    (Configured, {"x": X}),
    (UsesGetattr, {"x": X}),
    (Convolutions, {"x": X}),
]


@pytest.mark.parametrize(("make", "kwargs"), CASES, ids=lambda v: getattr(v, "__name__", ""))
def test_a_model_that_nobody_edits_is_served_by_its_program(
    make: Callable[[], nn.Module], kwargs: dict[str, Any]
) -> None:
    import rm_abstract as rm

    model = make().eval()
    rm.accelerate(model)
    for _ in range(4):
        quiet(lambda: model(**kwargs))
    assert routed(model) == 3, report(model)
