"""`bench tokens` and `bench threads` on tiny models: candidates agree, and rows are complete."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rm_abstract.bench import decoders, threads, tokens

TINY = decoders.Shape("tiny", 2, 32, 48, 4, 2, vocabulary=64)


def test_every_way_of_a_token_gives_eagers_tokens_and_a_time() -> None:
    sampled = next(request for request in tokens.REQUESTS if request.name == "sampled, top-k 50")
    result = tokens.run("GPT-2, 100 tokens", sampled, tokens=12, rounds=1)
    assert set(result["us"]) == {"rm_abstract", "transformers' loop", "eager"}
    assert "sampled, top-k 50" in tokens.markdown(result)


def test_a_way_with_other_tokens_is_not_timed(monkeypatch) -> None:
    from rm_abstract.generation import token_loop

    def wrong(loop):
        out = original(loop)
        out[0, -1] += 1
        return out

    original = token_loop.TokenLoop.result
    monkeypatch.setattr(token_loop.TokenLoop, "result", wrong)
    with pytest.raises(ValueError, match="expected eager's tokens"):
        tokens.run("GPT-2, 100 tokens", tokens.REQUESTS[0], tokens=12, rounds=1)


def test_threads_are_compared_with_the_same_requests_alone() -> None:
    result = threads.run(TINY, "fp32", threads=2, tokens=8, rounds=1)
    assert result["same_tokens"] == result["tokens"] == 16
    assert "2 threads of 8 tokens" in threads.markdown(result)


def test_a_failing_thread_is_not_hidden() -> None:
    with pytest.raises(AttributeError):
        threads.together(object(), [[3, 4], [5, 6]], 4)
