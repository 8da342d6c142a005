"""What `bench decode` counts, on tiny models."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rm_abstract.bench import decode, decoders, probes  # noqa: E402

TINY = decoders.Shape("tiny", 2, 32, 48, 4, 2, vocabulary=64)


def test_a_token_reads_every_linear_weight_and_not_the_embedding() -> None:
    model = TINY.model("float32")
    linear = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)
    )
    assert TINY.linear_parameters == linear


def test_products_of_a_prompt_are_those_pytorch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    length = 8
    model = TINY.model("float32")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.ones(1, length, dtype=torch.long), logits_to_keep=1)
    # Its counter knows no CPU attention: ours is the causal half of 4 * hidden * length^2 a layer.
    attention = 2.0 * TINY.layers * TINY.hidden * length * length
    counted = TINY.prefill_operations(length) - attention
    # Older transformers make the rotary angles by a product: head_dim / 2 frequencies a position.
    angles = 2 * (TINY.hidden // TINY.heads // 2) * length
    assert counter.get_total_flops() - counted in (0, angles)


def test_key_and_value_bytes_count_both_and_only_their_heads() -> None:
    assert TINY.kv_bytes(10, 16) == 2 * 2 * 2 * 8 * 10 * 2


def test_tokens_agree_up_to_the_first_that_differs() -> None:
    assert decode.same_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert decode.same_prefix([1, 2], [1, 2]) == 2
    assert decode.same_prefix([1, 2], None) is None


def test_a_generator_returns_the_tokens_it_was_asked_for() -> None:
    model = TINY.model("float32")
    generator = decoders.HuggingFace(model)
    sample = generator.generate([5, 6, 7], 6)
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, min_new_tokens=6)
    assert sample.tokens == expected[0, 3:].tolist()
    assert sample.first_s > 0


def test_dumped_weights_read_back_bit_for_bit(tmp_path) -> None:
    import json

    model = TINY.model("bfloat16")
    decoders.dump(model, tmp_path)
    index = json.loads((tmp_path / "model.json").read_text())["tensors"]
    content = (tmp_path / "weights.bin").read_bytes()
    for name, tensor in model.state_dict().items():
        data = content[index[name]["offset"] :][: tensor.numel() * 4]
        again = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(tensor.shape)
        assert torch.equal(again.to(torch.bfloat16), tensor)


def test_the_read_probe_gives_bytes_a_second_with_and_without_huge_pages() -> None:
    for huge in (True, False):
        assert probes.ReadProbe(huge, 1 << 22).rate() > 1e6
