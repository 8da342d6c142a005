"""The protocol of engines that generate text: a request in, tokens out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from rm_abstract.generation.request import GenerationRequest


class TokenStream(Protocol):
    """A generation under way. Iterating runs it; the end of the iteration is its end."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        """New tokens ``[rows, count]``, int64; a row that ended goes on with padding.

        Raises what the model or one of the user's objects raises. Closing the iterator cancels the
        generation: the caches then hold whole steps.
        """

    def result(self) -> Any:
        """What `_sample` returns for the tokens so far: ids ``[rows, all]`` or a GenerateOutput."""


class GenerationEngine(Protocol):
    """Generates for one model."""

    name: str

    def eligible(self, request: GenerationRequest) -> str:
        """Why this engine cannot serve the request, in a few words; empty when it can.

        Changes nothing of the request; an engine in a process of its own may start it here. A
        request that no engine can serve goes to transformers' own loop.
        """

    def start(self, request: GenerationRequest) -> TokenStream:
        """The stream of a request that is eligible. Nothing runs before it is iterated."""
