"""The tree of earlier texts: what it lends is what was kept, once, within its bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from rm_abstract.generation.prefixes import Prefixes
from rm_abstract.kv.device_cache import DeviceCache, DeviceLayer

SHAPE = (2, 3, 5, torch.float32)
TOKEN_BYTES = 2 * (3 + 5) * 4 * 2  # heads, sizes of a key and a value, float32, two layers


def cache() -> DeviceCache:
    return DeviceCache([DeviceLayer(), DeviceLayer()], [SHAPE, SHAPE])


def value(tokens: Sequence[int], layer: int) -> float:
    """Keys and values of a position depend on all tokens up to it."""
    return float(hash((layer, *tokens)) % 1_000_003)


def content(tokens: Sequence[int]) -> Any:
    def read(begin: int, end: int) -> list[torch.Tensor]:
        found = []
        for layer in range(2):
            row = [value(tokens[: at + 1], layer) for at in range(begin, end)]
            line = torch.tensor(row)[None, :, None]
            found += [line.expand(2, -1, 3).clone(), -line.expand(2, -1, 5).clone()]
        return found

    return read


def right(tokens: Sequence[int], found: DeviceCache, length: int) -> bool:
    want = content(tokens)(0, length)
    got = [b for layer in found.layers for b in (layer.keys, layer.values)]
    return all(torch.equal(a[0], b) for a, b in zip(got, want, strict=True))


def test_what_is_lent_is_what_was_kept_and_memory_is_bounded(seed: int) -> None:
    draw = random.Random(seed)
    most = 400 * TOKEN_BYTES
    prefixes, texts, lent = Prefixes(most), [[1]], 0
    for _ in range(600):
        text = list(draw.choice(texts))  # few words and common beginnings: runs are split often
        text = text[: draw.randrange(len(text) + 1)]
        text += [draw.randrange(2) for _ in range(draw.randrange(1, 60))]
        texts.append(text)
        if draw.random() < 0.5:
            prefixes.insert(text, content(text))
        else:
            found, gained = cache(), 0
            for end in sorted(draw.sample(range(1, len(text) + 1), min(len(text), 2))):
                gained += prefixes.extend(text[:end], found)
                assert found.length == gained < end
            assert not gained or right(text, found, gained)
            lent += gained
        assert prefixes.held_bytes <= most
        assert prefixes.held_bytes == TOKEN_BYTES * sum(len(r.tokens) for r in prefixes._runs)
        for run in prefixes._runs:
            assert run.parent is None or run.parent.children[run.tokens[0]] is run
    assert lent > 100, "few texts had a beginning in common: nothing was tested"


def test_what_texts_have_in_common_is_held_once() -> None:
    prefixes, common = Prefixes(1 << 20), list(range(500))
    for number in range(20):
        text = [*common, *[1000 + number] * 30]
        prefixes.insert(text, content(text))
    assert prefixes.held_bytes == TOKEN_BYTES * (500 + 20 * 30)
    found = cache()
    assert prefixes.extend([*common, *[1007] * 31], found) == 530
    assert right([*common, *[1007] * 31], found, 530)


def test_what_was_used_last_stays_longest() -> None:
    prefixes = Prefixes(100 * TOKEN_BYTES)
    old, new, third = [1] * 40, [2] * 40, [3] * 40
    prefixes.insert(old, content(old))
    prefixes.insert(new, content(new))
    assert prefixes.extend([*old, 9], cache()) == 40
    prefixes.insert(third, content(third))
    known = [prefixes.extend([*text, 9], cache()) for text in (old, new, third)]
    assert known == [40, 0, 40]
    huge = [4] * 101
    prefixes.insert(huge, content(huge))
    assert prefixes.extend([*old, 9], cache()) == 40, "what does not fit drives nothing out"
