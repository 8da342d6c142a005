"""A generation as a stream of tokens: its items, its end, and what an engine does not serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import build

import rm_abstract as rm
from rm_abstract.generation.request import GenerationRequest
from rm_abstract.generation.token_loop import TokenLoop, TokenLoopEngine

TOKENS = 24


@pytest.fixture
def llama(session: Any, seed: int) -> Any:
    model = build("llama", seed)
    rm.accelerate(model)
    return model


class Watched:
    """A stream that remembers its items and can be left early."""

    def __init__(self, stream: TokenLoop, most: int) -> None:
        self.stream, self.most = stream, most
        self.items: list[torch.Tensor] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        tokens = iter(self.stream)
        for item in tokens:
            self.items.append(item)
            yield item
            if len(self.items) == self.most:
                tokens.close()
                return

    def result(self) -> Any:
        return self.stream.result()


def watch(patch: pytest.MonkeyPatch, chunk: int | None = None, most: int = 2**62) -> list[Watched]:
    """The streams of the generations that follow."""
    streams: list[Watched] = []
    start = TokenLoopEngine.start

    def watched(engine: TokenLoopEngine, request: GenerationRequest) -> Watched:
        request.chunk_tokens = chunk
        streams.append(Watched(start(engine, request), most))
        return streams[-1]

    patch.setattr(TokenLoopEngine, "start", watched)
    return streams


def generate(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=-1, **options)


def expected(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with rm.disabled():
        torch.manual_seed(3)
        return generate(model, ids, **options)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_the_items_of_a_stream_are_the_new_tokens_in_order(
    llama: Any, monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:
    ids = torch.randint(4, 99, (2, 7))
    want = expected(llama, ids, do_sample=sampled)
    streams = watch(monkeypatch)
    for _ in range(2):  # compiled, then served
        torch.manual_seed(3)
        assert torch.equal(generate(llama, ids, do_sample=sampled), want)
    for stream in streams:
        assert torch.equal(torch.cat(stream.items, dim=-1), want[:, 7:])
    assert len(streams[-1].items) < TOKENS  # the program's own steps came as one item


def test_an_item_holds_no_more_tokens_than_were_asked_for(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(4, 99, (1, 7))
    want = expected(llama, ids)
    streams = watch(monkeypatch, chunk=3)
    for _ in range(2):
        assert torch.equal(generate(llama, ids), want)
    sizes = [item.shape[1] for item in streams[-1].items]
    assert sum(sizes) == TOKENS
    assert max(sizes) == 4  # one from an ordinary call, which finds the program, and three by it


def test_a_stream_left_early_leaves_whole_steps_in_the_cache(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(4, 99, (1, 7))
    want = expected(llama, ids)
    generate(llama, ids)
    with monkeypatch.context() as patch:
        watch(patch, chunk=2, most=4)
        part = generate(llama, ids, return_dict_in_generate=True)
    made = part.sequences.shape[1]
    assert 7 < made < 7 + TOKENS
    assert torch.equal(part.sequences, want[:, :made])
    assert part.past_key_values.get_seq_length() == made - 1
    rest = generate(
        llama,
        part.sequences,
        past_key_values=part.past_key_values,
        max_new_tokens=TOKENS - (made - 7),
    )
    assert torch.equal(rest, want)


def test_a_request_that_is_not_served_is_named_in_the_report(llama: Any) -> None:
    ids = torch.randint(4, 99, (1, 7))
    generate(llama, ids, return_dict_in_generate=True, output_hidden_states=True)
    generate(llama, ids)
    report = rm.explain(llama)
    (model,) = report.models
    assert model["loop_declined"] == {"output_hidden_states": 1}
    line = "1 calls of generate ran in transformers' own loop: output_hidden_states"
    assert line in str(report)
