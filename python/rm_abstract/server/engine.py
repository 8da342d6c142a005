"""What the server asks of an engine. Any engine that has these methods can be put behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rm_abstract.generation.jobs import Job


class TextEngine(Protocol):
    """Makes tokens for one model.

    Jobs carry token ids in both directions; text is the server's. `Job.deliver` may be called from
    any thread, and an engine never calls it after the job's End.
    """

    name: str
    context_length: int  # tokens of prompt and answer together
    vocabulary: int

    def submit(self, jobs: Sequence[Job]) -> None:
        """All or none, returning at once. Raises jobs.QueueFull or jobs.Closed."""

    def cancel(self, job: Job) -> None: ...

    def facts(self) -> dict[str, Any]:
        """Counts and sizes for the status page and the metrics (generation.scheduler.Counts)."""

    def fault(self) -> str:
        """Why it takes no more jobs; empty while it does."""

    def close(self) -> None: ...


class EmbeddingEngine(Protocol):
    name: str

    def embed(self, texts: Sequence[str]) -> tuple[list[list[float]], int]:
        """One vector a text and the number of tokens read. Blocks: not for the event loop."""

    def facts(self) -> dict[str, Any]: ...

    def close(self) -> None: ...
