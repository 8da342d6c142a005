"""sentence-transformers calls `model.forward` itself; its encoders run compiled all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rm_abstract as rm

sentence_transformers = pytest.importorskip("sentence_transformers")

SENTENCES = ["A cat sleeps on the sill.", "Shares fell.", "The kitten naps in the warm sun today."]


pytestmark = pytest.mark.usefixtures("closed_session")


def load(folder: Path) -> sentence_transformers.SentenceTransformer:
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


def test_encode_is_routed_and_gives_eager_embeddings(minilm: Path) -> None:
    expected = torch.from_numpy(load(minilm).encode(SENTENCES)).double()
    rm.init("cpu")
    model = load(minilm)
    model.encode(SENTENCES)  # compiled and compared
    served = torch.from_numpy(model.encode(SENTENCES)).double()
    assert rm.explain().routed == 1
    assert torch.cosine_similarity(served, expected, dim=-1).min() >= 0.9999


def test_a_forward_hook_keeps_the_call_direct_and_silent_as_without_us(minilm: Path) -> None:
    rm.init("cpu")
    model = load(minilm)
    seen: list[object] = []
    transformer = model[0]
    transformer.model.register_forward_hook(lambda *args: seen.append(args))
    model.encode(SENTENCES)
    assert seen == []  # a direct forward runs no hooks, with or without us
    assert rm.explain().routed == 0


def test_shutdown_puts_the_class_back(minilm: Path) -> None:
    transformer_class = type(load(minilm)[0])
    before = vars(transformer_class)["forward"]
    rm.init("cpu")
    assert vars(transformer_class)["forward"] is not before
    rm.shutdown()
    assert vars(transformer_class)["forward"] is before
