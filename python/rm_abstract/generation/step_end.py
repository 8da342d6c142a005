"""What follows from the tokens of a step on a GPU: a launch of our own, or torch's."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


@functools.cache
def _advance() -> Any:
    try:
        module = importlib.import_module("rm_abstract.ops._ops_sampling")
    except ImportError:  # a build without CUDA
        return None
    return getattr(module, "advance", None)


def end_step(
    tokens: torch.Tensor,
    found: torch.Tensor,
    length: torch.Tensor,
    positions: torch.Tensor | None,
    open_: torch.Tensor,
    eos: torch.Tensor | None,
    pad: torch.Tensor | None,
    mask: torch.Tensor | None = None,
) -> None:
    """`tokens` ``[rows]``, int64, become row `length` of `found` ``[places, rows]``; `length` (one
    element) and `positions` grow by one.

    With `eos` ``[ends]`` rows that are not `open_` ``[rows]`` get `pad` (one element) where it is
    given, and rows whose token is one of `eos` are not open any more. `mask` ``[rows, columns]``,
    int64, becomes 1 in column `length`, where the next step's key goes, if it has that column.
    """
    one = pad is None or pad.numel() == 1
    advance = _advance() if tokens.is_cuda and one else None
    if advance is not None:
        given = {"found": found, "length": length, "positions": positions, "mask": mask}
        if eos is not None:
            given |= {"open": open_, "eos": eos, "pad": pad}
        advance(tokens, **given, stream=torch.cuda.current_stream(tokens.device).cuda_stream)
        return
    if eos is not None:
        if pad is not None:
            tokens.copy_(torch.where(open_, tokens, pad))
        open_.logical_and_((tokens[:, None] != eos).all(dim=1))
    found.index_copy_(0, length.view(1), tokens[None])
    length.add_(1)
    if positions is not None:
        positions.add_(1)
    if mask is not None:  # the column in front, which is 1, where there is no other
        column = length.view(1, 1).clamp(max=mask.shape[1] - 1).expand(mask.shape[0], 1)
        mask.scatter_(1, column, 1)
