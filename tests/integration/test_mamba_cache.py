"""The cache that a served state-space model returns is of the kind that PyTorch returns."""

from __future__ import annotations

import torch

import rm_abstract as rm
from rm_abstract.hooks.attaching import router_of


def test_a_served_call_returns_a_cache_of_states_that_goes_on() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    rm.init("cpu")
    try:
        torch.manual_seed(0)
        config = MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=8)
        model = MambaForCausalLM._from_config(config).eval()
        ids = torch.randint(0, 64, (1, 7))
        with torch.no_grad():
            for _ in range(3):
                ours = model(ids, use_cache=True)
            assert router_of(model).routed_calls >= 2
            with rm.disabled():
                theirs = model(ids, use_cache=True)
            assert type(ours.cache_params) is type(theirs.cache_params)
            for mine, other in zip(
                ours.cache_params.layers, theirs.cache_params.layers, strict=True
            ):
                assert type(mine) is type(other)
                torch.testing.assert_close(mine.conv_states[0], other.conv_states[0])
                torch.testing.assert_close(mine.recurrent_states[0], other.recurrent_states[0])
            token = ours.logits[:, -1:].argmax(-1)
            with rm.disabled():  # PyTorch goes on from either
                one = model(token, cache_params=ours.cache_params, use_cache=True).logits
                two = model(token, cache_params=theirs.cache_params, use_cache=True).logits
        torch.testing.assert_close(one, two)
    finally:
        rm.shutdown()
