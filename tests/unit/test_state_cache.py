"""Caches of state-space models as tensors, and back."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from rm_abstract.base.decline import Decline
from rm_abstract.kv import kv_cache


def filled(layers: int = 2) -> Any:
    cache = DynamicCache()
    cache.layers = [LinearAttentionLayer() for _ in range(layers)]
    for number in range(layers):
        cache.update_conv_state(torch.randn(2, 6, 4), number)
        cache.update_recurrent_state(torch.randn(2, 6, 3), number)
    return cache


def test_states_are_read_in_order_and_copies_are_copies() -> None:
    cache = filled()
    tensors = kv_cache.read(cache)
    assert [tuple(t.shape) for t in tensors] == [(2, 6, 4), (2, 6, 3)] * 2
    before = [t.clone() for t in tensors]
    copy = kv_cache.copied(cache)
    for number in range(2):  # transformers writes in place
        cache.update_conv_state(torch.randn(2, 6, 1), number)
        cache.update_recurrent_state(torch.randn(2, 6, 3), number)
    assert all(torch.equal(a, b) for a, b in zip(kv_cache.read(copy), before, strict=True))
    assert not torch.equal(kv_cache.read(cache)[0], before[0])


def test_committed_states_are_what_transformers_goes_on_with() -> None:
    cache, other = filled(), filled()
    kv_cache.commit(cache, [t.clone() for t in kv_cache.read(other)])
    new = torch.randn(2, 6, 1)
    assert torch.equal(cache.update_conv_state(new, 1), other.update_conv_state(new, 1))
    assert cache.has_previous_state(0) and cache.has_previous_state(1)


def test_caches_without_states_yet_and_hybrids_are_declined() -> None:
    fresh = DynamicCache()
    fresh.layers = [LinearAttentionLayer()]
    assert isinstance(kv_cache.read(fresh), Decline)
    hybrid = filled()
    hybrid.layers.append(DynamicCache().layer_class_to_replicate())
    assert isinstance(kv_cache.read(hybrid), Decline)
    recording = filled()
    recording.activate_past_recording()
    assert isinstance(kv_cache.read(recording), Decline)
