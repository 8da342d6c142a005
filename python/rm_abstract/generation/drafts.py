"""Prompt-lookup decoding: drafts from what the text said before, checked several tokens at a time.

The core finds drafts, learns whether checking them pays and runs the checks
(src/generation/draft_check.hpp); here the program that checks is captured, when drafts would have
saved what that costs. It is the model itself over several tokens, giving the logits of each. A
generation does not wait for it: where that is possible another process captures it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rm_abstract import _core
from rm_abstract.kv.names import NAMES

if TYPE_CHECKING:
    from rm_abstract.base.decline import Pending
    from rm_abstract.engines.gate import Gate
    from rm_abstract.generation.greedy_step import GreedyStep

_WIDENED = {"input_ids", "position_ids", "attention_mask", "use_cache", "logits_to_keep", *NAMES}
WIDTHS = (4, 8)  # tokens of a check: the last one and the draft
_TIE = 1e-4  # of the largest logit, in float32; ten times what sums in another order change
_ROUNDINGS = 8  # the same in lower precisions, in roundings of theirs


class Drafts:
    """What one model's generations know about drafts."""

    def __init__(self, mode: str) -> None:
        self.mode = mode  # the option prompt_lookup
        self.policy = _core.DraftPolicy(mode == "always")
        self.refused = False  # no program gives the logits of several tokens
        self.awaited = False  # another process makes that program

    def wait_for(self, pending: Pending) -> None:
        """No checks are asked for until ``pending`` is settled."""
        self.awaited = True

        def arrived() -> None:
            self.awaited = False

        pending.then(arrived)

    def margin(self, gate: Gate, step: GreedyStep) -> float | None:
        """A smaller lead of the best logit is a tie; None where drafts are not wanted.

        Rows of one product may round otherwise than a row alone. In float32 that decides only what
        is a tie anyway; in lower precisions a text may come out different at near ties.
        """
        if self.mode == "off" or self.refused:
            return None
        precision = gate.working_precision(step.variant.record, step.tensors)
        quantised = bool(step.variant.quantised)
        if precision == torch.float32 and not quantised:
            return _TIE
        if self.mode == "auto":
            return None
        rounding = torch.finfo(torch.bfloat16 if quantised else precision).eps
        return _ROUNDINGS * rounding

    def counts(self) -> dict[str, Any]:
        """checks, drafted and accepted tokens, step_us, check_us."""
        return dict(self.policy.counts())


def widened(inputs: dict[str, Any], width: int) -> dict[str, Any]:
    """The arguments of a step of one row as a call over `width` tokens with the logits of each.

    The tokens after the first are to be replaced by a draft.
    """
    out = {name: value for name, value in inputs.items() if name != "logits_to_keep"}
    out["input_ids"] = inputs["input_ids"].repeat(1, width)
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if positions is not None:
        out["position_ids"] = positions + torch.arange(width)
    if mask is not None:
        more = mask.new_ones(mask.shape[0], width - 1)
        out["attention_mask"] = torch.cat([mask, more], dim=-1)
    return out


def can_widen(inputs: dict[str, Any]) -> bool:
    """One token of one row, nothing else of that token, and a mask of the usual kind if any."""
    if not set(inputs) <= _WIDENED:
        return False
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    positions = inputs.get("position_ids")
    one = ids is not None and tuple(ids.shape) == (1, 1)
    plain = positions is None or tuple(positions.shape) == (1, 1)
    return one and plain and (mask is None or mask.dim() == 2)
