"""Models with a sliding window return caches of windows: served calls return what PyTorch does."""

import subprocess
import sys

import pytest
import torch
import transformers as hf

import rm_abstract as rm
from rm_abstract.kv import window_cache

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 8,
}


pytestmark = pytest.mark.usefixtures("closed_session")


def mistral(**more):
    return hf.MistralForCausalLM(hf.MistralConfig(**SIZES, **more)).eval()


def gemma2():  # every second layer has a window
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, head_dim=8)).eval()


def gemma3():
    config = hf.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window_pattern=2)
    return hf.Gemma3ForCausalLM(config).eval()


def ids(length, rows=2, seed=1):
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def state(cache):
    rows = []
    for layer in cache.layers:
        rows.append((type(layer), layer.get_seq_length(), layer.keys, layer.values))
        rows.append((getattr(layer, "sliding_window", None), *layer.get_mask_sizes(1)))
    return rows


def assert_equal_caches(found, expected):
    assert vars(found).keys() == vars(expected).keys()
    for a, b in zip(found.layers, expected.layers, strict=True):
        assert vars(a).keys() == vars(b).keys()
    for a, b in zip(state(found), state(expected), strict=True):
        for x, y in zip(a, b, strict=True):
            if isinstance(x, torch.Tensor):
                assert x.shape == y.shape
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
            else:
                assert x == y


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [mistral, gemma2, gemma3])
@torch.no_grad()
def test_a_cache_of_windows_comes_back_as_pytorch_makes_it(make):
    torch.manual_seed(0)
    model = make()
    rm.init("cpu")
    rm.accelerate(model)
    lengths = [5, 8, 20, 7, 9, 21]  # the window holds 7 positions
    for length in lengths:
        found = model(ids(length))
        with rm.disabled():
            expected = model(ids(length))
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
        assert_equal_caches(found.past_key_values, expected.past_key_values)
    report = rm.explain(model).to_dict()["models"][0]
    assert report["routed"] >= len(lengths) - 3, report


@torch.no_grad()
def test_generation_goes_on_from_a_returned_cache_of_windows():
    torch.manual_seed(0)
    model = mistral()
    rm.init("cpu")
    rm.accelerate(model)
    for length in (5, 12):
        prompt = ids(length)
        for _ in range(3):  # the last ones by a program
            found = model(prompt)
        with rm.disabled():
            expected = model(prompt)
        for step in range(10):  # across the window's end
            token = ids(1, seed=50 + step)
            found = model(token, past_key_values=found.past_key_values)
            with rm.disabled():
                expected = model(token, past_key_values=expected.past_key_values)
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
            assert_equal_caches(found.past_key_values, expected.past_key_values)


@torch.no_grad()
def test_returned_caches_of_two_calls_share_nothing():
    torch.manual_seed(0)
    model = mistral()
    rm.init("cpu")
    rm.accelerate(model)
    first = [model(ids(6)) for _ in range(3)][-1].past_key_values
    before = [t.clone() for t in window_cache.read(first)[0]]
    second = model(ids(6, seed=2)).past_key_values
    for layer in second.layers:
        layer.keys.zero_()
    for held, kept in zip(window_cache.read(first)[0], before, strict=True):
        assert torch.equal(held, kept)


CHILD = """
import sys, torch
import rm_abstract as rm
sys.path.insert(0, sys.argv[1])
from test_window_caches import *
torch.manual_seed(0)
model = mistral()
rm.init("cpu")
rm.accelerate(model)
with torch.no_grad():
    found = model(ids(9))
    with rm.disabled():
        expected = model(ids(9))
assert_equal_caches(found.past_key_values, expected.past_key_values)
entry = rm.explain(model).to_dict()["models"][0]
print(entry["routed"], [e["cache"] for e in entry["entries"]])
"""


@pytest.mark.sampled(4, of="second process")
def test_a_second_process_finds_the_program(tmp_path, monkeypatch):
    from pathlib import Path

    monkeypatch.setenv("RM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("RM_CACHE", "1")
    printed = [
        subprocess.run(
            [sys.executable, "-c", CHILD, str(Path(__file__).parent)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert "hit" in printed[-1], printed


def test_gradients_flow_through_a_served_call_with_a_cache_of_windows():
    torch.manual_seed(0)
    model = mistral()
    rm.init("cpu")
    rm.accelerate(model)
    for _ in range(3):
        model.zero_grad()
        model(ids(9)).logits.square().mean().backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    with rm.disabled():
        model(ids(9)).logits.square().mean().backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-6)
