"""Whether a row of common buffers gets its own positions from a model that is not told them.

Rows end at one place, so the texts of shorter ones begin behind hidden places. A model that takes
no positions counts by the mask (Bloom) or by all places that the cache holds (BART's decoder alone,
RoFormer). With the latter a text would depend on how long its neighbours are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rm_abstract.base.scope import disabled_var
from rm_abstract.generation.rows import Calls, Rows

_SHORT, _LONG = 3, 11  # tokens of the rows that are tried
# Relative to the largest logit: of other lengths of sums in float32, and of a half type's last bit.
_ROUNDING, _HALF_ROUNDING = 32 * torch.finfo(torch.float32).eps, 2.0


class _Tried:
    """Implements rows.Row for one step."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.last: int | None = prompt[-1]
        self.position, self.ended = len(prompt) - 1, False
        self.logits = torch.zeros(0)

    def left(self) -> int:
        return 1

    def accept(self, logits: Callable[[], torch.Tensor], largest: int) -> None:
        self.logits = logits().clone()

    def failed(self, error: Exception) -> None:
        raise error


def rows_count_their_own(calls: Calls, vocabulary: int) -> bool:
    """Whether a short row has the same logits beside a longer one as alone. False as well where the
    model refuses these tokens: then nothing is known. The original is asked, not a program."""
    texts = [[n % vocabulary for n in range(1, 1 + length)] for length in (_SHORT, _LONG)]
    token = disabled_var.set("compiling")
    try:
        with torch.no_grad():
            alone, beside = _logits(calls, texts[:1]), _logits(calls, texts)
    except Exception:  # of any model
        return False
    finally:
        disabled_var.reset(token)
    kind = calls.new_cache().expected[0][3]
    near = max(_ROUNDING, _HALF_ROUNDING * torch.finfo(kind).eps) * float(alone.abs().max())
    return bool((alone - beside).abs().max() <= near)


def _logits(calls: Calls, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """``[vocabulary]``: of the first text's last token, in a step shared with the others."""
    rows = Rows(calls)
    tried = [_Tried(text) for text in texts]
    for text, row in zip(texts, tried, strict=True):
        cache, count = calls.new_cache(), len(text) - 1
        positions, mask = torch.arange(count)[None], torch.ones(1, count, dtype=torch.long)
        calls.logits(torch.tensor([text[:-1]]), positions, mask, cache)
        rows.join(row, cache)
    rows.step().accept()
    return tried[0].logits
