"""Tokens chosen without waiting are those of a loop that waits; what was too many is undone."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rm_abstract.generation.ahead import Ahead, forgets  # noqa: E402

VOCABULARY, PAD = 11, 0


class Step:
    """Logits that depend on all tokens of a row, as a decoder's do."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.rows, self.prompt = [ids[:, i] for i in range(ids.shape[1] - 1)], ids.shape[1] - 1
        generator = torch.Generator().manual_seed(3)
        self.weights = torch.randn(64, VOCABULARY, VOCABULARY, generator=generator)

    def one_ahead(self, tokens: torch.Tensor) -> torch.Tensor:
        self.rows.append(tokens.clone())
        seen = torch.stack(self.rows, dim=1)
        held = self.weights[: seen.shape[1]]
        return sum(held[i][seen[:, i]] for i in range(seen.shape[1]))[:, None]

    def rewind(self, steps: int) -> None:
        del self.rows[len(self.rows) - steps :]


def waiting(
    ids: torch.Tensor,
    eos: set[int],
    finished: list[bool],
    steps: int,
    processors: Any,
    sample: bool,
) -> torch.Tensor:
    """The same tokens, one after the other."""
    step, finished = Step(ids), list(finished)
    for _ in range(steps):
        scores = processors(ids, step.one_ahead(ids[:, -1])[:, -1].clone())
        if sample:
            tokens = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
        else:
            tokens = scores.argmax(-1)
        tokens = torch.tensor([PAD if f else int(t) for f, t in zip(finished, tokens, strict=True)])
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        finished = [f or int(t) in eos for f, t in zip(finished, tokens, strict=True)]
        if all(finished):
            break
    return ids


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_generator_and_cache_are_those_of_the_waiting_loop(
    sample: bool, processed: bool, rows: int
) -> None:
    made = transformers.LogitsProcessorList()
    if processed:
        made.append(transformers.RepetitionPenaltyLogitsProcessor(1.3))
        made.append(transformers.TopKLogitsWarper(5))
    shorter = 0
    for seed in range(30):
        torch.manual_seed(seed)
        ids = torch.randint(1, VOCABULARY, (rows, 4))
        eos = {7, 9} if seed % 3 else set()
        finished = [i > 0 and seed % 4 == 1 and bool(eos) for i in range(rows)]
        torch.manual_seed(seed)
        expected = waiting(ids, eos, finished, 23, made, sample)
        after = torch.rand(())
        torch.manual_seed(seed)
        step = Step(ids)
        found = Ahead(step, ids, sorted(eos), torch.tensor(PAD), finished).run(23, made, sample)
        assert torch.equal(torch.cat([ids, found], dim=1), expected)
        assert torch.equal(torch.rand(()), after)
        assert len(step.rows) == expected.shape[1] - 1  # the cache lacks the last token only
        shorter += expected.shape[1] < 4 + 23
    assert shorter > 3


def test_processors_that_remember_are_not_called_ahead() -> None:
    class Counting(transformers.LogitsProcessor):
        def __call__(self, ids: Any, scores: Any) -> Any:
            return scores

    known = transformers.LogitsProcessorList(
        [
            transformers.MinNewTokensLengthLogitsProcessor(3, 8, 7, device="cpu"),
            transformers.TemperatureLogitsWarper(0.7),
            transformers.TopPLogitsWarper(0.9),
            transformers.NoRepeatNGramLogitsProcessor(2),
        ]
    )
    assert forgets(known) and forgets(transformers.LogitsProcessorList())
    assert not forgets(transformers.LogitsProcessorList([Counting()]))
