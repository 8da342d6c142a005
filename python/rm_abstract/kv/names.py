"""The argument and the field of outputs that transformers passes a cache by."""

from __future__ import annotations

import functools

NAMES = ("cache", "past_key_values")  # since transformers 5.24, and before


@functools.cache
def cache_name() -> str:
    """The installed transformers' name: an argument of forward and of
    `prepare_inputs_for_generation`, a field of what `generate` returns. Imports transformers."""
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else NAMES[1]
