"""Answers as OpenAI's clients read them: bodies, and chunks of streams."""

from __future__ import annotations

import base64
import json
import struct
import time
import uuid
from collections.abc import Sequence
from typing import Any

from rm_abstract.generation.jobs import Token
from rm_abstract.server.choices import Piece, Usage


def sse(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Answer:
    """One answer, whole or in pieces. Subclasses give a choice its form."""

    prefix, whole, part = "", "", ""
    asks = ""  # the field of a request that has the prompt

    def __init__(self, model: str, tokenizer: Any, logprobs: bool) -> None:
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def body(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        """`pieces` has a list a choice."""
        choices = [self._choice(index, found) for index, found in enumerate(pieces)]
        return {**self._head, "object": self.whole, "choices": choices, "usage": usage.body()}

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {**self._head, "object": self.part, "choices": choices}
        if usage is not None:
            found["usage"] = usage.body()
        return found

    def first(self, index: int) -> dict[str, Any] | None:
        """What a stream says of a choice before its first piece."""
        return None

    def delta(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        raise NotImplementedError

    def _text_of(self, token: int) -> str:
        """A part of a character has no text of its own: its name in the vocabulary then."""
        text = str(self._tokenizer.decode([token]))
        if "\N{REPLACEMENT CHARACTER}" in text:
            return str(self._tokenizer.convert_ids_to_tokens(token))
        return text


class Completion(Answer):
    prefix, whole, part, asks = "cmpl", "text_completion", "text_completion", "prompt"

    def __init__(self, model: str, tokenizer: Any, logprobs: bool) -> None:
        super().__init__(model, tokenizer, logprobs)
        self._offsets: dict[int, int] = {}  # characters of a choice so far

    def delta(self, piece: Piece) -> dict[str, Any]:
        return self._made(piece.index, piece.text, piece.tokens, piece.finish)

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        tokens = [token for piece in pieces for token in piece.tokens]
        return self._made(index, "".join(p.text for p in pieces), tokens, pieces[-1].finish)

    def _made(
        self, index: int, text: str, tokens: Sequence[Token], finish: str | None
    ) -> dict[str, Any]:
        logprobs = self._of(index, tokens) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _of(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        words = [self._text_of(token.id) for token in tokens]
        offsets = []
        for word in words:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(word)
        return {
            "tokens": words,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self._text_of(i): p for i, p in token.top} for token in tokens],
            "text_offset": offsets,
        }


class Chat(Answer):
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"
    asks = "messages"

    def first(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._of(piece.tokens),
            "finish_reason": piece.finish,
        }

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._of([token for piece in pieces for token in piece.tokens]),
            "finish_reason": pieces[-1].finish,
        }

    def _of(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = []
        for token in tokens:
            row = self._probability(token.id, token.logprob)
            content.append({**row, "top_logprobs": [self._probability(*t) for t in token.top]})
        return {"content": content, "refusal": None}

    def _probability(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text_of(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def embeddings(
    model: str, vectors: Sequence[Sequence[float]], tokens: int, as_base64: bool
) -> dict[str, Any]:
    rows = []
    for index, vector in enumerate(vectors):
        packed = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        embedding = packed if as_base64 else list(vector)
        rows.append({"object": "embedding", "index": index, "embedding": embedding})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": model, "data": rows, "usage": usage}
