"""The rows that decode together: slots of common buffers, right-aligned, masked on the left.

This is a left-padded batch as transformers makes it, so the program is the ordinary one for several
rows. A row joins by being copied into a free slot and leaves by being forgotten; the buffers are
made anew only when slots or positions run out. Sizes are few: slots and capacities are powers of
two, so that few shapes are ever planned. Invariant: of slot s, the last ``lengths[s]`` positions
before ``cache.length`` are its row's keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rm_abstract.generation.jobs import Job
from rm_abstract.generation.sampling import Sampler
from rm_abstract.kv.device_cache import DeviceCache

_ROOM = 192  # positions to make room for beyond the longest row


class Row:
    """One job that decodes. `last` is the token whose keys and values are not made yet."""

    def __init__(self, job: Job, sampler: Sampler, last: int) -> None:
        self.job, self.sampler, self.last = job, sampler, last


class Rows:
    """For one thread. `forward` is one call of the model: ``[slots, 1]`` tokens to logits."""

    def __init__(
        self,
        new_cache: Callable[[], DeviceCache],
        forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, DeviceCache], torch.Tensor],
    ) -> None:
        self._new_cache, self._forward = new_cache, forward
        self._slots: list[Row | None] = []
        self._lengths: list[int] = []
        self._cache: DeviceCache | None = None
        self._mask = torch.zeros(0, 0, dtype=torch.long)

    def live(self) -> list[Row]:
        return [row for row in self._slots if row is not None]

    def join(self, row: Row, held: DeviceCache, to_follow: int = 0) -> None:
        """`held` has the row's keys and values in its only row; it is read, not kept.

        `to_follow` more rows will join soon: new buffers have slots for them.
        """
        length = held.length
        if self._cache is None or None not in self._slots or length > self._cache.length:
            self._remake(len(self.live()) + 1 + to_follow, length, row.job.limit)
        assert self._cache is not None
        slot, end = self._slots.index(None), self._cache.length
        span = slice(end - length, end)
        for mine, given in zip(self._cache.layers, held.layers, strict=True):
            mine.key_buffer[slot, :, span] = given.key_buffer[0, :, :length]
            mine.value_buffer[slot, :, span] = given.value_buffer[0, :, :length]
        self._mask[slot] = 0
        self._mask[slot, span] = 1
        self._slots[slot], self._lengths[slot] = row, length

    def drop_ended(self) -> None:
        for slot, row in enumerate(self._slots):
            if row is not None and row.job.ended:
                self._slots[slot], self._lengths[slot] = None, 0
        live = len(self.live())
        if not live:
            self.clear()
        elif live * 4 <= len(self._slots):  # half of that would do for twice as many
            self._remake(live, 0, 0)

    def clear(self) -> None:
        self._slots, self._lengths, self._cache = [], [], None

    def step(self) -> torch.Tensor:
        """The logits ``[slots, vocabulary]`` of every row's next token, in float32.

        When the call fails no row has changed.
        """
        assert self._cache is not None
        if self._cache.length >= self._cache.capacity:
            self._remake(len(self.live()), 0, 0)
        cache, at = self._cache, self._cache.length
        tokens = [[0 if row is None else row.last] for row in self._slots]
        positions = [[length] for length in self._lengths]
        # A free slot sees its own token only: a row of nothing but masked positions has no softmax.
        self._mask[:, at] = 1
        mask = self._mask[:, : at + 1]
        logits = self._forward(torch.tensor(tokens), torch.tensor(positions), mask, cache)
        for slot, row in enumerate(self._slots):
            if row is not None:
                self._lengths[slot] += 1
        return logits[:, -1].float()

    def by_slot(self) -> list[tuple[int, Row]]:
        return [(slot, row) for slot, row in enumerate(self._slots) if row is not None]

    def _remake(self, count: int, least: int, to_come: int) -> None:
        """New buffers with slots for `count` rows, the longest of at least `least` positions."""
        lengths, before = self._lengths, self._cache
        live = self.by_slot()
        longest = max([least, *(lengths[slot] for slot, _ in live)])
        left = [row.job.limit - len(row.job.made) + 1 for _, row in live]
        room = longest + min(max([to_come, 1, *left]), _ROOM)
        slots = 1
        while slots < count:
            slots *= 2
        cache = self._new_cache()
        for number, layer in enumerate(cache.layers):
            source: Any = before.layers[number] if before is not None else None
            layer.make_room(slots, cache.expected[number], room)
            for new, (slot, _) in enumerate(live):
                end = before.length if before is not None else 0
                taken = slice(end - lengths[slot], end)
                span = slice(longest - lengths[slot], longest)
                layer.key_buffer[new, :, span] = source.key_buffer[slot, :, taken]
                layer.value_buffer[new, :, span] = source.value_buffer[slot, :, taken]
        cache.advance(longest)
        self._mask = torch.zeros(slots, cache.capacity, dtype=torch.long)
        self._slots, self._lengths = [None] * slots, [0] * slots
        for new, (slot, row) in enumerate(live):
            self._slots[new], self._lengths[new] = row, lengths[slot]
            self._mask[new, longest - lengths[slot] : longest] = 1
        self._cache = cache
