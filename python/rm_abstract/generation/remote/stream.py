"""A generation that another process computes, with transformers' meaning of every token.

Each row is one request of the engine, so rows go at their own pace; here they are put together
step by step again: criteria, streamers and padding see what they would see in transformers' loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from rm_abstract.base.errors import ExecutionError
from rm_abstract.generation.remote.process import Ticket
from rm_abstract.generation.request import GenerationRequest

_SILENT = ("MaxLengthCriteria", "EosTokenCriteria")


class Source(Protocol):
    """Where the rows of one generation come from."""

    step_timeout_s: float  # for the next token of a row

    def open(self) -> list[Ticket]:
        """Starts one request a row. Raises Error."""

    def cancel(self, tickets: list[Ticket]) -> None:
        """Nobody wants more of these rows."""

    def close(self, tickets: list[Ticket], undone: list[Ticket], tokens: int, well: bool) -> None:
        """The generation ended; ``undone`` rows are to be cancelled, ``well``: as it should."""


def tokens_of(message: Mapping[str, Any], vocabulary: int) -> list[int]:
    """The tokens of an engine's message. Raises ExecutionError (RM331) for what the model does not
    have: its ids go to the user's tokenizer and back into the model."""
    for token in message["tokens"]:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ExecutionError(
                f"[generate] expected tokens below {vocabulary} from the engine, got {token!r:.40}",
                code="RM331",
            )
    return list(message["tokens"])


class _Row:
    def __init__(self, ticket: Ticket, vocabulary: int, limit_s: float) -> None:
        self.ticket = ticket
        self._vocabulary, self._limit_s = vocabulary, limit_s
        self._tokens: deque[int] = deque()
        self.done = False  # the engine has sent its last token

    def token(self) -> int:
        """The next token, waited for. Raises ExecutionError."""
        while not self._tokens:
            if self.done:
                raise ExecutionError(
                    "[generate] expected the engine to go on, got the end of a row before any "
                    "criterion was met",
                    code="RM331",
                )
            message = self.ticket.within(self._limit_s)
            self._tokens.extend(tokens_of(message, self._vocabulary))
            self.done = bool(message["done"])
        return self._tokens.popleft()


class RemoteStream:
    """Implements engine.TokenStream."""

    def __init__(self, request: GenerationRequest, source: Source) -> None:
        self._request, self._source = request, source
        self._prompt = request.input_ids
        self._new: list[list[int]] = []  # by step, then by row
        self._criteria = request.criteria
        self._silent = all(type(c).__name__ in _SILENT for c in self._criteria)
        self._eos: set[int] = set()
        self._length = 2**62
        for criterion in self._criteria:
            if type(criterion).__name__ == "EosTokenCriteria":
                self._eos.update(criterion.eos_token_id.reshape(-1).tolist())
            elif type(criterion).__name__ == "MaxLengthCriteria":
                self._length = min(self._length, int(criterion.max_length))
        # Without an end-of-sequence token, rows that a criterion ended go on until all did.
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in self._criteria)
        pad = request.config._pad_token_tensor
        self._pad = int(pad) if self._pads and pad is not None else 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        streamer = self._request.streamer
        size = int(self._request.model.config.get_text_config().vocab_size)
        limit_s = self._source.step_timeout_s
        rows = [_Row(ticket, size, limit_s) for ticket in self._source.open()]
        ended = [False] * len(rows)
        try:
            while not all(ended):
                step = [
                    self._pad if over and self._pads else row.token()
                    for row, over in zip(rows, ended, strict=True)
                ]
                self._new.append(step)
                before = ended
                ended = [a or b for a, b in zip(ended, self._judge(step), strict=True)]
                if streamer is not None:
                    streamer.put(torch.tensor(step))
                yield torch.tensor(step)[:, None]
                late = [
                    row.ticket
                    for row, was, now in zip(rows, before, ended, strict=True)
                    if now and not was and not row.done
                ]
                if late and self._pads:
                    self._source.cancel(late)
        finally:
            undone = [row.ticket for row in rows if not row.done]
            tokens = len(self._new) * len(rows)
            self._source.close([row.ticket for row in rows], undone, tokens, all(ended))
        if streamer is not None:
            streamer.end()

    def result(self) -> torch.Tensor:
        """Ids ``[rows, prompt and new tokens]``, int64."""
        if not self._new:
            return self._prompt
        new = torch.tensor(self._new, dtype=self._prompt.dtype, device=self._prompt.device)
        return torch.cat([self._prompt, new.T], dim=-1)

    def _judge(self, step: list[int]) -> list[bool]:
        if self._silent:
            full = self._prompt.shape[1] + len(self._new) >= self._length
            return [full or token in self._eos for token in step]
        return [bool(over) for over in self._criteria(self.result(), None).tolist()]
