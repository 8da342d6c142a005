"""The first largest of every row of logits; on a GPU by the kernel that reads a row in parallel."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

_MOST = 262144  # logits a row that the kernel takes


@functools.cache
def _sampling() -> Any:
    try:
        return importlib.import_module("rm_abstract.ops._ops_sampling")
    except ImportError:  # a build without CUDA
        return None


def largest(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``[rows]`` of ``[rows, vocabulary]``, as ``argmax``; in `out`, dense int64, where given."""
    module = _sampling() if logits.is_cuda else None
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    fits = logits.stride(1) == 1 and 0 < logits.shape[1] <= _MOST and logits.dtype in kinds
    if module is None or not fits or not logits.shape[0]:
        found = logits.argmax(dim=-1)
        return found if out is None else out.copy_(found)
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.long, device=logits.device)
    stream = torch.cuda.current_stream(logits.device).cuda_stream
    module.forward(logits.detach(), tokens=out, temperature=0.0, stream=stream)
    return out
