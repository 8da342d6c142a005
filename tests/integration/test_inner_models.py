"""Models inside a transformers model that its methods call on their own: the encoder of generate,
the towers of get_image_features."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import rm_abstract as rm
from rm_abstract.hooks.host import SLOT

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
EYE: dict[str, Any] = {
    **{k: v for k, v in SMALL.items() if k != "vocab_size"},
    "image_size": 16,
    "patch_size": 4,
}
PICTURES = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def session() -> Iterator[Any]:
    torch.manual_seed(0)
    yield rm.init("cpu", fallback="allow")
    rm.shutdown()


def clip() -> CLIPModel:
    text = {**SMALL, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=EYE)).eval()


def bart() -> BartForConditionalGeneration:
    config = BartConfig(
        **{"vocab_size": 50, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64},
        **{"decoder_ffn_dim": 64, "max_position_embeddings": 32, "forced_eos_token_id": None},
        eos_token_id=None,
    )
    return BartForConditionalGeneration(config).eval()


def record(model: torch.nn.Module) -> dict[str, Any]:
    (found,) = rm.explain(model).models
    return found


def inner(model: torch.nn.Module, name: str) -> dict[str, Any]:
    return next((part for part in record(model)["inner"] if part["part"] == name), {})


def features(model: CLIPModel) -> torch.Tensor:
    with torch.no_grad():
        found: Any = model.get_image_features(PICTURES)
    return getattr(found, "pooler_output", found)


def test_a_model_made_from_a_configuration_is_served_whole() -> None:
    """Its constructor makes its towers by _from_config: they were caught, and it was not."""
    model = clip()
    ids = torch.tensor([[3, 4, 2]])
    with rm.disabled(), torch.no_grad():
        expected = model(input_ids=ids, pixel_values=PICTURES).logits_per_image
    for _ in range(3):
        with torch.no_grad():
            actual = model(input_ids=ids, pixel_values=PICTURES).logits_per_image
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert record(model)["routed"] == 2
    assert not record(model)["inner"]  # what a call of the whole runs is no call of theirs


def test_a_tower_that_is_called_on_its_own_is_served() -> None:
    model = clip()
    with rm.disabled():
        expected = features(model)
    for _ in range(3):
        torch.testing.assert_close(features(model), expected, rtol=1e-4, atol=1e-5)
    assert inner(model, "vision_model")["routed"] == 2
    assert "vision_model, called on its own: 2 calls ran compiled" in str(rm.explain(model))


@pytest.mark.parametrize("way", ["data", "copy_", "load", "new module"])
def test_a_change_of_the_towers_weights_is_seen(way: str) -> None:
    model = clip()
    features(model)
    features(model)
    first = model.vision_model.embeddings.patch_embedding
    if way == "data":
        first.weight.data.mul_(3)
    elif way == "copy_":
        with torch.no_grad():
            first.weight.copy_(first.weight * 3)
    elif way == "load":
        state = {k: v * 2 for k, v in model.vision_model.state_dict().items()}
        model.vision_model.load_state_dict(
            {k: v if v.is_floating_point() else v // 2 for k, v in state.items()}
        )
    else:
        model.vision_model = clip().vision_model
    with rm.disabled():
        expected = features(model)
    for _ in range(3):
        torch.testing.assert_close(features(model), expected, rtol=1e-4, atol=1e-5)


def test_the_encoder_runs_compiled_in_generate() -> None:
    model, ids = bart(), torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    given: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with rm.disabled():
        expected = model.generate(ids, **given)
    for _ in range(3):
        assert torch.equal(model.generate(ids, **given), expected)
    assert inner(model, "model.encoder")["routed"] == 2


def test_an_inner_model_leaves_calls_of_the_whole_alone() -> None:
    """The whole runs in PyTorch (autocast): its encoder does, too, and nothing is compiled."""
    model, ids = bart(), torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(ids)
    with torch.no_grad():
        with rm.disabled():
            model(ids)
        for _ in range(2):
            model(ids)
    assert record(model)["routed"] == 1
    assert not record(model)["inner"]


def test_a_base_model_has_no_second_program() -> None:
    model = BertForSequenceClassification(BertConfig(**SMALL)).eval()
    assert vars(model).get(SLOT) is not None
    assert vars(model.bert).get(SLOT) is None


def test_copies_and_pickles_leave_without_routers() -> None:
    model = clip()
    features(model)
    copied = copy.deepcopy(model)
    assert vars(copied.vision_model).get(SLOT) is None
    with torch.no_grad():
        copied.vision_model.embeddings.patch_embedding.weight.mul_(2)
    with rm.disabled():
        expected = features(copied)
    torch.testing.assert_close(features(copied), expected, rtol=1e-4, atol=1e-5)


def test_the_session_takes_every_router_out() -> None:
    model = clip()
    features(model)
    rm.shutdown()
    assert all(vars(part).get(SLOT) is None for part in model.modules())


def test_other_devices_get_no_second_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_SIM_COMPILE_S", "0")
    model = clip()
    assert vars(model.vision_model).get(SLOT) is not None
    rm.switch_device("sim:0")
    assert vars(model.vision_model).get(SLOT) is None
    rm.switch_device("cpu")
    with rm.disabled():
        expected = features(model)
    for _ in range(2):
        torch.testing.assert_close(features(model), expected, rtol=1e-4, atol=1e-5)
    assert inner(model, "vision_model")["routed"] == 1


def test_a_tower_outlives_the_whole() -> None:
    model = clip()
    with rm.disabled():
        expected = features(model)
    features(model)
    tower, projection = model.vision_model, model.visual_projection
    del model
    gc.collect()
    with torch.no_grad():
        for _ in range(2):
            actual = projection(tower(pixel_values=PICTURES).pooler_output)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_call_of_the_whole_that_raises_leaves_towers_served() -> None:
    """An error inside of the original must not leave its mark on the thread."""
    model = clip()
    with rm.disabled():
        expected = features(model)
    for _ in range(3):
        with pytest.raises(ValueError), torch.no_grad():
            model(input_ids=torch.tensor([[3, 4, 2]]), pixel_values=PICTURES[:, :, :7, :7])
    for _ in range(2):
        torch.testing.assert_close(features(model), expected, rtol=1e-4, atol=1e-5)
    assert inner(model, "vision_model")["routed"] == 1


def test_threads_that_call_the_whole_and_its_tower() -> None:
    model = clip()
    ids = torch.tensor([[3, 4, 2]])
    with rm.disabled(), torch.no_grad():
        expected = model(input_ids=ids, pixel_values=PICTURES).logits_per_image
        alone = features(model)
    wrong: list[str] = []

    def calls(whole: bool) -> None:
        for _ in range(6):
            with torch.no_grad():
                if whole:
                    found = model(input_ids=ids, pixel_values=PICTURES).logits_per_image
                else:
                    found = features(model)
            if not torch.allclose(found, expected if whole else alone, rtol=1e-4, atol=1e-4):
                wrong.append("whole" if whole else "tower")

    threads = [threading.Thread(target=calls, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_pictures_of_a_prompt_reach_the_program_of_the_whole() -> None:
    """generate hands over what the tower gave, hidden states of all layers among it."""
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**EYE),
        text_config=LlamaConfig(**SMALL, num_key_value_heads=2),
        image_token_id=49,
    )
    model = LlavaForConditionalGeneration(config).eval()
    ids = torch.cat([torch.full((1, 16), 49), torch.tensor([[3, 4, 5]])], 1)
    given: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}

    def generated(pictures: torch.Tensor) -> torch.Tensor:
        return model.generate(input_ids=ids, pixel_values=pictures, **given)

    for pictures in (PICTURES[:1], PICTURES[1:], PICTURES[:1]):
        with rm.disabled():
            expected = generated(pictures)
        assert torch.equal(generated(pictures), expected)
    assert not any(reason["code"] == "RM104" for reason in record(model)["reasons"])
    assert inner(model, "model.vision_tower")["routed"] == 2
