"""Calls without a mask, made calls with one: which tokens are real, and at which positions.

A device of fixed shapes pads tokens, so its program must be told which ones count. An all-ones mask
and counted positions are what transformers models assume when they are given none. The original is
always called as the user called it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rm_abstract.calls.call import CallSpec, ForwardParameters
from rm_abstract.kv import kv_cache

_TOKENS = ("input_ids", "inputs_embeds")
# Encoder-decoder calls and the like have several sequences: one mask would not say enough.
_OTHER_SEQUENCES = ("decoder_input_ids", "encoder_outputs", "encoder_hidden_states", "pixel_values")
_INTEGERS = ("tensor", "torch.int64", 2, "cpu")


@dataclass(frozen=True)
class Explicit:
    """How calls of one structure are completed: ``spec`` is the structure of the completed call."""

    spec: CallSpec
    added: tuple[tuple[int, str], ...]  # (place among the completed leaves, argument)
    tokens: int  # leaf of the original call
    cache: int | None

    @staticmethod
    def of(spec: CallSpec, parameters: ForwardParameters) -> Explicit | None:
        """None when there is nothing to add."""
        at = {name: i for i, name in enumerate(spec.names)}
        given = {name for name, i in at.items() if spec.specs[i] != ("none",)}
        tokens = [name for name in _TOKENS if name in given and spec.specs[at[name]][0] == "tensor"]
        if len(tokens) != 1 or given & set(_OTHER_SEQUENCES) or spec.positional:
            return None
        has_cache = any(s[0] == "cache" for s in spec.specs)
        wanted = ["attention_mask", "position_ids"] if has_cache else ["attention_mask"]
        missing = [n for n in wanted if n in parameters.names and n not in given]
        if not missing:
            return None
        names = [*spec.names, *(n for n in missing if n not in at)]
        specs = [*spec.specs, *(("none",) for n in missing if n not in at)]
        for name in missing:
            specs[names.index(name)] = _INTEGERS
        full = CallSpec(tuple(names), tuple(specs), 0)
        places, originals, added = {}, {}, []
        leaf = old = 0
        for name, entry in zip(names, specs, strict=True):
            places[name] = leaf
            if name in missing:
                added.append((leaf, name))
            else:
                originals[name] = old
                old += _leaves(entry)
            leaf += _leaves(entry)
        caches = [n for n, s in zip(names, specs, strict=True) if s[0] == "cache"]
        cache = originals[caches[0]] if caches else None
        return Explicit(full, tuple(added), originals[tokens[0]], cache)

    def complete(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The leaves of the completed call. Raises Decline for a cache that cannot be read."""
        tokens = leaves[self.tokens]
        batch, new = tokens.shape[:2]
        past = 0
        if self.cache is not None:
            past = kv_cache.length_of(leaves[self.cache])
        out = list(leaves)
        for place, name in self.added:
            if name == "attention_mask":
                value = torch.ones(batch, past + new, dtype=torch.long)
            else:
                value = torch.arange(past, past + new).expand(batch, new).contiguous()
            out.insert(place, value)
        return tuple(out)

    def original(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The inverse of ``complete``."""
        places = {place for place, _ in self.added}
        return tuple(leaf for i, leaf in enumerate(leaves) if i not in places)


def _leaves(spec: Any) -> int:
    """Leaves below one argument."""
    if spec[0] in ("tensor", "cache"):
        return 1
    if spec[0] in ("list", "tuple"):
        return sum(_leaves(s) for s in spec[1:])
    return sum(_leaves(s) for _, s in spec[1:]) if spec[0] == "dict" else 0
