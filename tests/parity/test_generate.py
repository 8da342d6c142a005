"""Unmodified generate on a device cache: transformers' tokens, whatever is asked of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from families import ENCODER_DECODERS, FAMILIES, build

import rm_abstract as rm

IN_CI = ("gpt2", "llama", "gemma3", "gpt_neox", "falcon", "mistral", "mixtral")
HEAVY = os.environ.get("RM_HEAVY") == "1"


def prompts(batch: int = 2, length: int = 11) -> dict[str, torch.Tensor]:
    """Random ids, every row but the first padded on the left."""
    ids = torch.randint(4, 99, (batch, length))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        ids[row, : 2 * row] = 0
        mask[row, : 2 * row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def both(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> tuple[Any, Any]:
    """generate by transformers alone and by us, from the same random state."""
    options = {"max_new_tokens": 12, "pad_token_id": 0, "do_sample": False, **options}
    with rm.disabled():
        torch.manual_seed(3)
        expected = model.generate(**inputs, **options)
    torch.manual_seed(3)
    return expected, model.generate(**inputs, **options)


def explained(model: Any) -> dict[str, Any]:
    (found,) = rm.explain(model).to_dict()["models"]
    return dict(found)


@pytest.fixture
def llama(session: Any, seed: int) -> Any:
    model = build("llama", seed)
    rm.accelerate(model)
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(FAMILIES) if HEAVY else IN_CI)
def test_families_give_transformers_tokens(session: Any, name: str, seed: int) -> None:
    model = build(name, seed)
    rm.accelerate(model)
    for options in ({}, {"do_sample": True, "top_k": 20}, {"num_beams": 2}):
        for _ in range(2):  # compiled, then served
            expected, got = both(model, prompts(), **options)
            assert torch.equal(got, expected), (name, options)
    found = explained(model)
    signatures = " ".join(entry["signature"] for entry in found["entries"])
    assert found["routed"] + found["loop_tokens"] > 50
    assert ("[2,64]" in signatures) == FAMILIES[name].static, signatures
    native = all(entry["native_share"] == 1.0 for entry in found["entries"])
    assert native == FAMILIES[name].native


@pytest.mark.parametrize("name", sorted(ENCODER_DECODERS) if HEAVY else ["t5", "whisper"])
def test_encoder_decoders_give_transformers_tokens(session: Any, name: str, seed: int) -> None:
    model = build(name, seed)
    rm.accelerate(model)
    sounds = {"input_features": torch.randn(2, 8, 60)}
    inputs = sounds if name == "whisper" else prompts()
    for options in ({"max_new_tokens": 70}, {"do_sample": True, "top_k": 20}, {"num_beams": 2}):
        for _ in range(2):
            expected, got = both(model, inputs, **options)
            assert torch.equal(got, expected), (name, options)
    found = explained(model)
    assert found["routed"] + found["loop_tokens"] > 150
    assert all(entry["native_share"] == 1.0 for entry in found["entries"])
    # Plans are made for capacities and batches, not for every token.
    assert sum(entry["shapes"] for entry in found["entries"]) < 10


@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_do_not_change_where_buffers_grow(llama: Any, batch: int) -> None:
    for _ in range(2):
        expected, got = both(llama, prompts(batch, 50), max_new_tokens=100)
        assert torch.equal(got, expected)
    assert explained(llama)["loop_tokens"] > 90


def test_rows_end_each_at_its_own_end_token(llama: Any) -> None:
    inputs = prompts(4, 9)
    free, _ = both(llama, inputs, max_new_tokens=30)
    # Tokens that some rows produce early and others late or never.
    ends = sorted({int(free[0, 12]), int(free[2, 20]), int(free[3, 10])})
    for eos in (ends, ends[0], ends[-1]):
        expected, got = both(llama, inputs, max_new_tokens=30, eos_token_id=eos)
        assert torch.equal(got, expected), eos


def test_limits_by_length_and_by_new_tokens_agree(llama: Any) -> None:
    inputs = prompts(2, 9)
    for limit in ({"max_length": 10}, {"max_length": 31}, {"max_new_tokens": 1}):
        options = {"max_new_tokens": None, **limit}
        expected, got = both(llama, inputs, **options)
        assert torch.equal(got, expected), limit


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 8, "eos_token_id": 5},
        {"bad_words_ids": [[7], [8, 9]]},
        {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "num_return_sequences": 2},
        {"do_sample": True, "min_p": 0.05, "typical_p": 0.9},
        {"num_beams": 3, "num_return_sequences": 2},
        {"max_time": 60.0},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_controls_are_transformers_own(llama: Any, options: dict[str, Any]) -> None:
    inputs = prompts(1 if "prompt_lookup_num_tokens" in options else 2)
    for _ in range(2):
        expected, got = both(llama, inputs, **options)
        assert torch.equal(got, expected)
    found = explained(llama)
    several = "prompt_lookup_num_tokens" in options  # up to four tokens a call
    assert found["routed"] + found["loop_tokens"] > (3 if several else 15)


def test_scores_logits_and_the_cache_come_back(llama: Any) -> None:
    for _ in range(2):
        expected, got = both(
            llama,
            prompts(),
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
        assert torch.equal(got.sequences, expected.sequences)
        for a, b in zip(got.scores + got.logits, expected.scores + expected.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert isinstance(got.past_key_values, hf.DynamicCache)
    length = got.past_key_values.get_seq_length()
    assert length == expected.past_key_values.get_seq_length()
    for mine, theirs in zip(got.past_key_values, expected.past_key_values, strict=True):
        assert mine[0].shape == theirs[0].shape


def test_a_conversation_goes_on_with_the_returned_cache(llama: Any) -> None:
    inputs = prompts(1, 9)
    results = []
    for disabled in (True, False, False):
        torch.manual_seed(3)
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        with rm.disabled() if disabled else torch.no_grad():
            first = llama.generate(**inputs, **options, return_dict_in_generate=True)
            longer = torch.cat([first.sequences, torch.full((1, 3), 17)], dim=1)
            cache = first.past_key_values
            logits = llama(longer[:, cache.get_seq_length() :], past_key_values=cache).logits
            second = llama.generate(longer, past_key_values=cache, **options)
        results.append((first.sequences, logits, second))
    for sequences, logits, second in results[1:]:
        assert torch.equal(sequences, results[0][0])
        torch.testing.assert_close(logits, results[0][1], rtol=1e-4, atol=1e-5)
        assert torch.equal(second, results[0][2])


class Recorder(hf.generation.streamers.BaseStreamer):
    """A streamer that keeps what it gets, and raises after `limit` tokens."""

    def __init__(self, limit: int = 10**6) -> None:
        self.seen: list[int] = []
        self.limit = limit

    def put(self, value: torch.Tensor) -> None:
        self.seen += value.reshape(-1).tolist()
        if len(self.seen) > self.limit:
            raise RuntimeError("stop here")

    def end(self) -> None:
        self.seen.append(-1)


def test_a_streamer_gets_every_token_and_may_raise(llama: Any) -> None:
    inputs = prompts(1, 9)
    with rm.disabled():
        expected = Recorder()
        both(llama, inputs, streamer=expected)
    for _ in range(2):
        got = Recorder()
        llama.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0, streamer=got)
        assert got.seen == expected.seen[: len(got.seen)] and got.seen[-1] == -1
    with pytest.raises(RuntimeError, match="stop here"):
        llama.generate(
            **inputs, max_new_tokens=12, do_sample=False, pad_token_id=0, streamer=Recorder(13)
        )
    expected_tokens, tokens = both(llama, inputs)
    assert torch.equal(tokens, expected_tokens)
    assert explained(llama)["loop_tokens"] > 25


class Stopper(hf.StoppingCriteria):
    """Ends row 0 after six tokens, row 1 after nine; notes the lengths it was asked at."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.asked: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.asked.append(input_ids.shape[1])
        new = input_ids.shape[1] - self.start
        return torch.tensor([new >= 6, new >= 9])


def test_criteria_and_processors_of_the_user_are_asked_at_every_token(llama: Any) -> None:
    seen: list[int] = []

    def favour(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids.shape[1])
        scores[:, 7] += 0.5  # in place: what the logits' copy is for
        return scores

    inputs = prompts(2, 9)
    for _ in range(2):
        stop = Stopper(9)
        expected, got = both(
            llama,
            inputs,
            max_new_tokens=20,
            stopping_criteria=[stop],
            logits_processor=hf.LogitsProcessorList([favour]),
            return_dict_in_generate=True,
            output_logits=True,
        )
        assert torch.equal(got.sequences, expected.sequences)
        assert stop.asked == [*range(10, 19), *range(10, 19)] and seen == [
            x - 1 for x in stop.asked
        ]
        seen.clear()
        for a, b in zip(got.logits, expected.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_time_limit_stops_promptly(llama: Any) -> None:
    inputs = prompts(1, 9)
    both(llama, inputs)
    started = time.monotonic()
    got = llama.generate(**inputs, max_new_tokens=10**6, max_time=0.3, do_sample=True, top_k=5)
    assert time.monotonic() - started < 60 and 9 < got.shape[1] < 10**5
    expected, got = both(llama, inputs)
    assert torch.equal(got, expected)


def test_inference_mode_and_grad_mode_alternate(llama: Any) -> None:
    inputs = prompts(2, 9)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            expected, got = both(llama, inputs)
        assert torch.equal(got, expected), mode


def test_half_precision_logits_are_close(session: Any, seed: int) -> None:
    model = build("llama", seed).to(torch.bfloat16)
    rm.accelerate(model)
    for _ in range(2):
        expected, got = both(
            model, prompts(), max_new_tokens=3, return_dict_in_generate=True, output_logits=True
        )
        torch.testing.assert_close(got.logits[0], expected.logits[0], rtol=0.1, atol=0.1)
    assert explained(model)["routed"] >= 3


def test_hooks_of_the_user_keep_the_model_on_transformers_path(llama: Any) -> None:
    inputs = prompts(1, 9)
    both(llama, inputs)
    seen = []
    handle = llama.register_forward_hook(lambda *_: seen.append(1))
    expected, got = both(llama, inputs)
    assert torch.equal(got, expected) and len(seen) == 24
    handle.remove()
    expected, got = both(llama, inputs)
    assert torch.equal(got, expected)


def test_weights_changed_between_calls_are_noticed(llama: Any) -> None:
    inputs = prompts(1, 9)
    for _ in range(2):
        expected, got = both(llama, inputs)
        assert torch.equal(got, expected)
    with torch.no_grad():
        llama.lm_head.weight.copy_(torch.randn_like(llama.lm_head.weight))
    changed, got = both(llama, inputs)
    assert torch.equal(got, changed) and not torch.equal(changed, expected)


def test_threads_that_generate_at_once_get_their_own_tokens(llama: Any) -> None:
    calls = [prompts(1 + i % 2, 7 + i) for i in range(6)]
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    with rm.disabled():
        expected = [llama.generate(**inputs, **options) for inputs in calls]
    for _ in range(3):  # compiled in the first round, by whoever comes first
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda inputs: llama.generate(**inputs, **options), calls))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert explained(llama)["loop_tokens"] > 200


def test_an_interrupt_stops_the_loop_at_once_and_leaves_the_model_usable(session: Any) -> None:
    config = hf.LlamaConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=60000
    )
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    rm.accelerate(model)
    inputs = prompts(1, 9)
    both(model, inputs)
    expected, got = both(model, inputs)
    assert torch.equal(got, expected)
    interrupted = []

    def interrupt() -> None:
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(1.0, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs, max_new_tokens=50000, do_sample=False, pad_token_id=0)
    assert time.monotonic() - interrupted[0] < 20  # all tokens take minutes
    expected, got = both(model, inputs)
    assert torch.equal(got, expected)


def test_the_trained_llama_continues_python_source_as_eager_does(session: Any) -> None:
    folder = Path(__file__).parents[2] / "examples" / "models" / "tiny_llama"
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = b"import os\n\n\ndef read(path):\n    with open(path) as file:\n"
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(text.decode(), return_tensors="pt")
    for _ in range(2):
        expected, got = both(model, dict(inputs), max_new_tokens=500, eos_token_id=None)
        assert torch.equal(got, expected)
    assert explained(model)["loop_tokens"] > 490
