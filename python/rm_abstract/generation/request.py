"""One generation, after transformers resolved everything the user asked for."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class GenerationRequest:
    """The arguments of `GenerationMixin._sample`: what an engine generates from.

    `processors`, `criteria` and `streamer` are transformers' and the user's own objects. They are
    called as transformers calls them: at every token, in the same order, with the same arguments.
    """

    model: Any
    input_ids: torch.Tensor  # [rows, tokens], int64
    config: Any  # GenerationConfig
    model_kwargs: dict[str, Any]  # attention_mask, the cache, ...
    processors: Any  # LogitsProcessorList
    criteria: Any  # StoppingCriteriaList
    streamer: Any = None
    synced_gpus: bool = False
    cache_is_new: bool = True  # the cache is None or was made, empty, for this call alone
    chunk_tokens: int | None = None  # most tokens of a row that one item of the stream may hold

    @staticmethod
    def of(
        original: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> GenerationRequest:
        """From a call of `original`, a version of `_sample`.

        Raises TypeError or KeyError for a version that takes other arguments.
        """
        given = dict(inspect.signature(original).bind(model, *args, **kwargs).arguments)
        return GenerationRequest(
            model=model,
            input_ids=given["input_ids"],
            config=given["generation_config"],
            model_kwargs=dict(given.get("model_kwargs", {})),
            processors=given["logits_processor"],
            criteria=given["stopping_criteria"],
            streamer=given.get("streamer"),
            synced_gpus=bool(given.get("synced_gpus")),
        )
