"""Greedy `generate` with the tokens after the first two made by one loop in the core.

transformers has resolved everything when `_sample` is called; what it would do there is done here
in the same order and by its own functions, as long as the call asks for nothing but tokens. The
first steps are ordinary calls of the model: they compile, are compared and checked. Once one was
served by a program, the loop takes over until rows end, the cache is full or the count is reached.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from rm_abstract.capture import kv_cache
from rm_abstract.engines.base import Decline
from rm_abstract.engines.compiled_call import CompiledCall

if TYPE_CHECKING:
    from rm_abstract.hooks.router import ArmedModel

_SILENT = ("MaxLengthCriteria", "EosTokenCriteria")
_ASKS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
_KNOWN |= {"encoder_outputs", "decoder_attention_mask", "decoder_position_ids"}
_NEEDED = ("_prefill", "_update_model_kwargs_for_generation", "prepare_inputs_for_generation")


def why_not(model: Any, call: dict[str, Any]) -> str:
    """What in a call of `_sample` the loop does not do; empty when it does all of it."""
    config, kwargs = call["generation_config"], call["model_kwargs"]
    if config.do_sample or config.num_beams != 1:
        return "do_sample" if config.do_sample else "num_beams"
    if call.get("synced_gpus") or call.get("streamer") is not None:
        return "streamer" if call.get("streamer") is not None else "synced_gpus"
    if len(call["logits_processor"]):
        return str(type(call["logits_processor"][0]).__name__)
    for criterion in call["stopping_criteria"]:
        if type(criterion).__name__ not in _SILENT:
            return str(type(criterion).__name__)
    if config.return_dict_in_generate and any(getattr(config, name) for name in _ASKS):
        return "scores, logits, attentions or hidden states"
    if config.return_dict_in_generate or config.is_assistant or config.prefill_chunk_size:
        return "return_dict_in_generate"
    if set(kwargs) - _KNOWN:
        return str(sorted(set(kwargs) - _KNOWN)[0])
    if kv_cache.device_part(kwargs.get("past_key_values")) is None:
        return "past_key_values"
    if not all(hasattr(model, name) for name in _NEEDED):
        return "this version of transformers"
    return ""


def bound_call(original: Any, model: Any, args: tuple[Any, ...], kwargs: Any) -> dict[str, Any]:
    """The arguments of a `_sample` call by name. Raises TypeError when they do not bind."""
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    found = dict(bound.arguments)
    found["model_kwargs"] = dict(found.get("model_kwargs", {}))
    return found


class Greedy:
    """One call of generate. Raises whatever the model raises; the cache then holds whole steps."""

    def __init__(self, model: Any, armed: ArmedModel, call: dict[str, Any]) -> None:
        self._model, self._armed = model, armed
        self._config = call["generation_config"]
        self._kwargs = call["model_kwargs"]
        self._ids: torch.Tensor = call["input_ids"]
        self._eos: list[int] = []
        self._ends_rows = False
        self._length = 2**62
        for criterion in call["stopping_criteria"]:
            if type(criterion).__name__ == "EosTokenCriteria":
                self._eos += criterion.eos_token_id.reshape(-1).tolist()
                self._ends_rows = True
            else:
                self._length = min(self._length, int(criterion.max_length))
        pad = self._config._pad_token_tensor
        self._pad = int(pad) if pad is not None and self._ends_rows else 0
        self._finished = torch.zeros(self._ids.shape[0], dtype=torch.bool)

    def run(self) -> torch.Tensor:
        """The prompt with what was generated, ``[batch, length]``."""
        outputs = self._model._prefill(self._ids, self._config, self._kwargs)
        while not self._take(outputs):
            routed = self._armed.route.stats()["routed"]
            inputs = self._model.prepare_inputs_for_generation(
                self._ids, next_sequence_length=1, **self._kwargs
            )
            outputs = self._model(**inputs, return_dict=True)
            if self._armed.route.stats()["routed"] > routed:
                if self._take(outputs) or self._loop(inputs):
                    break
                inputs = self._model.prepare_inputs_for_generation(
                    self._ids, next_sequence_length=1, **self._kwargs
                )
                outputs = self._model(**inputs, return_dict=True)
        return self._ids

    def _take(self, outputs: Any) -> bool:
        """Adds the next token of every row, as transformers does. True when all rows ended."""
        self._advance(outputs, 1)
        scores = outputs.logits[:, -1].to(dtype=torch.float32)
        tokens = torch.argmax(scores, dim=-1)
        tokens = torch.where(self._finished, self._pad, tokens)
        self._add(tokens[:, None])
        return self._done()

    def _add(self, tokens: torch.Tensor) -> None:
        self._ids = torch.cat([self._ids, tokens], dim=-1)
        for eos in self._eos:
            self._finished |= (tokens == eos).any(dim=-1)

    def _advance(self, outputs: Any, count: int) -> None:
        self._kwargs = self._model._update_model_kwargs_for_generation(
            outputs,
            self._kwargs,
            is_encoder_decoder=self._model.config.is_encoder_decoder,
            num_new_tokens=count,
        )

    def _done(self) -> bool:
        return bool(self._finished.all()) or self._ids.shape[1] >= self._length

    def _loop(self, inputs: dict[str, Any]) -> bool:
        """Tokens from the core until something else must be done. True when generation is over."""
        found = _served(self._armed, {**inputs, "return_dict": True})
        if found is None:
            return False
        entry, leaves = found
        cache = kv_cache.device_part(self._kwargs["past_key_values"])
        step = entry.greedy_step(self._fresh(inputs, leaves))
        if step is None:
            return False
        try:
            tokens, finished = step.run(
                steps=self._length - self._ids.shape[1],
                capacity=cache.capacity,
                eos=self._eos,
                pad=self._pad,
                finished=self._finished.tolist(),
            )
        finally:
            cache.advance(step.length())
        count = len(tokens) // self._ids.shape[0]
        if count:
            fresh = torch.tensor(tokens).reshape(count, -1).T
            self._ids = torch.cat([self._ids, fresh], dim=-1)
            self._finished = torch.tensor(finished)
            self._advance({}, count)
        self._armed.loop_tokens += count * self._ids.shape[0]
        return self._done()

    def _fresh(self, inputs: dict[str, Any], leaves: list[Any]) -> list[Any]:
        """The leaves of the step after `inputs`, in tensors the loop may write."""
        following = self._model.prepare_inputs_for_generation(
            self._ids, next_sequence_length=1, **self._kwargs
        )
        by_identity = {id(value): following[name] for name, value in inputs.items()}
        return [by_identity.get(id(leaf), leaf) for leaf in leaves]


def _served(armed: ArmedModel, kwargs: dict[str, Any]) -> tuple[CompiledCall, list[Any]] | None:
    engine = armed.engine
    flatten = getattr(engine, "flatten", None)
    if flatten is None:
        return None
    call = flatten(kwargs)
    if isinstance(call, Decline):
        return None
    entry = engine.entry(call.spec) if engine is not None else None
    return (entry, call.leaves) if isinstance(entry, CompiledCall) else None
