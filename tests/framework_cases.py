"""What tests of the small framework share, on every backend: a case for each function, a network of
every layer, a step that trains it, optimisers beside torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import rm_abstract as rm
from rm_abstract import functional as F
from rm_abstract import nn, optim
from rm_abstract.framework.random import Generator

IDS = torch.tensor([[1, 3], [0, 3]])
MASK = torch.tensor([[True, False, True], [True, True, False]])
Case = tuple[str, Callable[..., Any], tuple[tuple[int, ...], ...]]
_UNARY = "relu gelu silu sigmoid tanh softplus exp sin cos erf abs softmax log_softmax".split()


def _running(like: Any) -> tuple[Any, Any]:
    """Mean and variance of channels, of the type of [N,C,*]."""
    return (
        rm.Tensor(torch.full((like.shape[1],), 0.2, dtype=like.dtype)),
        rm.Tensor(torch.full((like.shape[1],), 0.7, dtype=like.dtype)),
    )


CASES: list[Case] = [
    *((name, getattr(F, name), ((2, 3),)) for name in _UNARY),
    ("gelu", lambda x: F.gelu(x, "tanh"), ((5,),)),
    ("log", lambda x: F.log(x * x + 0.5), ((2, 3),)),
    ("sqrt", lambda x: F.sqrt(x * x + 0.5), ((2, 3),)),
    ("maximum", F.maximum, ((2, 3), (3,))),
    ("minimum", F.minimum, ((2, 3), (2, 1))),
    ("where", lambda a, b: F.where(rm.Tensor(MASK), a, b), ((2, 3), (3,))),
    ("where", lambda a: F.where(rm.Tensor(MASK), 0.5, a), ((2, 3),)),
    ("matmul", F.matmul, ((2, 3, 4), (4, 2))),
    ("linear", F.linear, ((2, 2, 3), (4, 3), (4,))),
    ("linear", F.linear, ((2, 3), (4, 3))),
    (
        "scaled_dot_product_attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ((1, 4, 3, 2), (1, 2, 3, 2), (1, 2, 3, 3)),
    ),
    (
        "scaled_dot_product_attention",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=0.7),
        ((1, 2, 3, 2), (1, 2, 4, 2), (1, 2, 4, 2), (3, 4)),
    ),
    (
        "conv2d",
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
        ((2, 2, 5, 4), (3, 2, 3, 3), (3,)),
    ),
    (
        "conv2d",
        lambda x, w: F.conv2d(x, w, groups=2, dilation=2),
        ((1, 4, 5, 6), (2, 2, 2, 2)),
    ),
    ("avg_pool2d", lambda x: F.avg_pool2d(x, 2), ((1, 2, 4, 2),)),
    ("max_pool2d", lambda x: F.max_pool2d(x, 2), ((1, 2, 4, 2),)),
    ("layer_norm", F.layer_norm, ((2, 5), (5,), (5,))),
    ("rms_norm", F.rms_norm, ((2, 5), (5,))),
    (
        "batch_norm",
        lambda x, w, b: F.batch_norm(x, *_running(x), w, b, training=True),
        ((3, 2, 2), (2,), (2,)),
    ),
    ("batch_norm", lambda x: F.batch_norm(x, *_running(x)), ((3, 2, 2),)),
    ("dropout", lambda x: F.dropout(x, 0.4, generator=Generator(3)), ((4, 5),)),
    ("embedding", lambda t: F.embedding(rm.Tensor(IDS), t), ((4, 3),)),
    ("concat", lambda a, b: F.concat([a, b], 1), ((2, 3), (2, 1))),
    ("stack", lambda a, b: F.stack([a, b], 1), ((2, 3), (2, 3))),
    ("cross_entropy", lambda x: F.cross_entropy(x, rm.Tensor(IDS)), ((2, 2, 4),)),
    (
        "cross_entropy",
        lambda x: F.cross_entropy(x, rm.Tensor(IDS), label_smoothing=0.2, ignore_index=3),
        ((2, 2, 4),),
    ),
    ("mse_loss", F.mse_loss, ((2, 3), (2, 3))),
    ("l1_loss", F.l1_loss, ((2, 3), (2, 3))),
    ("huber_loss", lambda a, b: F.huber_loss(a, b, 0.5), ((2, 3), (2, 3))),
    (
        "binary_cross_entropy_with_logits",
        lambda a, b: F.binary_cross_entropy_with_logits(a, F.sigmoid(b)),
        ((2, 3), (2, 3)),
    ),
    ("kl_div", lambda a, b: F.kl_div(F.log_softmax(a), F.softmax(b)), ((2, 3), (2, 3))),
    # Methods.
    ("", lambda a, b: (a + b) * 2.0 - b / (a * a + 1.0) - (1.0 - a), ((2, 3), (3,))),
    ("", lambda a: (a * a + 1.0) ** 1.5, ((4,),)),
    ("", lambda a: 1.0 / (a * a + 1.0) @ -a.T, ((2, 3),)),
    ("", lambda a: a.reshape(3, -1).permute(1, 0)[None, ..., 1:] * 3.0, ((2, 6),)),
    ("", lambda a: a[1:, ::2, -1] + a[0, 0, 0], ((3, 3, 2),)),
    ("", lambda a: a[:, rm.Tensor(IDS)], ((2, 4, 2),)),
    ("", lambda a: a.expand(2, 3, 4).transpose(0, -1).sum((0, 1)), ((3, 1),)),
    ("", lambda a: a.mean(1, keepdim=True) * a.max(0) - a.min(), ((2, 3),)),
    ("", lambda a: a.to(torch.float16).to(a.dtype) * 0.0 + a, ((3,),)),
]


class Net(nn.Module):
    """Something of every layer."""

    def __init__(self) -> None:
        self.table = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.norms = [nn.LayerNorm(8), nn.RMSNorm(8)]
        self.image = nn.Conv2d(1, 2, 3, padding=1)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, ids: Any) -> Any:
        x = self.table(ids)
        x = x + self.attention(self.norms[0](x), is_causal=True)
        b, s, n = x.shape
        x = x + self.image(x.reshape(b, 1, s, n)).mean(1)
        return self.head(self.norms[1](x))


OPTIMIZERS: list[tuple[Any, Any, dict[str, Any]]] = [
    (optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    (
        optim.SGD,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    (optim.Adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.AdamW, torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9)}),
]


def make_step(net: nn.Module, optimizer: Any) -> Callable[..., Any]:
    def step(ids: Any, target: Any) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(ids), target)
        loss.backward()
        optimizer.step()
        return loss

    return step
