"""A program stands while tensors of the module change that it does not read (decision 0249):
Qwen2-VL keeps a new one for every text that it generates. What it reads, and the sizes of what it
does not, is noticed as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import rm_abstract as rm
from rm_abstract.engines import first_call

transformers = pytest.importorskip("transformers", minversion="5.0")

IDS = torch.arange(3, 11)[None]
POSITIONS = torch.arange(8).expand(4, 1, 8)


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    torch.manual_seed(0)
    rm.init("cpu")
    yield
    rm.shutdown()


def made() -> Any:
    """Whose code reads `rope_deltas`, but not where positions are given."""
    rotary = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = transformers.Qwen2VLConfig(
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4},
        text_config={
            "vocab_size": 60,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": rotary,
        },
    )
    return transformers.Qwen2VLForConditionalGeneration(config).eval()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An item for every call that the original served to be compared with."""
    found: list[Any] = []

    class Counted(first_call.Effects):
        def __enter__(self) -> Any:
            found.append(self)
            return super().__enter__()

    monkeypatch.setattr(first_call, "Effects", Counted)
    return found


def agrees(model: Any) -> None:
    with torch.no_grad():
        with rm.disabled():
            wanted = model(IDS, position_ids=POSITIONS).logits
        got = model(IDS, position_ids=POSITIONS).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_tensor_that_no_program_reads_may_be_another_each_time(watched: list[Any]) -> None:
    model = made()
    model.model.rope_deltas = torch.zeros(1, 1)
    agrees(model)
    assert len(watched) == 1
    for number in range(6):
        model.model.rope_deltas = torch.full((1, 1), float(number))
        for _ in range(2):
            agrees(model)
    model.model.rope_deltas.add_(1)
    agrees(model)
    assert len(watched) == 1


def replace(model: Any) -> None:
    model.model.language_model.rotary_emb.inv_freq = (
        model.model.language_model.rotary_emb.inv_freq * 2
    )


def write(model: Any) -> None:
    model.model.language_model.rotary_emb.inv_freq.mul_(3)


def write_unseen(model: Any) -> None:
    model.lm_head.weight.data.mul_(2)


def replace_weight(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 3)


def replace_with_another(model: Any) -> None:
    model.model.rope_deltas = torch.ones(1, 1)
    model.lm_head.weight.detach().mul_(1.5)


def other_sizes(model: Any) -> None:
    model.model.rope_deltas = torch.zeros(2, 1)


def other_type(model: Any) -> None:
    model.model.rope_deltas = torch.zeros(1, 1, dtype=torch.int64)


def no_tensor(model: Any) -> None:
    model.model.rope_deltas = None


@pytest.mark.parametrize(
    "change",
    [
        replace,
        write,
        write_unseen,
        replace_weight,
        replace_with_another,
        other_sizes,
        other_type,
        no_tensor,
    ],
)
def test_what_a_program_depends_on_is_noticed(
    change: Callable[[Any], None], watched: list[Any]
) -> None:
    model = made()
    for number in range(3):
        model.model.rope_deltas = torch.full((1, 1), float(number))
        for _ in range(2):
            agrees(model)
    assert len(watched) == 1
    change(model)
    for _ in range(3):
        agrees(model)
    if change is not no_tensor:  # a program of the cache may be for that one
        assert len(watched) == 2
