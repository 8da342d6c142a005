"""Keys and values of earlier texts, for prompts that begin alike.

A tree of runs of tokens: a run is kept once, whatever texts go on from it. Invariant: a run owns
its tensors and nobody changes them; a run is never older by use than those below it, so the oldest
run is a leaf; the bytes held are bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rm_abstract.kv.device_cache import DeviceCache

_SHORTEST = 16  # fewer tokens are computed sooner than looked up and copied

# Of positions begin to end of a text: keys and values ``[heads, positions, size]`` by layer, in
# memory of their own.
Content = Callable[[int, int], list[torch.Tensor]]


def content_of(cache: DeviceCache) -> Content:
    """Of the only row of `cache`."""

    def read(begin: int, end: int) -> list[torch.Tensor]:
        buffers = [b for layer in cache.layers for b in (layer.key_buffer, layer.value_buffer)]
        return [buffer[0, :, begin:end].clone() for buffer in buffers]

    return read


@dataclass(eq=False)
class _Run:
    tokens: tuple[int, ...]
    content: list[torch.Tensor]
    parent: _Run | None
    children: dict[int, _Run] = field(default_factory=dict)  # by first token

    def size(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.content)


def begin_alike(a: Sequence[int], b: Sequence[int]) -> bool:
    """One of these texts gains by the other's keys and values."""
    return _common(a[:_SHORTEST], b[:_SHORTEST]) == _SHORTEST


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


class Prefixes:
    """Texts by last use. For one thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._first: dict[int, _Run] = {}
        self._runs: OrderedDict[_Run, None] = OrderedDict()  # the oldest first
        self._held = 0

    @property
    def held_bytes(self) -> int:
        return self._held

    def extend(self, prompt: Sequence[int], cache: DeviceCache) -> int:
        """Appends to `cache`, which holds a beginning of `prompt`, what is known of the rest; how
        many positions. At least one token is left to be computed: its logits are wanted.
        """
        begin, path = cache.length, self._path(prompt[:-1])
        end = sum(count for _, count in path)
        if end - begin < _SHORTEST:
            return 0
        self._touch(path[-1][0])
        content = path[0][0].content
        for number, layer in enumerate(cache.layers):
            keys, values = content[2 * number : 2 * number + 2]
            if layer.key_buffer is None:
                shape = keys.shape[0], keys.shape[2], values.shape[2], keys.dtype
                layer.make_room(1, shape, len(prompt))
            else:
                layer.grow(len(prompt))
        at = 0
        for run, count in path:
            first, last = max(at, begin), at + count
            if first < last:
                part = slice(first - at, count)
                for number, layer in enumerate(cache.layers):
                    keys, values = run.content[2 * number : 2 * number + 2]
                    layer.key_buffer[0, :, first:last] = keys[:, part]
                    layer.value_buffer[0, :, first:last] = values[:, part]
            at = last
        cache.advance(end)
        return end - begin

    def insert(self, text: Sequence[int], content: Content) -> None:
        """Remembers a text; only what is new of it is read from `content`."""
        path = self._path(text)
        known = sum(count for _, count in path)
        if len(text) - known < _SHORTEST:
            if path:
                self._touch(path[-1][0])
            return
        new = content(known, len(text))
        run = _Run(tuple(text[known:]), new, None)
        if run.size() > self._most:
            return
        if path:
            above, count = path[-1]
            if count < len(above.tokens):
                above = self._split(above, count)
            run.parent = above
        self._below(run.parent)[run.tokens[0]] = run
        self._held += run.size()
        self._touch(run)
        while self._held > self._most:
            self._drop_oldest()

    # ---- the tree --------------------------------------------------------------------------------

    def _path(self, text: Sequence[int]) -> list[tuple[_Run, int]]:
        """The runs that `text` begins with, each with how many of its tokens are the text's; all of
        them but of the last one."""
        found: list[tuple[_Run, int]] = []
        at, below = 0, self._first
        while at < len(text) and (run := below.get(text[at])) is not None:
            count = len(run.tokens)
            if tuple(text[at : at + count]) != run.tokens:
                count = _common(text[at : at + count], run.tokens)
            found.append((run, count))
            if count < len(run.tokens):
                break
            at, below = at + count, run.children
        return found

    def _below(self, run: _Run | None) -> dict[int, _Run]:
        return self._first if run is None else run.children

    def _touch(self, run: _Run | None) -> None:
        while run is not None:
            self._runs[run] = None
            self._runs.move_to_end(run)
            run = run.parent

    def _split(self, run: _Run, count: int) -> _Run:
        """A run of the first `count` tokens of `run`, which goes on from there. The caller touches
        it. Both own their memory, so that dropping one frees it."""
        upper = _Run(run.tokens[:count], [p[:, :count].clone() for p in run.content], run.parent)
        lower = [part[:, count:].clone() for part in run.content]
        self._below(run.parent)[run.tokens[0]] = upper
        run.tokens, run.content, run.parent = run.tokens[count:], lower, upper
        upper.children[run.tokens[0]] = run
        return upper

    def _drop_oldest(self) -> None:
        oldest, _ = self._runs.popitem(last=False)
        del self._below(oldest.parent)[oldest.tokens[0]]
        self._held -= oldest.size()
