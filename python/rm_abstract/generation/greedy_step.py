"""One decode step of a program, run singly or by the loop in src/generation/greedy_loop.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rm_abstract import _core
from rm_abstract.engines.variant import OUT_OF_RANGE
from rm_abstract.generation.step_graph import Recordings

if TYPE_CHECKING:
    from rm_abstract.engines.compiled_call import CompiledCall
    from rm_abstract.engines.variant import Variant
    from rm_abstract.generation.step_graph import StepGraph


class Refused(Exception):
    """The program refuses values of a step, which is not made: the original has to judge it."""


class GreedyStep:
    """The tensors of a step in memory of the loop's own; the cache's buffers are the cache's."""

    def __init__(
        self, variant: Variant, tensors: list[torch.Tensor], roles: dict[str, int]
    ) -> None:
        self.variant, self._roles = variant, roles
        program: Any = variant.program
        # Of a model on the CPU whose program runs on a GPU: the call's tensors, until `leave`.
        self._away: list[torch.Tensor] | None = None
        if getattr(program, "is_away", False):
            self._away, tensors = tensors, program.brought(tensors)
        self.tensors = list(tensors)
        # Of rows with positions of their own, where `one` was told those of the last step.
        self._next_positions: list[int] | None = None
        self.wants_checks = False  # the last run ended because checks of drafts would win
        self._checks: list[tuple[Variant, list[torch.Tensor], dict[str, int], int]] = []
        for name, number in roles.items():
            if name != "logits":
                self.tensors[number] = tensors[number].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def serving(
        entry: CompiledCall, leaves: Sequence[Any], width: int = 1, may_be_away: bool = False
    ) -> GreedyStep | None:
        """The program of this generation step; None when there is none that a loop can run.

        With `may_be_away` also one that runs on a GPU for a model on the CPU: its caller says
        `leave` at the end.
        """
        found = entry.decode_step(leaves)
        if found is None or (getattr(found[0].program, "is_away", False) and not may_be_away):
            return None
        return GreedyStep.of(*found, width)

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        return self.tensors[self._roles["ids"]].device

    def leave(self) -> None:
        """The cache holds what the steps appended, also where it does not lie on their device."""
        if self._away is not None:
            program: Any = self.variant.program
            program.bring_back(self.tensors, self._away)

    @staticmethod
    def of(
        variant: Variant, tensors: list[torch.Tensor], roles: dict[str, int], width: int = 1
    ) -> GreedyStep | None:
        """None for a step the loop cannot drive: other types, or not `width` tokens a row."""
        number = variant.output_number("logits")
        ids = tensors[roles["ids"]]
        plain = all(tensors[n].dtype == torch.long for n in roles.values())
        fits = ids.dim() == 2 and ids.shape[1] == width
        positions = tensors[roles["positions"]] if "positions" in roles else ids
        mask = tensors[roles["mask"]] if "mask" in roles else ids
        if number is None or not plain or not fits or positions.shape[-1] != width:
            return None
        # Of a picture's patches a token has several: each is one more for the next token.
        if positions.dim() not in (2, 3) or mask.dim() != 2:
            return None
        return GreedyStep(variant, tensors, {**roles, "logits": number})

    def add_check(self, check: GreedyStep, width: int) -> None:
        """`check` takes `width` tokens of this step's row and gives the logits of each."""
        if set(check._roles) != set(self._roles):
            return
        for name in ("length", "mask"):
            if name in self._roles:
                check.tensors[check._roles[name]] = self.tensors[self._roles[name]]
        self._checks.append((check.variant, check.tensors, check._roles, width))

    @property
    def has_checks(self) -> bool:
        return bool(self._checks)

    def drafting(
        self, policy: _core.DraftPolicy, text: list[int], margin: float, may_want: bool
    ) -> _core.Drafting:
        """Drafts for `run`; `text` is the row so far. `may_want`: `run` may end to have checks.

        Making those takes about as long as making this step's program did.
        """
        making_ns = self.variant.report.compile_ms * 1e6
        drafting = _core.Drafting(policy, text, margin, making_ns, may_want)
        for variant, tensors, roles, width in self._checks:
            program: Any = variant.program
            drafting.add(program, tensors, roles, width)
        return drafting

    def run(
        self,
        steps: int,
        capacity: int,
        eos: list[list[int]],
        pad: int,
        finished: list[bool],
        until_one_ends: bool = False,
        stop: Callable[[], bool] | None = None,
        drafting: _core.Drafting | None = None,
        on_tokens: Callable[[list[int]], int] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """(tokens, row after row of a step; rows that ended). Raises what a run raises, but ends in
        front of a step that the program refuses: the model's next call judges that.

        `eos` has a list a row. `stop` is asked now and then; True ends the loop after a whole step.
        `on_tokens` gets the tokens of every run of one row; it returns -1 to go on, or how many of
        them it accepted to end the loop with those.
        """
        program: Any = self.variant.program
        before, self._next_positions = self.length(), None
        try:
            tokens, ended, self.wants_checks = program.decode_greedy(
                self.tensors,
                self._roles,
                steps,
                capacity,
                eos,
                pad,
                finished,
                until_one_ends,
                stop,
                drafting,
                on_tokens,
            )
        finally:
            self.variant.report.calls += self.length() - before
        return tokens, ended

    def one(
        self, tokens: list[int], positions: list[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """The logits ``[rows, 1, vocabulary]`` after `tokens`, one a row, and the first largest of
        every row: none where they would have to be waited for. `positions` are those of the tokens,
        for programs that have one a row; None: as the step before left them. Raises Refused, and
        what a run raises."""
        program: Any = self.variant.program
        if positions is not None and positions != self._next_positions:
            self._place(positions)
        self._next_positions = None
        try:
            results, largest = program.decode_step(self.tensors, self._roles, tokens)
        except _core.CoreError as error:
            if error.code == OUT_OF_RANGE:
                raise Refused(str(error)) from error
            raise
        self.variant.report.calls += 1
        if positions is not None:
            self._next_positions = [position + 1 for position in positions]
        logits = results[self._roles["logits"]]
        if self._away is not None:  # who chooses is where the model is
            logits = logits.to(self._away[self._roles["ids"]].device)
        return logits, largest

    def _place(self, positions: list[int]) -> None:
        number = self._roles.get("positions")
        if number is not None and self.tensors[number].numel() == len(positions):
            self.tensors[number].copy_(torch.tensor(positions).view_as(self.tensors[number]))

    def hide(self, rows: list[int], at: int) -> None:
        """What was appended to these rows at position `at` is not attended to."""
        number = self._roles.get("mask")
        if number is not None:
            self.tensors[number][rows, at] = 0

    def one_ahead(self, tokens: torch.Tensor) -> torch.Tensor:
        """As `one`, of tokens ``[rows]`` that may not be there yet; for programs on a GPU."""
        program: Any = self.variant.program
        self._next_positions = None
        results, _ = program.decode_step(self.tensors, self._roles, tokens)
        self.variant.report.calls += 1
        logits: torch.Tensor = results[self._roles["logits"]]
        return logits

    def recording(self, eos: list[int], pad: torch.Tensor | None, steps: int) -> StepGraph | None:
        """This step and the choice of its token as one launch; None where there is none yet."""
        program: Any = self.variant.program
        recordings = Recordings.of(program)
        return recordings.acquire(program, self.tensors, self._roles, eos, pad, steps)

    def replayed(self, recording: StepGraph, steps: int) -> None:
        """`recording` made so many steps, and is used no more."""
        program: Any = self.variant.program
        self.variant.report.calls += steps
        Recordings.of(program).give_back(recording)

    def rewind(self, steps: int) -> None:
        """The last `steps` never were. Nothing reads what they wrote; this step runs no more."""
        self.tensors[self._roles["length"]].sub_(steps)

    def length(self) -> int:
        """Positions the cache holds now."""
        return int(self.tensors[self._roles["length"]])
