"""What rows and prompts of a scheduler ask of a causal language model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache

from rm_abstract.base.errors import Error
from rm_abstract.generation.thread_sequence import empty_like
from rm_abstract.kv.device_cache import CacheNotes, DeviceCache, expected_shape, from_dynamic
from rm_abstract.kv.names import cache_name

if TYPE_CHECKING:
    from rm_abstract.generation.greedy_step import GreedyStep

Programs = Callable[[dict[str, Any]], "GreedyStep | None"]


def no_program(inputs: dict[str, Any]) -> GreedyStep | None:
    """For a model that nothing is compiled for."""
    return None


class ModelCalls:
    """Implements rows.Calls. `given` are arguments of every call; `programs` finds the program that
    serves a call by keywords."""

    def __init__(
        self,
        model: Any,
        new_cache: Callable[[], DeviceCache],
        given: dict[str, Any],
        positions: bool,
        programs: Programs,
    ) -> None:
        self._model, self._make, self._given = model, new_cache, given
        self._positions, self._programs = positions, programs

    @staticmethod
    def of_model(model: Any, programs: Programs = no_program) -> ModelCalls:
        """Raises Error for a model whose keys and values rows cannot share."""
        names, notes = inspect.signature(model.forward).parameters, CacheNotes()
        given: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in names:
            given["logits_to_keep"] = 1

        def new_cache() -> DeviceCache:
            shape = expected_shape(model)
            plain: Any = DynamicCache(config=model.config)
            notes.refused = False  # without programs PyTorch appends to the same buffers
            cache = None if shape is None else from_dynamic(plain, shape, 0, notes)
            if cache is None:
                name = type(model).__name__
                raise Error(f"[serve] {name} keeps no keys and values that rows can share")
            return cache

        new_cache()
        return ModelCalls(model, new_cache, given, "position_ids" in names, programs)

    @staticmethod
    def of_step(
        model: Any, own: tuple[str, ...], inputs: dict[str, Any], programs: Programs
    ) -> ModelCalls:
        """For steps with the arguments of this one, but for those named in `own`."""
        like = empty_like(inputs[cache_name()])
        given = {name: value for name, value in inputs.items() if name not in own}
        return ModelCalls(model, lambda: empty_like(like), given, True, programs)

    @property
    def gives_positions(self) -> bool:
        """Whether the model is told the positions of its tokens."""
        return self._positions

    def new_cache(self) -> DeviceCache:
        return self._make()

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: DeviceCache
    ) -> torch.Tensor:
        before = cache.length
        try:
            outputs = self._model(**self._call(ids, positions, mask, cache))
        except BaseException:
            if cache.length > before:
                cache.advance(before)
            raise
        logits: torch.Tensor = outputs.logits
        return logits

    def program(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: DeviceCache
    ) -> GreedyStep | None:
        return self._programs(self._call(ids, positions, mask, cache))

    def _call(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: DeviceCache
    ) -> dict[str, Any]:
        inputs = {**self._given, "input_ids": ids, "attention_mask": mask}
        if self._positions:
            inputs["position_ids"] = positions
        return {**inputs, cache_name(): cache, "return_dict": True}
