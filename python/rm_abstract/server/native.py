"""This package's engines behind the server: the scheduler for text, encoders for embeddings."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rm_abstract.generation.jobs import End, Job, Sampling, Token
from rm_abstract.generation.model_calls import no_program
from rm_abstract.generation.scheduler import Limits, Scheduler
from rm_abstract.generation.served import ServedModel
from rm_abstract.hooks.attaching import router_of
from rm_abstract.server.errors import ApiError


class NativeText:
    """Implements engine.TextEngine with the scheduler."""

    name = "native"

    def __init__(self, model: Any, limits: Limits, context_length: int | None) -> None:
        config = model.config.get_text_config(decoder=True)
        longest = getattr(config, "max_position_embeddings", None)
        known = [n for n in (context_length, longest) if n]
        self.context_length = min(known) if known else 2048
        self.vocabulary = int(config.vocab_size)
        router = router_of(model)
        programs = no_program if router is None else ServedModel(model, router).program
        self._scheduler = Scheduler.of(model, limits, programs)

    def warm(self) -> None:
        """A few tokens, so that the usual programs are compiled before anybody waits for them."""
        for rows in (1, 1, 2, 2):
            ends = [threading.Event() for _ in range(rows)]

            def deliver_to(end: threading.Event) -> Callable[[Token | End], None]:
                return lambda event: end.set() if isinstance(event, End) else None

            greedy = Sampling(temperature=0.0)
            self.submit(
                [
                    Job(
                        [(first + n) % self.vocabulary for n in range(12)],
                        6,
                        deliver_to(end),
                        greedy,
                    )
                    for first, end in enumerate(ends)
                ]
            )
            for end in ends:
                end.wait()

    def submit(self, jobs: Sequence[Job]) -> None:
        self._scheduler.submit(*jobs)

    def cancel(self, job: Job) -> None:
        self._scheduler.cancel(job)

    def facts(self) -> dict[str, Any]:
        return dataclasses.asdict(self._scheduler.counts)

    def fault(self) -> str:
        return self._scheduler.fault()

    def close(self) -> None:
        self._scheduler.close()


class NativeEmbeddings:
    """Implements engine.EmbeddingEngine: mean of the last hidden states, of length one.

    A folder made by sentence-transformers has its own recipe, which counts instead.
    """

    name = "native"

    def __init__(self, model: Any, tokenizer: Any, sentences: bool) -> None:
        self._model, self._tokenizer, self._sentences = model, tokenizer, sentences
        self._lock = threading.Lock()  # tokenizers keep their padding as a state
        self._tokens = 0

    def embed(self, texts: Sequence[str]) -> tuple[list[list[float]], int]:
        with self._lock, torch.no_grad():
            tokens = self._tokenizer(
                list(texts), padding=True, truncation=True, return_tensors="pt"
            )
            lengths = tokens["attention_mask"].sum(-1)
            if not bool((lengths > 0).all()):
                raise ApiError(400, "A text is empty.", param="input")
            count = int(lengths.sum())
            if self._sentences:
                vectors = self._model.encode(list(texts), convert_to_tensor=True)
            else:
                hidden = self._model(**tokens).last_hidden_state
                shown = tokens["attention_mask"][..., None].to(hidden.dtype)
                vectors = (hidden * shown).sum(1) / shown.sum(1).clamp(min=1)
                vectors = torch.nn.functional.normalize(vectors, dim=-1)
            self._tokens += count
            return vectors.float().tolist(), count

    def facts(self) -> dict[str, Any]:
        return {"prompt_tokens": self._tokens}

    def close(self) -> None:
        """Nothing runs between two calls."""
