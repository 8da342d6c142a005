"""Models that check values keep the token loop: a step that is refused in the middle of a text is
judged by the original, and everything is as without us (decision 0248)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import rm_abstract as rm

transformers = pytest.importorskip("transformers", minversion="5.0")

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


class Forbidding(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """Refuses one token."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("forbidden", torch.tensor(-1))

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        allowed = (input_ids != self.forbidden).all()
        torch._assert_async(allowed, "a forbidden token")
        return super().forward(input_ids=input_ids, **kwargs)


class Streamer:
    """Keeps what it is given, whole."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.ended = 0

    def put(self, tokens: torch.Tensor) -> None:
        self.given.append(tokens.reshape(-1).tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    torch.manual_seed(0)
    rm.init("cpu")
    yield
    rm.shutdown()


def loop_tokens(model: Any) -> int:
    return int(rm.explain(model).to_dict()["models"][0]["loop_tokens"])


def observed(call: Callable[[Streamer | None], Any], streams: bool) -> dict[str, Any]:
    """Everything a caller sees of a generation, errors and random numbers included."""
    torch.manual_seed(7)
    streamer = Streamer() if streams else None
    found: dict[str, Any] = {}
    try:
        with torch.no_grad():
            found["result"] = call(streamer)
    except (RuntimeError, IndexError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["random"] = torch.rand(3)
    if streamer is not None:
        found["stream"] = (streamer.given, streamer.ended)
    return found


def same(got: Any, wanted: Any) -> None:
    assert got.keys() == wanted.keys(), (got, wanted)
    assert got.pop("error", "") == wanted.pop("error", "")
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


def compared(call: Callable[[Streamer | None], Any], streams: bool) -> bool:
    """Whether eager refuses it; the same with us."""
    found = []
    for context in (rm.disabled(), nullcontext()):
        with context:
            found.append(observed(call, streams))
    refused = "error" in found[0]
    same(found[1], found[0])
    return refused


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_k": 0},
    "processed": {"do_sample": False, "repetition_penalty": 1.3},
    "kept": {"do_sample": False, "return_dict_in_generate": True, "output_logits": True},
}
OPTIONS = {"max_new_tokens": 24, "pad_token_id": 0}


@pytest.mark.parametrize("rows", [1, 3])
def test_a_token_refused_anywhere_is_as_in_eager(rows: int) -> None:
    rng = random.Random(torch.initial_seed() + rows)
    model = Forbidding(transformers.LlamaConfig(**SIZES)).eval()
    refused, cases = 0, [(kind, s) for kind in KINDS for s in (False, True) if rows == 1 or not s]
    for kind, streams in cases * 2:
        prompt = torch.randint(3, 60, (rows, 4))

        def call(streamer: Streamer | None, prompt: torch.Tensor = prompt, kind: str = kind) -> Any:
            result = model.generate(prompt, streamer=streamer, **OPTIONS, **KINDS[kind])
            if not torch.is_tensor(result):
                return {"sequences": result.sequences, "logits": result.logits}
            return result

        model.forbidden.fill_(-1)
        with rm.disabled():
            made = observed(call, False)["result"]
        made = made if torch.is_tensor(made) else made["sequences"]
        assert not compared(call, streams)
        place = rng.randrange(prompt.shape[1], made.shape[1])
        model.forbidden.copy_(made[rng.randrange(rows), place])
        refused += compared(call, streams)
    assert refused >= len(cases)  # the last token of a text is not looked at
    assert loop_tokens(model) > 100


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_threads_that_share_steps_hear_of_their_own_refusals(kind: str) -> None:
    model = Forbidding(transformers.LlamaConfig(**SIZES)).eval()
    options = {"max_new_tokens": 40, "pad_token_id": 0, "do_sample": False}
    prompts = [torch.randint(3, 60, (1, 4)) for _ in range(6)]

    def text(prompt: torch.Tensor) -> Any:
        chosen: Any = {"logits_processor": [Plain()]} if kind == "sampled" else {}
        try:
            with torch.no_grad():
                return model.generate(prompt, **options, **chosen)
        except RuntimeError as error:
            return str(error)

    with rm.disabled():
        made = [text(prompt)[0, 4:-1].tolist() for prompt in prompts]
        for token in range(3, 60):
            if 0 < sum(token in tokens for tokens in made) < len(prompts):
                model.forbidden.fill_(token)
                break
        wanted = [text(prompt) for prompt in prompts]
    assert 0 < sum(isinstance(one, str) for one in wanted) < len(prompts)
    for _ in range(3):
        got: list[Any] = [None] * len(prompts)

        def generate(number: int, got: list[Any] = got) -> None:
            got[number] = text(prompts[number])

        threads = [threading.Thread(target=generate, args=(n,)) for n in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one, other in zip(got, wanted, strict=True):
            assert type(one) is type(other)
            assert one == other if isinstance(one, str) else torch.equal(one, other)
    codes = {reason["code"] for reason in rm.explain(model).to_dict()["models"][0]["reasons"]}
    assert "RM306" not in codes


class Plain(transformers.LogitsProcessor):  # type: ignore[misc, name-defined]
    """Changes nothing; a thread that has one chooses its tokens itself."""

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_a_text_that_outgrows_its_table_of_positions_ends_as_in_eager() -> None:
    config = transformers.GPT2Config(
        vocab_size=60, n_positions=20, n_embd=32, n_layer=2, n_head=4, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    for kind in KINDS:

        def call(streamer: Streamer | None, kind: str = kind) -> Any:
            prompt = torch.arange(3, 9)[None]
            return model.generate(prompt, streamer=streamer, **OPTIONS, **KINDS[kind])

        for streams in (False, True):
            assert compared(call, streams)
    assert loop_tokens(model) > 10
