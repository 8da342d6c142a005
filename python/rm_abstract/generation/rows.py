"""The rows that decode together: slots of common buffers, one position a step, masked by row.

A step appends at one place for all slots, so the program is the ordinary one of a left-padded
batch. A row joins by being copied into a free slot, ending where the others end, and leaves by
being forgotten; a row that has no token to go on with sits a step out, and its mask hides what was
appended then. Buffers are made anew only when slots or positions run out. Sizes are few: slots and
capacities are powers of two, so that few shapes are ever planned. Invariant: of slot s, the first
``held`` positions that its mask shows are its row's keys and values, in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rm_abstract.kv.device_cache import DeviceCache

if TYPE_CHECKING:
    from rm_abstract.generation.greedy_step import GreedyStep

_ROOM = 192  # positions to make room for beyond the longest row


class Row(Protocol):
    """One text that decodes."""

    last: int | None  # the token to go on with; None: not known yet
    position: int  # of that token

    @property
    def ended(self) -> bool: ...

    def left(self) -> int:
        """Tokens that may still come."""

    def accept(self, logits: Callable[[], torch.Tensor], largest: int) -> None:
        """The next token's logits, ``[vocabulary]`` in float32, and the first largest of them. Few
        rows ask for the logits; they are there until the next step."""

    def failed(self, error: Exception) -> None:
        """A step that the row shared did not work; the row's keys and values are as before it."""


class Step:
    """What a step gave: `logits` ``[slots, 1 or more, vocabulary]``, in the model's type, and the
    rows that have a next token now. `largest` of every slot's last logits; empty: not known yet."""

    def __init__(
        self, logits: torch.Tensor, largest: list[int], rows: list[tuple[int, Row]]
    ) -> None:
        self._logits, self.rows = logits, rows
        # The values' indices: argmax takes three times as long.
        self._largest = largest or logits[:, -1].float().max(-1).indices.tolist()

    def accept(self) -> None:
        """Gives every row what it has now."""
        for slot, row in self.rows:
            row.accept(functools.partial(self._of, slot), self._largest[slot])

    def _of(self, slot: int) -> torch.Tensor:
        return self._logits[slot, -1].float()


class Calls(Protocol):
    """The model, as rows need it."""

    def new_cache(self) -> DeviceCache:
        """An empty one."""

    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: DeviceCache
    ) -> torch.Tensor:
        """One call of the model: ``[rows, 1 or more, vocabulary]``. The cache is as before when
        this raises."""

    def program(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: DeviceCache
    ) -> GreedyStep | None:
        """The program that serves such a call, to be run directly; None when there is none."""


class Rows:
    """For one thread. `about_to_compute` is called before every call of the model."""

    def __init__(self, calls: Calls, about_to_compute: Callable[[], None] = lambda: None) -> None:
        self._calls, self._about_to_compute = calls, about_to_compute
        self._slots: list[Row | None] = []
        self._held: list[int] = []
        self._cache: DeviceCache | None = None
        self._mask = torch.zeros(0, 0, dtype=torch.long)
        self._program: GreedyStep | None = None  # for the slots as they are

    def live(self) -> list[Row]:
        return [row for row in self._slots if row is not None]

    def by_slot(self) -> list[tuple[int, Row]]:
        return [(slot, row) for slot, row in enumerate(self._slots) if row is not None]

    def join(
        self, row: Row, held: DeviceCache, shown: torch.Tensor | None = None, to_follow: int = 0
    ) -> None:
        """`held` has the row's keys and values in its only row; it is read, not kept.

        `shown` are the numbers of the positions that count, all without it. `to_follow` more rows
        will join soon: new buffers have slots for them.
        """
        length = held.length if shown is None else len(shown)
        if self._cache is None or None not in self._slots or length > self._cache.length:
            self._remake(len(self.live()) + 1 + to_follow, length, row.left() + 1)
        assert self._cache is not None
        slot, end = self._slots.index(None), self._cache.length
        span = slice(end - length, end)
        taken: Any = slice(0, length) if shown is None else shown
        for mine, given in zip(self._cache.layers, held.layers, strict=True):
            mine.key_buffer[slot, :, span] = given.key_buffer[0, :, taken]
            mine.value_buffer[slot, :, span] = given.value_buffer[0, :, taken]
        self._mask[slot] = 0
        self._mask[slot, span] = 1
        self._slots[slot], self._held[slot] = row, length
        self._program = None

    def give_back(self, row: Row, cache: DeviceCache, count: int) -> None:
        """Appends to `cache` the keys and values of the row's last `count` positions."""
        source, slot = self._cache, self._slots.index(row)
        assert source is not None
        places = self._places(slot)[self._held[slot] - count :]
        begin, end = cache.length, cache.length + count
        for mine, theirs in zip(source.layers, cache.layers, strict=True):
            theirs.grow(end)
            theirs.key_buffer[0, :, begin:end] = mine.key_buffer[slot, :, places]
            theirs.value_buffer[0, :, begin:end] = mine.value_buffer[slot, :, places]
        cache.advance(end)

    def held(self, row: Row) -> int:
        """Positions of which the row's keys and values are here."""
        return self._held[self._slots.index(row)]

    def content(self, row: Row) -> Callable[[int, int], list[torch.Tensor]]:
        """The row's keys and values as prefixes.Content, while it is here."""
        cache, slot = self._cache, self._slots.index(row)
        assert cache is not None
        places = self._places(slot)

        def read(begin: int, end: int) -> list[torch.Tensor]:
            buffers = [b for layer in cache.layers for b in (layer.key_buffer, layer.value_buffer)]
            return [buffer[slot, :, places[begin:end]] for buffer in buffers]

        return read

    def drop_ended(self) -> None:
        for slot, row in enumerate(self._slots):
            if row is not None and row.ended:
                self._slots[slot], self._held[slot] = None, 0
                self._mask[slot], self._program = 0, None
        live = len(self.live())
        if not live:
            self.clear()
        elif live * 4 <= len(self._slots):  # half of that would do for twice as many
            self._remake(live, 0, 0)

    def clear(self) -> None:
        self._slots, self._held, self._cache, self._program = [], [], None, None

    def step(self, judged: bool = False) -> Step:
        """Rows that know no token sit out. When the call fails no row has changed. Raises Refused
        where a program refuses values of this step; with `judged` the model is called, not it."""
        ready = self._ready()
        slots = [slot for slot, _ in ready]
        logits, largest = self._run([row for _, row in ready], slots, judged)
        for slot, row in ready:
            self._appended(slot, row)
        return Step(logits, largest, ready)

    def step_apart(self) -> list[Step]:
        """A step in which the model is called for each row alone, for one that failed: a row hears
        of its own error, and the others go on. One call and one copy of its keys and values a row.
        """
        steps: list[Step] = []
        own: list[tuple[int, Row, DeviceCache]] = []
        for slot, row in self._ready():
            try:
                cache = self._copied(slot)
                logits = self._called_alone(row, cache)
            except Exception as error:
                row.failed(error)
                continue
            steps.append(Step(logits, [], [(0, row)]))
            own.append((slot, row, cache))
        common = self._cache
        assert common is not None
        end = common.length
        self._mask[:, end] = 0
        for slot, row, cache in own:
            for mine, theirs in zip(common.layers, cache.layers, strict=True):
                mine.key_buffer[slot, :, end] = theirs.key_buffer[0, :, self._held[slot]]
                mine.value_buffer[slot, :, end] = theirs.value_buffer[0, :, self._held[slot]]
            self._mask[slot, end] = 1
            self._appended(slot, row)
        if own:
            common.advance(end + 1)
            self._program = None
        return steps

    def _ready(self) -> list[tuple[int, Row]]:
        """The rows that know their token, by slot; there is room for one position more."""
        assert self._cache is not None
        if self._cache.length >= self._cache.capacity:
            self._remake(len(self.live()), 0, 0)
        return [(slot, row) for slot, row in self.by_slot() if row.last is not None]

    def _appended(self, slot: int, row: Row) -> None:
        """The row's token went through the model, and its next one is not known yet."""
        self._held[slot] += 1
        row.position += 1
        row.last = None

    def _copied(self, slot: int) -> DeviceCache:
        """The row's keys and values in a cache of their own, with room for one position more."""
        common, held, places = self._cache, self._held[slot], self._places(slot)
        assert common is not None
        own = self._calls.new_cache()
        for mine, theirs in zip(own.layers, common.layers, strict=True):
            mine.make_room(1, theirs.shape(), held + 1)
            mine.key_buffer[0, :, :held] = theirs.key_buffer[slot, :, places]
            mine.value_buffer[0, :, :held] = theirs.value_buffer[slot, :, places]
        own.advance(held)
        return own

    def _called_alone(self, row: Row, cache: DeviceCache) -> torch.Tensor:
        mask = torch.ones(1, cache.length + 1, dtype=torch.long)
        self._about_to_compute()
        given = torch.tensor([[row.last or 0]]), torch.tensor([[row.position]])
        return self._calls.logits(*given, mask, cache)

    def _run(
        self, rows: Sequence[Row], slots: Sequence[int], judged: bool
    ) -> tuple[torch.Tensor, list[int]]:
        cache = self._cache
        assert cache is not None
        at, resting = cache.length, self._resting(slots)
        # Who rests has what another row has: nothing that the model refuses, unless that row's is.
        tokens = [rows[0].last or 0] * len(self._slots)
        positions = [rows[0].position] * len(self._slots)
        for slot, row in zip(slots, rows, strict=True):
            tokens[slot], positions[slot] = row.last or 0, row.position
        # Who rests sees its own token at least: nothing but masked positions has no softmax.
        self._mask[:, at] = 1
        try:
            if self._program is None or judged:
                given = torch.tensor(tokens)[:, None], torch.tensor(positions)[:, None]
                self._program = None
                if not judged:
                    self._program = self._calls.program(*given, self._mask[:, : at + 1], cache)
                if self._program is None:
                    self._about_to_compute()
                    return self._calls.logits(*given, self._mask[:, : at + 1], cache), []
            self._about_to_compute()
            logits, largest = self._program.one(tokens, positions)
            cache.advance(self._program.length())
            if resting:
                self._program.hide(resting, at)
            return logits, largest
        finally:
            if resting:
                self._mask[resting, at] = 0

    def _resting(self, slots: Sequence[int]) -> list[int]:
        return [slot for slot in range(len(self._slots)) if slot not in slots]

    def _places(self, slot: int) -> torch.Tensor:
        """Where the keys and values of a slot lie."""
        return self._mask[slot].nonzero()[: self._held[slot], 0]

    def _remake(self, count: int, least: int, to_come: int) -> None:
        """New buffers with slots for `count` rows, the longest of at least `least` positions."""
        held, before, live = self._held, self._cache, self.by_slot()
        longest = max([least, *(held[slot] for slot, _ in live)])
        room = longest + min(max([to_come, 1, *(row.left() + 1 for _, row in live)]), _ROOM)
        slots = 1
        while slots < count:
            slots *= 2
        cache = self._calls.new_cache()
        places = [self._places(slot) for slot, _ in live]
        for number, layer in enumerate(cache.layers):
            source: Any = before.layers[number] if before is not None else None
            layer.make_room(slots, cache.expected[number], room)
            for new, (slot, _) in enumerate(live):
                span = slice(longest - held[slot], longest)
                layer.key_buffer[new, :, span] = source.key_buffer[slot, :, places[new]]
                layer.value_buffer[new, :, span] = source.value_buffer[slot, :, places[new]]
        cache.advance(longest)
        self._mask = torch.zeros(slots, cache.capacity, dtype=torch.long)
        self._slots, self._held = [None] * slots, [0] * slots
        for new, (slot, row) in enumerate(live):
            self._slots[new], self._held[new] = row, held[slot]
            self._mask[new, longest - held[slot] : longest] = 1
        self._cache, self._program = cache, None
