"""Tokens of a model on a GPU without waiting for any: the host reads them when many are chosen.

A step's token goes from the program's logits into the next step's input on the device. Whether
all rows have ended is asked some steps late; the steps behind the end are then taken back: their
tokens, their places in the cache and what they drew from the generator.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from rm_abstract.generation.largest import largest

if TYPE_CHECKING:
    from rm_abstract.generation.greedy_step import GreedyStep
    from rm_abstract.generation.step_graph import StepGraph

_ASK = 4  # steps between two questions whether all rows have ended
_LEAD = 32  # steps that the host may be ahead of the device
_RECORDED = 2  # steps from which on a recording is worth asking for
# Processors that compute from their arguments alone: a step that is taken back leaves nothing.
_STATELESS = frozenset(
    "MinLength MinNewTokensLength Temperature TopK TopP MinP Typical EpsilonCutoff EtaCutoff "
    "RepetitionPenalty NoRepeatNGram NoBadWords SequenceBias SuppressTokens SuppressTokensAtBegin "
    "ForcedBOSToken ForcedEOSToken InfNanRemove LogitNormalization ExponentialDecayLengthPenalty"
    "".split()
)
_MODULE = "transformers.generation.logits_process"


def forgets(processors: Any) -> bool:
    """Whether calling these processors for a step that is taken back changes nothing."""
    for processor in processors:
        kind = type(processor)
        name = kind.__name__
        for ending in ("LogitsProcessor", "LogitsWarper", "Logits", "Processor"):
            name = name.removesuffix(ending)
        if kind.__module__ != _MODULE or name not in _STATELESS:
            return False
    return True


class Ahead:
    """Steps of one generation. `ids` ``[rows, n]`` are the rows so far, on the step's device.

    `eos`: the tokens that end a row; empty when none does. `pad`: what ended rows get, where they
    get anything. `finished`: the rows that ended before.
    """

    def __init__(
        self,
        step: GreedyStep,
        ids: torch.Tensor,
        eos: list[int],
        pad: torch.Tensor | None,
        finished: list[bool],
    ) -> None:
        self._step, self._ids, self._pad = step, ids, pad
        device = ids.device
        self._ends = sorted(eos)
        self._eos = torch.tensor(self._ends, device=device) if eos else None
        self._began = ~torch.tensor(finished, device=device)
        self._open = self._began  # rows that go on
        self._generator = (
            torch.cuda.default_generators[device.index or 0]
            if device.type == "cuda"
            else torch.default_generator
        )
        self._queries: deque[tuple[_Mark, torch.Tensor]] = deque()
        self._paced: deque[_Mark] = deque()

    def run(self, steps: int, processors: Any, sample: bool) -> torch.Tensor:
        """The rows' next tokens ``[rows, m]``, m at most `steps`: fewer when all rows ended.

        Raises what a run of the program or a processor raises; the cache then holds whole steps.
        """
        if not sample and not len(processors) and self._ids.is_cuda and steps >= _RECORDED:
            recording = self._step.recording(self._ends, self._pad, steps)
            if recording is not None:
                return self._replay(recording, steps)
        chosen: list[torch.Tensor] = []
        drawn: list[torch.Tensor] = []  # the generator behind each step
        tokens = self._ids[:, -1]
        for number in range(1, steps + 1):
            tokens = self._choose(self._step.one_ahead(tokens)[:, -1], processors, sample)
            chosen.append(tokens)
            if sample and self._eos is not None:
                drawn.append(self._generator.get_state())
            if self._eos is not None and number % _ASK == 0 and self._all_ended():
                break
            self._keep_pace()
        found = self._kept(torch.stack(chosen, dim=1))
        if sample and found.shape[1] < len(chosen):
            self._generator.set_state(drawn[found.shape[1] - 1])
        return found

    def _replay(self, recording: StepGraph, steps: int) -> torch.Tensor:
        """`run` of greedy steps, a launch each."""
        start = self._step.length()
        recording.enter(self._step.tensors, self._ids[:, -1], self._open, self._pad)
        self._open = recording.open
        number = 0
        try:
            for number in range(1, steps + 1):
                recording.replay()
                if number % _ASK:
                    continue
                if self._eos is not None and self._all_ended():
                    break
                self._keep_pace(_LEAD // _ASK)
        finally:
            found = recording.leave(self._step.tensors, start, number)
            self._step.replayed(recording, number)
        return self._kept(found)

    def _kept(self, found: torch.Tensor) -> torch.Tensor:
        """What of the tokens counts; steps behind that are taken back. Waits for all of them."""
        kept = self._length_of(found)
        if kept < found.shape[1]:
            self._step.rewind(found.shape[1] - kept)
        return found[:, :kept]

    def _choose(self, logits: torch.Tensor, processors: Any, sample: bool) -> torch.Tensor:
        if not sample and not len(processors):
            tokens = largest(logits)
        else:
            scores = processors(self._ids, logits.to(copy=True, dtype=torch.float32))
            if sample:
                chances = torch.nn.functional.softmax(scores, dim=-1)
                tokens = torch.multinomial(chances, num_samples=1).squeeze(1)
            else:
                tokens = torch.argmax(scores, dim=-1)
        if self._eos is not None:
            if self._pad is not None:
                tokens = torch.where(self._open, tokens, self._pad)
            self._open = self._open & (tokens[:, None] != self._eos).all(dim=1)
        if len(processors):
            self._ids = torch.cat([self._ids, tokens[:, None]], dim=-1)
        return tokens

    def _all_ended(self) -> bool:
        """As of some steps ago."""
        answer = self._open.any()
        if answer.is_cuda:
            pinned = torch.empty((), dtype=torch.bool, pin_memory=True)
            answer = pinned.copy_(answer, non_blocking=True)
        self._queries.append((_Mark(self._ids.device), answer))
        while self._queries and self._queries[0][0].passed():
            if not bool(self._queries.popleft()[1]):
                return True
        return False

    def _keep_pace(self, lead: int = _LEAD) -> None:
        self._paced.append(_Mark(self._ids.device))
        if len(self._paced) > lead:
            self._paced.popleft().wait()

    def _length_of(self, found: torch.Tensor) -> int:
        """Tokens up to and with the one that ended the last row. Waits for all of them."""
        steps = found.shape[1]
        if self._eos is None:
            return steps
        ends = (found[:, :, None] == self._eos).any(dim=2)
        first = torch.where(ends.any(dim=1), ends.int().argmax(dim=1), steps)
        first = torch.where(self._began, first, -1)
        return min(int(first.max()) + 1, steps)


class _Mark:
    """A place in the work of the current stream; on the host everything is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            events: Any = torch.cuda
            self._event = events.Event()
        if self._event is not None:
            self._event.record()

    def passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
