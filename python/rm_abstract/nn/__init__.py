"""Layers: modules that hold parameters and call `rm_abstract.functional`."""

from rm_abstract.framework.saving import load, save
from rm_abstract.nn.layers import (
    GELU,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    MultiheadAttention,
    ReLU,
    RMSNorm,
    SiLU,
    Tanh,
)
from rm_abstract.nn.module import Module, Parameter, Sequential

__all__ = [
    "GELU",
    "BatchNorm2d",
    "Conv2d",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "MultiheadAttention",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "Sequential",
    "SiLU",
    "Tanh",
    "load",
    "save",
]
