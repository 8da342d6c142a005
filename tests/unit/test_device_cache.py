"""DeviceCache against DynamicCache: the same content after any sequence of operations."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from rm_abstract.kv.device_cache import (
    CacheNotes,
    DeviceCache,
    DeviceLayer,
    capacity_for,
    from_dynamic,
)

SHAPE = (2, 4, 4, torch.float32)


def pair(layers: int = 2) -> tuple[Any, Any]:
    plain = DynamicCache()
    plain.layers = [DynamicLayer() for _ in range(layers)]
    return plain, DeviceCache([DeviceLayer() for _ in range(layers)], [SHAPE] * layers)


def equal(plain: Any, device: Any) -> None:
    assert device.get_seq_length() == plain.get_seq_length()
    for a, b in zip(plain.layers, device.layers, strict=True):
        if plain.get_seq_length() == 0:
            continue
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        assert a.get_mask_sizes(3) == b.get_mask_sizes(3)


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_operations_leaves_the_same_content(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    plain, device = pair()
    batch = chance.choice([1, 2, 3])
    for _ in range(25):
        length = plain.get_seq_length()
        action = chance.choice(["update"] * 4 + ["crop", "reorder", "repeat", "select", "copy"])
        if action == "update" or length == 0:
            new = chance.choice([1, 1, 2, 70])
            for layer in range(2):
                keys, values = torch.randn(2, batch, 2, new, 4)
                got = device.update(keys, values, layer)
                expected = plain.update(keys, values, layer)
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        elif action == "crop":
            count = chance.randrange(0, length)
            for cache in (plain, device):
                cache.crop(-count)
        elif action == "reorder":
            order = torch.tensor([chance.randrange(batch) for _ in range(batch)])
            for cache in (plain, device):
                cache.reorder_cache(order)
        elif action == "repeat" and batch < 6:
            for cache in (plain, device):
                cache.batch_repeat_interleave(2)
            batch *= 2
        elif action == "select":
            kept = torch.tensor(sorted(chance.sample(range(batch), max(1, batch // 2))))
            for cache in (plain, device):
                cache.batch_select_indices(kept)
            batch = len(kept)
        else:
            before = device
            device = copy.deepcopy(device) if chance.random() < 0.5 else reloaded(device)
            before.layers[0].key_buffer.fill_(7)
        equal(plain, device)


def reloaded(cache: Any) -> Any:
    return pickle.loads(pickle.dumps(cache))


def test_reset_empties_it() -> None:
    plain, device = pair(1)
    for cache in (plain, device):
        cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
        cache.reset()
    assert device.get_seq_length() == 0
    if plain.get_seq_length() == 0:  # older transformers writes zeros and keeps the length
        equal(plain, device)


def test_a_crop_by_a_tensor_leaves_a_number() -> None:
    _, device = pair(1)
    device.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    device.layers[0].crop(torch.tensor(-1))
    assert type(device.layers[0].length) is int and device.get_seq_length() == 2


def test_capacities_are_few_and_never_short() -> None:
    seen = {capacity_for(length) for length in range(5000)}
    assert seen == {64, 128, 256, 512, 1024, 2048, 3072, 4096, 5120}
    assert all(capacity_for(length) >= length for length in range(5000))


def test_room_is_made_before_a_step_and_content_survives_it() -> None:
    _, cache = pair(1)
    cache.prepare(1, cache.expected, 10)
    assert cache.capacity == 64 and cache.length == 0
    cache.update(torch.ones(1, 2, 60, 4), torch.ones(1, 2, 60, 4), 0)
    cache.prepare(1, cache.expected, 5)
    assert cache.capacity == 128 and cache.length == 60
    assert float(cache.layers[0].keys.sum()) == 60 * 8
    assert float(cache.layers[0].key_buffer.sum()) == 60 * 8  # the rest is zero, not anything


def test_only_empty_caches_of_known_layers_are_replaced() -> None:
    notes = CacheNotes()
    plain, _ = pair()
    plain.layers[1] = DynamicSlidingWindowLayer(sliding_window=4)
    made = from_dynamic(plain, SHAPE, 0, notes)
    assert made is not None and made.is_sliding == [False, True]
    plain.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    assert from_dynamic(plain, SHAPE, 0, notes) is None
    fresh, _ = pair()
    assert from_dynamic(fresh, SHAPE, 0, CacheNotes(refused=True)) is None
    assert from_dynamic(DynamicCache(), SHAPE, 0, notes) is None


def test_other_shapes_than_expected_are_learned() -> None:
    notes = CacheNotes()
    plain, _ = pair()
    cache = from_dynamic(plain, SHAPE, 0, notes)
    assert cache is not None
    cache.prepare(1, cache.expected, 3)
    for layer in range(2):
        cache.update(torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 6), layer)
    assert cache.shapes() == ((1, 8, 6, torch.float32),) * 2
    cache.learn()
    again = from_dynamic(pair()[0], SHAPE, 0, notes)
    assert again is not None and again.expected == cache.shapes()
