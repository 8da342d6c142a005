"""What the generations of one model share, and a routed model as the token loop needs it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from rm_abstract.base.config import Settings
from rm_abstract.engines.base import Engine
from rm_abstract.engines.context import Events
from rm_abstract.generation.drafts import Drafts
from rm_abstract.generation.sharing import Sharing

if TYPE_CHECKING:
    from rm_abstract.generation.remote.engine import RemoteEngine


class GenerationState:
    """Lives as long as a model's compiled programs do. Thread safe: its parts are."""

    def __init__(self, settings: Settings, remote: RemoteEngine | None = None) -> None:
        self.remote = remote  # asked first
        self.drafts = Drafts(settings.text("prompt_lookup"))
        self.sharing = Sharing() if settings.flag("batch_threads") else None

        self._declined: Counter[str] = Counter()
        self._lock = threading.Lock()

    def decline(self, why: str) -> None:
        """A call of generate goes to transformers' own loop, which calls the routed model."""
        with self._lock:
            self._declined[why] += 1

    def declined(self) -> dict[str, int]:
        """Calls of generate by what kept the token loop from running them."""
        with self._lock:
            return dict(self._declined)

    def close(self) -> None:
        """Ends what runs in threads and processes of its own."""
        if self.sharing is not None:
            self.sharing.close()
        if self.remote is not None:
            self.remote.close()

    def draft_counts(self) -> dict[str, Any]:
        """What came of drafts (Drafts.counts); empty when no draft was checked."""
        counts = self.drafts.counts()
        return counts if counts.get("checks") else {}


class RoutedModel(Protocol):
    """The router of a model that generates."""

    loop_tokens: int  # generated without a call of the model each

    @property
    def engine(self) -> Engine | None: ...

    @property
    def events(self) -> Events: ...

    @property
    def generation(self) -> GenerationState: ...

    @property
    def served_latest_call(self) -> bool:
        """Whether a compiled program of this model served the latest call of this thread."""

    def holds(self) -> bool:
        """Whether the model still is what its programs were made from. For who runs them without
        a call of the model: asked behind every callback of the user's."""

    @property
    def waiting_calls(self) -> int:
        """Calls that PyTorch served so far because a program for them was being made."""
