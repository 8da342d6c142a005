"""One decode step of a program, run singly or by the loop in src/engine/greedy_loop.cpp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rm_abstract.engines.variant import Variant


class GreedyStep:
    """The tensors of a step in memory of the loop's own; the cache's buffers are the cache's."""

    def __init__(
        self, variant: Variant, tensors: list[torch.Tensor], roles: dict[str, int]
    ) -> None:
        self._variant, self._roles = variant, roles
        self._tensors = list(tensors)
        for name, number in roles.items():
            if name != "logits":
                self._tensors[number] = tensors[number].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def of(
        variant: Variant, tensors: list[torch.Tensor], roles: dict[str, int]
    ) -> GreedyStep | None:
        """None for a step the loop cannot drive: other types or shapes than one token a row."""
        number = variant.output_number("logits")
        ids = tensors[roles["ids"]]
        plain = all(tensors[n].dtype == torch.long for n in roles.values())
        single = ids.dim() == 2 and ids.shape[1] == 1
        positions = tensors[roles["positions"]] if "positions" in roles else ids
        mask = tensors[roles["mask"]] if "mask" in roles else ids
        if number is None or not plain or not single or positions.shape[-1] != 1:
            return None
        if positions.dim() != 2 or mask.dim() != 2:
            return None
        return GreedyStep(variant, tensors, {**roles, "logits": number})

    def run(
        self,
        steps: int,
        capacity: int,
        eos: list[list[int]],
        pad: int,
        finished: list[bool],
        until_one_ends: bool = False,
        stop: Callable[[], bool] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """(tokens, row after row of a step; rows that ended). Raises what a run raises.

        `eos` has a list a row. `stop` is asked now and then; True ends the loop after a whole step.
        """
        program: Any = self._variant.program
        before = self.length()
        try:
            tokens, ended = program.decode_greedy(
                self._tensors,
                self._roles,
                steps,
                capacity,
                eos,
                pad,
                finished,
                until_one_ends,
                stop,
            )
        finally:
            self._variant.report.calls += self.length() - before
        return tokens, ended

    def one(self, tokens: list[int]) -> torch.Tensor:
        """The logits ``[rows, 1, vocabulary]`` after `tokens`, one a row. Raises as `run`."""
        program: Any = self._variant.program
        results = program.decode_step(self._tensors, self._roles, tokens)
        self._variant.report.calls += 1
        logits: torch.Tensor = results[self._roles["logits"]]
        return logits

    def length(self) -> int:
        """Positions the cache holds now."""
        return int(self._tensors[self._roles["length"]])
