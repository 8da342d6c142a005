"""Encoders that generate calls and towers that are called alone, of models that lie on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
rm = pytest.importorskip("rm_abstract")

pytestmark = pytest.mark.cuda

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    torch.manual_seed(0)
    rm.init("gpu:0", fallback="allow", compile_options={"when_slower": "compiled"})
    yield
    rm.shutdown()


def inner_rows() -> list[dict[str, Any]]:
    models = rm.explain().to_dict()["models"]
    return [row for model in models for row in model.get("inner", ())]


def bart() -> Any:
    config = transformers.BartConfig(
        **{"vocab_size": 50, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 128},
        **{"decoder_ffn_dim": 128, "max_position_embeddings": 64},
    )
    return transformers.BartForConditionalGeneration(config).eval()


def clip() -> Any:
    text = {**SMALL, "vocab_size": 50, "max_position_embeddings": 16, "eos_token_id": 2}
    eye = {**SMALL, "image_size": 32, "patch_size": 8}
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=eye)
    ).eval()


def test_the_encoder_of_generate_is_compiled_and_follows_its_weights() -> None:
    model = bart().cuda()
    ids = torch.randint(4, 50, (2, 9)).cuda()
    for change in (False, True):
        if change:
            with torch.no_grad():
                model.model.encoder.layers[0].fc1.weight.mul_(-1.5)
        for _ in range(3):
            got = model.generate(ids, max_new_tokens=8, do_sample=False)
        with rm.disabled():
            wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
        assert torch.equal(got, wanted)
    assert any(row["entries"] for row in inner_rows())


def test_a_tower_is_served_on_the_gpu_and_left_on_the_cpu() -> None:
    model, pictures = clip(), torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        for _ in range(2):
            model.get_image_features(pixel_values=pictures)
        rows = inner_rows()
        assert not any(row["entries"] for row in rows)
        assert any(reason["code"] == "RM119" for row in rows for reason in row["reasons"])
        model.cuda()
        for _ in range(3):
            got = model.get_image_features(pixel_values=pictures.cuda())
        with rm.disabled():
            wanted = model.get_image_features(pixel_values=pictures.cuda())
    got, wanted = (x if torch.is_tensor(x) else x.pooler_output for x in (got, wanted))
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
    assert any(row["entries"] for row in inner_rows())
