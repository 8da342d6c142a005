"""What transformers would do at every token, as vLLM's sampling parameters.

The processors that transformers made from the configuration (and the user's own) are read, not the
configuration: they are what would run. A processor without a row here is declined by name, and so
is a combination whose meaning differs; nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.generation.request import GenerationRequest
from rm_abstract.kv.names import NAMES, cache_name


@dataclass
class Plan:
    """One request a row."""

    prompts: list[list[int]]
    sampling: dict[str, Any]

    def rows(self) -> list[tuple[list[int], dict[str, Any]]]:
        """(prompt, sampling) of every row. Seeds of rows that draw come from torch's random state:
        torch.manual_seed repeats a generation, with other draws than transformers makes."""
        if self.sampling["temperature"] == 0:
            return [(prompt, self.sampling) for prompt in self.prompts]
        seeds = torch.randint(0, 2**31 - 1, (len(self.prompts),)).tolist()
        return [
            (prompt, {**self.sampling, "seed": seed})
            for prompt, seed in zip(self.prompts, seeds, strict=True)
        ]


# Fields of a call that vLLM has no way to do, by what makes them visible at _sample.
_KNOWN_ARGUMENTS = frozenset(
    {"attention_mask", "position_ids", *NAMES, "use_cache", "logits_to_keep"}
    | {"tokenizer"}  # of stop_strings: a criterion has it, forward does not get it
)
# In this order vLLM applies them; transformers' list must not need another one.
_RANK = {
    "RepetitionPenaltyLogitsProcessor": 1,
    "TemperatureLogitsWarper": 2,
    "TopKLogitsWarper": 3,
    "TopPLogitsWarper": 4,
    "MinPLogitsWarper": 5,
}
_INFINITE = -float("inf")


def _declined(field: str) -> Decline:
    return Decline("RM332", field)


def plan(request: GenerationRequest, longest: float = float("inf")) -> Plan:
    """The request for vLLM; ``longest``: most tokens of a row, prompt included (max_model_len).

    Changes nothing. Raises Decline (RM332), which names the field.
    """
    config, model = request.config, request.model
    if config.num_beams != 1:
        raise _declined(f"num_beams={config.num_beams}")
    if config.is_assistant or getattr(config, "assistant_model", None) is not None:
        raise _declined("assisted decoding")
    if request.synced_gpus:
        raise _declined("synced_gpus")
    if model.config.is_encoder_decoder:
        raise _declined("an encoder-decoder model")
    if config.return_dict_in_generate:
        names = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        asked = [name for name in names if getattr(config, name)]
        raise _declined(asked[0] if asked else f"return_dict_in_generate (its {cache_name()})")
    given = request.model_kwargs
    if unknown := sorted(set(given) - _KNOWN_ARGUMENTS):
        raise _declined(f"the argument {unknown[0]}")
    if not request.cache_is_new:
        raise _declined(cache_name())
    prompts = _prompts(request.input_ids, given.get("attention_mask"))
    _check_positions(given.get("position_ids"), given.get("attention_mask"))
    sampling = _sampling(request, [request.input_ids.shape[1] - len(row) for row in prompts])
    most = max(len(row) for row in prompts) + sampling["max_tokens"]
    if most > longest:
        raise _declined(f"max_length: {most} tokens, the engine's max_model_len is {longest}")
    return Plan(prompts, sampling)


def _prompts(ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """Every row without the padding on its left."""
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise _declined("inputs_embeds, or no prompt")
    if mask is None:
        return list(ids.tolist())
    if mask.dim() != 2 or mask.shape != ids.shape:
        raise _declined(f"attention_mask of shape {list(mask.shape)}")
    kept = mask != 0
    if not bool(kept[:, -1].all()) or bool((kept[:, 1:] < kept[:, :-1]).any()):
        raise _declined("attention_mask with zeros that are not padding on the left")
    return [row[keep].tolist() for row, keep in zip(ids, kept, strict=True)]


def _check_positions(positions: torch.Tensor | None, mask: torch.Tensor | None) -> None:
    """Positions must be those that follow from the padding: vLLM counts for itself."""
    if positions is None:
        return
    if mask is None:
        expected = torch.arange(positions.shape[-1], device=positions.device).expand_as(positions)
        kept = torch.ones_like(positions, dtype=torch.bool)
    else:
        kept = mask != 0
        expected = mask.long().cumsum(-1) - 1
        if positions.shape != kept.shape:
            raise _declined(f"position_ids of shape {list(positions.shape)}")
    if not bool((positions == expected)[kept].all()):
        raise _declined("position_ids")


def _sampling(request: GenerationRequest, padding: list[int]) -> dict[str, Any]:
    width = request.input_ids.shape[1]
    eos: set[int] = set()
    length = None
    for criterion in request.criteria:
        name = type(criterion).__name__
        if name == "EosTokenCriteria":
            eos.update(int(token) for token in criterion.eos_token_id.reshape(-1).tolist())
        elif name == "MaxLengthCriteria":
            most = int(criterion.max_length)
            length = most if length is None else min(length, most)
    if length is None:
        raise _declined("a generation without max_length")
    sampling: dict[str, Any] = {
        "max_tokens": max(length - width, 1),
        "ignore_eos": True,
        "stop_token_ids": sorted(token for token in eos if token >= 0),
        "temperature": 1.0 if request.config.do_sample else 0.0,
    }
    rank = 0
    for processor in request.processors:
        name = type(processor).__name__
        read = _READERS.get(name)
        module = type(processor).__module__
        if read is None or module != "transformers.generation.logits_process":
            raise _declined(f"logits processor {name}")
        if not request.config.do_sample and name.endswith("Warper"):
            raise _declined(f"{name} without do_sample")
        place = _RANK.get(name, rank)
        if place < rank or (name in _RANK and place == rank):
            raise _declined(f"the order of logits processors: {name}")
        rank = place
        read(processor, sampling, _Facts(width, eos, padding))
    if "min_p" in sampling and "top_p" in sampling:
        raise _declined("min_p with top_p (vLLM applies them in the other order)")
    if "logit_bias" in sampling and "repetition_penalty" in sampling:
        raise _declined("sequence_bias with repetition_penalty (vLLM's order is another)")
    if sampling.get("min_tokens", 0) > sampling["max_tokens"]:
        sampling["min_tokens"] = sampling["max_tokens"]
    return sampling


@dataclass(frozen=True)
class _Facts:
    width: int
    eos: set[int]
    padding: list[int]


def _temperature(processor: Any, sampling: dict[str, Any], facts: _Facts) -> None:
    if not 0.01 <= processor.temperature <= 2.0:
        raise _declined(f"temperature={processor.temperature} (vLLM takes 0.01 to 2)")
    sampling["temperature"] = float(processor.temperature)


def _filter(name: str) -> Callable[[Any, dict[str, Any], _Facts], None]:
    def read(processor: Any, sampling: dict[str, Any], facts: _Facts) -> None:
        if processor.filter_value != _INFINITE:
            raise _declined(f"{name} with filter_value")
        if processor.min_tokens_to_keep != 1:
            raise _declined(f"{name} with min_tokens_to_keep")
        value = getattr(processor, name)
        if name == "top_p" and value <= 0:
            raise _declined("top_p=0")
        if value:
            sampling[name] = value

    return read


def _penalty(processor: Any, sampling: dict[str, Any], facts: _Facts) -> None:
    ignored = processor.prompt_ignore_length
    lengths = ignored.tolist() if isinstance(ignored, torch.Tensor) else ignored
    padded = any(facts.padding)
    if (lengths is None and padded) or (lengths is not None and lengths != facts.padding):
        raise _declined("repetition_penalty with prompt_ignore_length")
    sampling["repetition_penalty"] = float(processor.penalty)


def _min_tokens(processor: Any, sampling: dict[str, Any], facts: _Facts) -> None:
    if set(processor.eos_token_id.reshape(-1).tolist()) != facts.eos:
        raise _declined("min_length with another eos_token_id than the one that ends rows")
    if hasattr(processor, "min_new_tokens"):
        least = processor.min_new_tokens + processor.prompt_length_to_skip - facts.width
    else:
        least = processor.min_length - facts.width
    if least > 0:
        sampling["min_tokens"] = max(least, sampling.get("min_tokens", 0))


def _suppress(processor: Any, sampling: dict[str, Any], facts: _Facts) -> None:
    tokens = [int(token) for token in processor.suppress_tokens.tolist()]
    sampling["suppressed"] = sorted({*tokens, *sampling.get("suppressed", ())})


def _bias(processor: Any, sampling: dict[str, Any], facts: _Facts) -> None:
    for sequence, bias in processor.sequence_bias.items():
        if len(sequence) != 1:
            raise _declined("sequence_bias or bad_words_ids of several tokens")
        if bias == _INFINITE:
            banned = {int(sequence[0]), *sampling.get("suppressed", ())}
            sampling["suppressed"] = sorted(banned)
        elif abs(bias) <= 100:
            sampling.setdefault("logit_bias", {})[str(int(sequence[0]))] = float(bias)
        else:
            raise _declined(f"sequence_bias={bias} (vLLM takes -100 to 100)")


def _nothing(processor: Any, sampling: dict[str, Any], facts: _Facts) -> None:
    """Changes no token that is chosen."""


_READERS: dict[str, Callable[[Any, dict[str, Any], _Facts], None]] = {
    "TemperatureLogitsWarper": _temperature,
    "TopKLogitsWarper": _filter("top_k"),
    "TopPLogitsWarper": _filter("top_p"),
    "MinPLogitsWarper": _filter("min_p"),
    "RepetitionPenaltyLogitsProcessor": _penalty,
    "MinLengthLogitsProcessor": _min_tokens,
    "MinNewTokensLengthLogitsProcessor": _min_tokens,
    "SuppressTokensLogitsProcessor": _suppress,
    "SequenceBiasLogitsProcessor": _bias,
    "NoBadWordsLogitsProcessor": _bias,
    "LogitNormalization": _nothing,
}
