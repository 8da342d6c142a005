"""Models that are not told positions: texts do not depend on how long their neighbours are."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
import transformers

from rm_abstract.generation.jobs import End, Job, Sampling, Token
from rm_abstract.generation.model_calls import ModelCalls
from rm_abstract.generation.own_positions import rows_count_their_own
from rm_abstract.generation.scheduler import Limits, Scheduler

SIZES = {
    **dict.fromkeys(("d_model", "hidden_size"), 32),
    **dict.fromkeys(("decoder_layers", "num_hidden_layers", "n_layer"), 2),
    **dict.fromkeys(("decoder_attention_heads", "num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("decoder_ffn_dim", "intermediate_size"), 64),
    "vocab_size": 60,
    "max_position_embeddings": 256,
}
BY_MASK, BY_CACHE = ("Bloom",), ("Bart", "Marian", "RoFormer")


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    kind = getattr(transformers, f"{name}Config")
    known = {key: size for key, size in SIZES.items() if hasattr(kind(), key)}
    config = kind(**known)
    config.is_decoder, config.is_encoder_decoder = True, False
    config.pad_token_id, config.eos_token_id, config.forced_eos_token_id = 1, None, None
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    return model.to(dtype)


@pytest.mark.parametrize("name", [*BY_MASK, *BY_CACHE])
def test_a_text_does_not_depend_on_its_neighbours(name: str, seed: int) -> None:
    draw, heard = random.Random(seed), []
    prompts = [[draw.randrange(3, 60) for _ in range(n)] for n in (2, 20, 5, 9, 33, 2)]
    scheduler = Scheduler.of(made(name), Limits(rows=8, waiting=100))

    def job(prompt: list[int]) -> Job:
        tokens: list[int] = []
        over = threading.Event()
        heard.append((tokens, over))

        def hear(event: Token | End) -> None:
            tokens.append(event.id) if isinstance(event, Token) else over.set()

        return Job(prompt, 12, hear, Sampling(temperature=0))

    for prompt in prompts:
        scheduler.submit(job(prompt))
        assert heard[-1][1].wait(60)
    scheduler.submit(*map(job, prompts))
    assert all(over.wait(60) for _, over in heard)
    found = [tokens for tokens, _ in heard]
    assert found[len(prompts) :] == found[: len(prompts)]
    scheduler.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_who_counts_by_the_mask_shares_steps(dtype: torch.dtype) -> None:
    for name in (*BY_MASK, *BY_CACHE):
        calls = ModelCalls.of_model(made(name, dtype))
        assert not calls.gives_positions
        assert rows_count_their_own(calls, 60) == (name in BY_MASK), name
