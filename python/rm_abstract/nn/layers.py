"""Layers. Initial values are torch's: uniform in ±1/sqrt(inputs) for products, normal for tables,
drawn from torch's default generator."""

from __future__ import annotations

import math

import torch

from rm_abstract import functional
from rm_abstract.framework.tensor import Tensor
from rm_abstract.nn.module import Module, Parameter


def _uniform(*shape: int, inputs: int) -> Parameter:
    bound = 1.0 / math.sqrt(inputs)
    return Parameter(torch.empty(shape).uniform_(-bound, bound))


class Linear(Module):
    """[*,K] -> [*,N]. ``weight`` [N,K], ``bias`` [N] or None."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        self.weight = _uniform(outputs, inputs, inputs=inputs)
        self.bias = _uniform(outputs, inputs=inputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Conv2d(Module):
    """[N,C,H,W] -> [N,K,H',W']. ``weight`` [K,C/groups,size,size], ``bias`` [K] or None."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        self.stride, self.padding, self.groups = stride, padding, groups
        count = inputs // groups * size * size
        self.weight = _uniform(outputs, inputs // groups, size, size, inputs=count)
        self.bias = _uniform(outputs, inputs=count) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(
            x,
            self.weight,
            self.bias,
            stride=self.stride,
            padding=self.padding,
            groups=self.groups,
        )


class LayerNorm(Module):
    """Mean 0 and variance 1 over the last axis, of this size."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        self.weight, self.bias = Parameter(torch.ones(size)), Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """Mean square 1 over the last axis, of this size."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        self.weight = Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight, self.eps)


class BatchNorm2d(Module):
    """[N,C,H,W]; ``running_mean`` and ``running_var`` [C] move in training and serve otherwise."""

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        self.weight, self.bias = Parameter(torch.ones(channels)), Parameter(torch.zeros(channels))
        self.running_mean = Tensor(torch.zeros(channels))
        self.running_var = Tensor(torch.ones(channels))
        self.eps, self.momentum = eps, momentum

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
        )


class Dropout(Module):
    """Zeros with probability ``p`` in training."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.p, self.training)


class Embedding(Module):
    """ids [*] -> [*,N]. ``weight`` [V,N]."""

    def __init__(self, count: int, size: int) -> None:
        self.weight = Parameter(torch.randn(count, size))

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight)


class MultiheadAttention(Module):
    """Self-attention, [B,S,N] -> [B,S,N]; the number of heads divides N.

    ``mask`` as in `functional.scaled_dot_product_attention`. Raises ValueError for other heads.
    """

    def __init__(self, size: int, heads: int, bias: bool = True) -> None:
        if size % heads:
            raise ValueError(f"[MultiheadAttention] expected heads that divide {size}, got {heads}")
        self.heads = heads
        self.project = Linear(size, 3 * size, bias)
        self.out = Linear(size, size, bias)

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        b, s, n = x.shape
        qkv = self.project(x).reshape(b, s, 3, self.heads, n // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(
            qkv[0], qkv[1], qkv[2], mask, is_causal=is_causal
        )
        return self.out(y.permute(0, 2, 1, 3).reshape(b, s, n))  # type: ignore[no-any-return]


class ReLU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x)


class GELU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x)


class SiLU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(x)


class Tanh(Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.tanh(x)
