"""`rebel.compile_context`: what several compilations share."""

from __future__ import annotations

import uuid

import torch


class CompileContext:
    """Source: optimum-rbln makes one for a prompt's and a token's program, with
    use_weight_sharing=True, and marks the caches' tensors: those live on the device, are no
    inputs of a run, and are the same memory in every program compiled with this context."""

    def __init__(self, *, use_weight_sharing: bool = False, use_global_ctx: bool = False) -> None:
        self.use_weight_sharing = use_weight_sharing
        self.use_global_ctx = use_global_ctx
        self.static: dict[str, torch.Tensor] = {}
        self.identity = uuid.uuid4().hex

    def mark_static_address(self, tensor: torch.Tensor, name: str) -> None:
        self.static[name] = tensor
