"""Prompts with pictures, of models made from a configuration: they are compiled, their check of the
number of picture tokens with them (decision 0233)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import rm_abstract as rm

transformers = pytest.importorskip("transformers", minversion="5.0")

PICTURE = 90
TEXT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEEING = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
TOKEN = {"image_token_index": PICTURE, "image_token_id": PICTURE}


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    torch.manual_seed(0)
    rm.init("cpu")
    yield
    rm.shutdown()


def prompt(pictures: int) -> torch.Tensor:
    return torch.tensor([[1, 5, 6] + [PICTURE] * pictures + list(range(7, 13))])


def llava() -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SEEING, projection_dim=32),
        text_config=transformers.LlamaConfig(**TEXT, num_key_value_heads=2),
        vision_feature_layer=-1,
        **TOKEN,
    )
    return transformers.LlavaForConditionalGeneration(config)


def vipllava() -> Any:
    config = transformers.VipLlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SEEING, projection_dim=32),
        text_config=transformers.LlamaConfig(**TEXT, num_key_value_heads=2),
        vision_feature_layers=[-1, -2],
        **TOKEN,
    )
    return transformers.VipLlavaForConditionalGeneration(config)


def paligemma() -> Any:
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**SEEING),
        text_config=transformers.GemmaConfig(**TEXT, num_key_value_heads=2, head_dim=8),
        projection_dim=32,
        hidden_size=32,
        **TOKEN,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, 3, 32, 32)}


def fuyu() -> Any:
    config = transformers.FuyuConfig(
        **TEXT,
        image_size=32,
        patch_size=8,
        image_token_id=PICTURE,
        text_config={"model_type": "persimmon", **TEXT},
    )
    return transformers.FuyuForCausalLM(config)


def pixels_and_kinds() -> dict[str, torch.Tensor]:
    return {**pixels(), "token_type_ids": torch.zeros(1, 1, dtype=torch.int64)}


def internvl() -> Any:
    seeing = {**SEEING, "image_size": [32, 32], "patch_size": [8, 8]}
    config = transformers.InternVLConfig(
        vision_config=seeing,
        text_config={"model_type": "llama", **TEXT},
        image_token_id=PICTURE,
        image_seq_length=4,
    )
    return transformers.InternVLForConditionalGeneration(config)


def patches() -> dict[str, torch.Tensor]:
    return {"image_patches": torch.randn(1, 16, 3 * 64)}


GRID = {**TOKEN, "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}
PARTS = {"image_sizes": torch.tensor([[30, 60]])}
TURNED = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
MERGED = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
KINDS = {"video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}


def llava_next() -> Any:
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**SEEING, projection_dim=32),
        text_config=transformers.LlamaConfig(**TEXT, num_key_value_heads=2),
        vision_feature_layer=-1,
        **GRID,
    )
    return transformers.LlavaNextForConditionalGeneration(config)


def onevision() -> Any:
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**SEEING),
        text_config=transformers.Qwen2Config(**TEXT, num_key_value_heads=2),
        vision_feature_layer=-1,
        **GRID,
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config)


def qwen2() -> Any:
    config = transformers.Qwen2VLConfig(
        vision_config={**MERGED, "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4},
        text_config={**TEXT, "num_key_value_heads": 2, "rope_parameters": TURNED},
        image_token_id=PICTURE,
        **KINDS,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen2_5() -> Any:
    seeing = {**MERGED, "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
    config = transformers.Qwen2_5_VLConfig(
        vision_config={
            **seeing,
            "out_hidden_size": 32,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        text_config={**TEXT, "num_key_value_heads": 2, "rope_parameters": TURNED},
        image_token_id=PICTURE,
        **KINDS,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def idefics(name: str) -> Any:
    text = {"model_type": "llama", **TEXT, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(
        vision_config=SEEING, text_config=text, image_token_id=PICTURE, scale_factor=2
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def idefics3() -> Any:
    return idefics("Idefics3")


def smolvlm() -> Any:
    return idefics("SmolVLM")


def gemma3() -> Any:
    layers = ["sliding_attention", "full_attention"]
    text = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**SEEING).to_dict(),
        text_config=transformers.Gemma3TextConfig(**text, sliding_window=16, layer_types=layers),
        mm_tokens_per_image=4,
        boi_token_index=91,
        eoi_token_index=92,
        **TOKEN,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def seen_as_one() -> dict[str, torch.Tensor]:
    return {**pixels(), "token_type_ids": (prompt(4) == PICTURE).long()}


def parts() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, 3, 3, 32, 32), **PARTS}


def cut() -> dict[str, torch.Tensor]:
    kinds = (prompt(4) == PICTURE).int()
    grid = torch.tensor([[1, 4, 4]])
    return {
        "pixel_values": torch.randn(16, 384),
        "image_grid_thw": grid,
        "mm_token_type_ids": kinds,
    }


def padded() -> dict[str, torch.Tensor]:
    shown = torch.ones(1, 2, 32, 32, dtype=torch.int64)
    return {"pixel_values": torch.randn(1, 2, 3, 32, 32), "pixel_attention_mask": shown}


def outcome(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            return call()
        except (ValueError, RuntimeError) as error:
            return error


def agree(call: Callable[[], Any]) -> Any:
    with rm.disabled():
        wanted = outcome(call)
    got = outcome(call)
    if isinstance(wanted, Exception):
        assert type(got) is type(wanted) and str(got) == str(wanted)
    else:
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
    return wanted


def routed(model: Any) -> int:
    return int(rm.explain(model).to_dict()["models"][0]["routed"])


@pytest.mark.parametrize(
    ("made", "picture"),
    [
        (llava, pixels),
        (vipllava, pixels),
        (paligemma, pixels_and_kinds),
        (internvl, pixels),
        (fuyu, patches),
        (gemma3, seen_as_one),
    ],
)
def test_a_prompt_is_compiled_and_refuses_another_number_of_picture_tokens(
    made: Callable[[], Any], picture: Callable[[], dict[str, torch.Tensor]]
) -> None:
    model, seen = made().eval(), picture()
    count = 4 if made in (internvl, gemma3) else 16

    def call(pictures: int) -> Any:
        ids = prompt(pictures)
        kinds = {n: torch.zeros_like(ids) for n in seen if n == "token_type_ids"}
        if made is gemma3:  # tokens of one picture see each other
            kinds = {n: (ids == PICTURE).long() for n in kinds}
        return agree(lambda: model(input_ids=ids, **{**seen, **kinds}).logits)

    for _ in range(3):
        assert not isinstance(call(count), Exception)
    before = routed(model)
    for pictures in (count - 1, count + 1, 0):
        error = call(pictures)
        assert isinstance(error, ValueError) and "do not match" in str(error)
    assert not isinstance(call(count), Exception)
    assert routed(model) == before + 1


def test_generate_compiles_the_prompt_and_refuses_the_same() -> None:
    model, seen = llava().eval(), pixels()
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for _ in range(3):
        agree(lambda: model.generate(input_ids=prompt(16), **seen, **options))
    before = routed(model) + loop_tokens(model)
    error = agree(lambda: model.generate(input_ids=prompt(15), **seen, **options))
    assert isinstance(error, ValueError) and "do not match" in str(error)
    agree(lambda: model.generate(input_ids=prompt(16), **seen, **options))
    assert routed(model) + loop_tokens(model) == before + 5


def test_a_decoder_that_checks_its_tokens_raises_its_own_error_in_the_middle_of_a_text() -> None:
    class Checking(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            allowed = (input_ids != self.config.forbidden).all()
            torch._assert_async(allowed, "a forbidden token")
            return super().forward(input_ids=input_ids, **kwargs)

    config = transformers.LlamaConfig(**{**TEXT, "eos_token_id": None, "forbidden": 99})
    model = Checking(config).eval()
    prompts = [torch.tensor([[1, a, b, 7]]) for a in range(8, 16) for b in (6, 9)]
    options = {"max_new_tokens": 10, "do_sample": False}

    def text(prompt: torch.Tensor) -> Any:
        return model.generate(prompt, **options)

    with rm.disabled(), torch.no_grad():
        made = [set(text(prompt)[0, 4:-1].tolist()) for prompt in prompts]
    among = {token for tokens in made for token in tokens} - set(range(1, 17))
    count = {token: sum(token in tokens for tokens in made) for token in among}
    config.forbidden = min(among, key=lambda token: abs(count[token] - len(prompts) // 2))
    assert 0 < count[config.forbidden] < len(prompts)

    def judged(prompt: torch.Tensor) -> bool:
        """Whether it is refused, as eager does."""
        found = []
        for accelerated in (False, True):
            with torch.no_grad(), nullcontext() if accelerated else rm.disabled():
                try:
                    found.append(text(prompt))
                except RuntimeError as error:
                    found.append(error)
        wanted, got = found
        if torch.is_tensor(wanted):
            assert torch.is_tensor(got) and torch.equal(got, wanted)
            return False
        assert type(got) is RuntimeError and str(got) == str(wanted)
        return True

    for _ in range(2):
        refused = [judged(prompt) for prompt in prompts]
        assert sum(refused) == count[config.forbidden]
    assert routed(model) > 50


def loop_tokens(model: Any) -> int:
    return int(rm.explain(model).to_dict()["models"][0]["loop_tokens"])


@pytest.mark.parametrize(
    ("made", "picture", "count"),
    [
        (llava, pixels, 16),
        (internvl, pixels, 4),
        (llava_next, parts, 52),
        (onevision, parts, 52),
        (qwen2, cut, 4),
        (qwen2_5, cut, 4),
        (gemma3, seen_as_one, 4),
    ],
)
def test_tokens_behind_a_picture_are_made_by_the_loop(
    made: Callable[[], Any], picture: Callable[[], dict[str, torch.Tensor]], count: int
) -> None:
    model = made().eval()
    model.generation_config.eos_token_id = None
    for number in range(4):
        seen = picture()
        options = {"max_new_tokens": 8, "do_sample": number % 2 == 1, "pad_token_id": 0}

        def text(seen: Any = seen, options: Any = options) -> Any:
            torch.manual_seed(5)
            return model.generate(input_ids=prompt(count), **seen, **options)

        assert not isinstance(agree(text), Exception)
    assert loop_tokens(model) > 15
    kinds = {n: t[:, 1:] if n.endswith("token_type_ids") else t for n, t in seen.items()}
    error = agree(lambda: model.generate(input_ids=prompt(count - 1), **kinds, max_new_tokens=4))
    assert isinstance(error, (ValueError, RuntimeError))


@pytest.mark.parametrize("made", [llava_next, onevision])
def test_prompts_are_compiled_for_the_sizes_of_their_pictures(made: Callable[[], Any]) -> None:
    model, sizes = made().eval(), torch.tensor([[30, 60]])
    tokens = {(30, 60): 52, (60, 30): 56, (20, 64): 34}

    def call(height: int, width: int) -> Any:
        sizes.copy_(torch.tensor([[height, width]]))  # in place: the same tensor
        given = {"pixel_values": torch.randn(1, 3, 3, 32, 32), "image_sizes": sizes}
        ids = prompt(tokens[height, width])
        return agree(lambda: model(input_ids=ids, **given).logits)

    for size in tokens:
        for _ in range(2):
            assert not isinstance(call(*size), Exception)
    before = routed(model)
    for size in tokens:
        assert not isinstance(call(*size), Exception)
    assert routed(model) == before + len(tokens)
    tokens[30, 60] = 51
    assert isinstance(call(30, 60), ValueError)


@pytest.mark.parametrize("made", [idefics3, smolvlm])
def test_prompts_are_compiled_for_pictures_that_are_all_there(made: Callable[[], Any]) -> None:
    model = made().eval()
    for turn in range(7):
        seen, empty = padded(), turn in (3, 5)
        if empty:
            seen["pixel_values"][0, 1] = 0  # padding, which the model leaves out
        ids = prompt(4 if empty else 8)
        assert not isinstance(
            agree(lambda ids=ids, seen=seen: model(input_ids=ids, **seen).logits), Exception
        )
    assert routed(model) == 4


@pytest.mark.parametrize("made", [qwen2, qwen2_5])
def test_towers_are_compiled_for_a_grid_of_patches(made: Callable[[], Any]) -> None:
    model = made().eval()
    for _ in range(9):
        seen = cut()
        agree(lambda seen=seen: model(input_ids=prompt(4), **seen).logits)
    rows = rm.explain(model).to_dict()["models"][0]["parts"]
    served = {row["model"].split()[0]: row["routed"] for row in rows}
    assert served["model.visual"] > 0 and served["model.language_model"] > 0


@pytest.mark.parametrize("streams", [False, True])
def test_types_of_tokens_go_on_as_those_of_the_last_one(streams: bool) -> None:
    config = transformers.GPT2Config(
        vocab_size=100, n_positions=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    types = torch.tensor([[7, 8, 9, 7, 11]])
    options = {"max_new_tokens": 20, "pad_token_id": 0, "do_sample": False}

    class Streamer:
        def put(self, tokens: torch.Tensor) -> None:
            given.append(tokens.tolist())

        def end(self) -> None:
            given.append([])

    for _ in range(3):
        found = []
        for context in (rm.disabled(), nullcontext()):
            given: list[Any] = []
            streamer = Streamer() if streams else None
            with context:
                made = model.generate(
                    torch.arange(20, 25)[None], token_type_ids=types, streamer=streamer, **options
                )
            found.append((made.tolist(), given))
        assert found[0] == found[1]
    assert loop_tokens(model) > 30
