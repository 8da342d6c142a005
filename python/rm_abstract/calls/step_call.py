"""A forward call with a DeviceCache made ready for a program: room in the buffers, a mask over all
of the capacity. Sizes then change only when the buffers grow, not with every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.calls.call import CallSpec, leaf_numbers
from rm_abstract.kv import kv_cache

if TYPE_CHECKING:
    from typing_extensions import Self

# What says how many positions a call adds to the cache, what positions it gives, what masks it.
_TOKENS = ("input_ids", "inputs_embeds")
_TOKENS_OF_PAIR = ("decoder_input_ids", "decoder_inputs_embeds")


class StepCall:
    """Where cache, tokens and mask lie among the leaves of calls of one structure."""

    def __init__(self, spec: CallSpec) -> None:
        """Raises Decline for a call that is no generation step."""
        numbers = leaf_numbers(spec)
        caches = [n for name, n in numbers.items() if spec.spec_of(name)[0] == "cache"]
        pair = _has_pair(spec)
        tokens = [numbers[n] for n in (_TOKENS_OF_PAIR if pair else _TOKENS) if n in numbers]
        if len(caches) != 1 or not tokens:
            raise Decline("RM114", "a device cache in a call without tokens")
        self._cache, self._tokens = caches[0], tokens[0]
        self._masks = [numbers[name] for name in (_mask_name(spec),) if name in numbers]
        self._positions = numbers.get("decoder_position_ids" if pair else "position_ids", -1)

    @classmethod
    def of(cls, spec: CallSpec) -> Self | None:
        """None for calls without a device cache."""
        if any(s[0] == "cache" and s[1] in ("DeviceCache", "DevicePair") for s in spec.specs):
            return cls(spec)
        return None

    def cache(self, leaves: Sequence[Any]) -> Any:
        return kv_cache.device_part(leaves[self._cache])

    def prepare(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The leaves a program takes. The cache gets room; its content does not change."""
        cache, tokens = self.cache(leaves), leaves[self._tokens]
        batch, new = tokens.shape[:2]
        self._make_room(cache, batch, new)
        capacity, end = cache.capacity, cache.length + new
        out = list(leaves)
        for n in self._masks:
            mask = leaves[n]
            if mask.dim() == 2 and mask.shape[1] == end:
                out[n] = torch.nn.functional.pad(mask, (0, capacity - end))
            elif mask.shape[-1] != capacity:
                raise Decline("RM104", f"a mask of shape {list(mask.shape)} with a device cache")
        return tuple(out)

    def _make_room(self, cache: Any, batch: int, new: int) -> None:
        cache.prepare(batch, cache.expected, new)

    def roles(self, leaves: Sequence[Any]) -> dict[str, int]:
        """The tensors a loop changes with every token, by number among the unfolded ones."""
        at, number = 0, {}
        for n, leaf in enumerate(leaves):
            number[n] = at
            at += 1 if isinstance(leaf, torch.Tensor) else len(_held(leaf))
        found = {"ids": number[self._tokens], "length": number[self._cache]}
        if self._positions >= 0:
            found["positions"] = number[self._positions]
        for n in self._masks:
            found["mask"] = number[n]
        return found

    def comparable(self, leaves: Sequence[Any]) -> Callable[[Any], Any]:
        """A function that puts zeros where padding is; `leaves` as `prepare` returned them.

        What a model computes for padding is never read, and every implementation of attention
        gives something else there: only what is visible can be compared.
        """
        masks = [leaves[n] for n in self._masks if leaves[n].dim() == 2]
        if not masks:
            return lambda value: value
        return partial(_hide, visible=masks[0].bool(), start=self.cache(leaves).length)

    def reshaped(self, leaves: Sequence[Any], before: list[Any]) -> bool:
        """After the original ran: True when it made other buffers than were expected.

        The cache among the leaves of `before` is then made anew as it would have been, and the
        model's next caches are made right. Raises Decline when it held something already.
        """
        real, copy = self.cache(leaves), self.cache(before)
        shapes = real.shapes()
        if shapes == copy.shapes():
            return False
        if copy.length:
            raise Decline("RM114", "keys and values that changed their shapes")
        real.learn()
        tokens = before[self._tokens]
        copy.prepare(tokens.shape[0], shapes, max(tokens.shape[1], real.capacity))
        return True

    def refuse(self, leaves: Sequence[Any]) -> None:
        """Calls with this cache are not served: its owner goes back to transformers' own."""
        self.cache(leaves).refuse()


def _has_pair(spec: CallSpec) -> bool:
    return any(s == ("cache", "DevicePair") for s in spec.specs)


def _mask_name(spec: CallSpec) -> str:
    """The argument that masks positions of the cache (not those of an encoder)."""
    return "decoder_attention_mask" if _has_pair(spec) else "attention_mask"


def _held(cache: Any) -> list[torch.Tensor]:
    held = kv_cache.read(cache)
    if isinstance(held, Decline):
        raise held
    return held


def _hide(value: Any, visible: torch.Tensor, start: int) -> Any:
    if isinstance(value, torch.Tensor):
        return _hidden(value, visible, start)
    if kv_cache.is_device(value):
        return _content(value, visible)
    if kv_cache.is_pair(value):
        first, second = kv_cache.halves(value)
        return [*_hide(first, visible, start), *_held(second)]
    if isinstance(value, dict):
        return {k: _hide(v, visible, start) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hide(v, visible, start) for v in value]
    return value


def _content(cache: Any, visible: torch.Tensor) -> list[torch.Tensor]:
    """Of a DeviceCache: its length, and what lies at the visible ones of its positions. Buffers of
    another capacity hold the same."""
    length, *buffers = _held(cache)
    shown = visible[:, None, : int(length), None]
    return [length, *(b[:, :, : shown.shape[2]].masked_fill(~shown, 0) for b in buffers)]


def _hidden(tensor: torch.Tensor, visible: torch.Tensor, start: int) -> torch.Tensor:
    batch, capacity = visible.shape
    if tensor.dim() == 4 and tensor.shape[0] == batch and tensor.shape[2] == capacity:
        return tensor.masked_fill(~visible[:, None, :, None], 0)
    new = visible[:, start:]
    if tensor.dim() >= 2 and tensor.shape[0] == batch and 1 < tensor.shape[1] <= new.shape[1]:
        shown = new[:, : tensor.shape[1]]
        return tensor.masked_fill(~shown.reshape(*shown.shape, *[1] * (tensor.dim() - 2)), 0)
    return tensor


def mask_tensors(spec: CallSpec, leaves: Sequence[Any]) -> set[int]:
    """Numbers of the masks among the tensors of a call, caches unfolded."""
    numbers = leaf_numbers(spec)
    wanted = {numbers[name] for name in (_mask_name(spec),) if name in numbers}
    found, at = set(), 0
    for n, leaf in enumerate(leaves):
        if n in wanted:
            found.add(at)
        at += 1 if isinstance(leaf, torch.Tensor) else len(_held(leaf))
    return found
