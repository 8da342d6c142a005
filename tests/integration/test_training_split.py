"""Losses over large vocabularies: logits are made by pieces of their rows, in the same step."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm
from rm_abstract.training import program

STRICT = {"fallback": "error"}
ROWS, CLASSES, WIDTH = 320, 700, 24


@pytest.fixture(autouse=True)
def small_logits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "SPLIT_BYTES", 1 << 16)


class Words(nn.Module):
    def __init__(self, kind: str = "", width: int = WIDTH, classes: int = CLASSES) -> None:
        super().__init__()
        self.kind = kind
        self.table, self.norm = nn.Embedding(classes, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=kind != "tied")
        if kind == "tied":
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.table(ids)))
        if self.kind == "softcap":
            logits = 5.0 * torch.tanh(logits / 5.0)
        if self.kind == "mixed rows":  # every row depends on every other
            logits = logits - logits.mean(dim=(0, 1), keepdim=True)
        return logits


def _flat(logits: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), **options)


def _axis_one(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), y)


def _weighted(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    return (each * torch.linspace(0.5, 1.5, each.numel())).sum() / 100


def _by_hand(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    chosen = torch.log_softmax(logits, 2).gather(2, y.clamp(min=0).unsqueeze(2)).squeeze(2)
    return -(chosen * (y >= 0)).mean() + 1e-4 * logits.square().mean(2).sum()


def _likely(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    wanted = F.one_hot(y.clamp(min=0), logits.shape[-1]).float() * 0.9 + 0.1 / logits.shape[-1]
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))


LOSSES: dict[str, Any] = {
    "flat": _flat,
    "smoothed": lambda o, y: _flat(o, y, label_smoothing=0.1),
    "summed": lambda o, y: _flat(o, y, reduction="sum") / 50,
    "weighted": _weighted,
    "by hand": _by_hand,
    "axis one": _axis_one,
    "probabilities": _likely,
}
SPLIT = [("", loss) for loss in LOSSES if loss not in ("axis one", "probabilities")]
SPLIT += [("tied", "flat"), ("softcap", "smoothed")]
WHOLE = [("mixed rows", "flat"), ("", "axis one"), ("", "probabilities")]


def _batch(number: int, rows: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(number)
    x = torch.randint(0, classes, (2, rows // 2), generator=g)
    y = torch.randint(0, classes, (2, rows // 2), generator=g)
    y[0, :5] = -100  # ignored
    return x, y


def _trains_alike(
    model: nn.Module, loss_fn: Any, classes: int = CLASSES, rows: int = ROWS, **options: Any
) -> Any:
    other = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, other))
    step = rm.compile_step(model, loss_fn, ours, options=STRICT, **options)
    bf16 = options.get("precision") == "bf16"
    for i in range(4):
        x, y = _batch(i, rows, classes)
        theirs.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            wanted = loss_fn(other(x), y)
        wanted.backward()
        if options.get("clip_norm"):
            nn.utils.clip_grad_norm_(other.parameters(), options["clip_norm"])
        theirs.step()
        assert float(step(x, y)) == pytest.approx(
            float(wanted.detach()), rel=1e-2 if bf16 else 1e-5
        )
    rtol, atol = (0.1, 2e-2) if bf16 else (1e-4, 1e-5)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)
    assert step.report()["compiled"] == 2  # behind eager, which makes the momenta, and the check
    return step


@pytest.mark.parametrize(("kind", "loss"), SPLIT)
def test_a_loss_by_pieces_of_rows_trains_as_in_eager(kind: str, loss: str) -> None:
    torch.manual_seed(0)
    step = _trains_alike(Words(kind), LOSSES[loss])
    row = step.memory_report()[0]
    assert row["split"] == {
        "pieces": 3,
        "bytes": ROWS * CLASSES * 4,
        "piece_bytes": 128 * CLASSES * 4,
    }
    assert row["arena"] < 6 * row["split"]["piece_bytes"]


@pytest.mark.parametrize(("kind", "loss"), WHOLE)
def test_a_loss_that_cannot_be_split_is_made_as_a_whole(kind: str, loss: str) -> None:
    torch.manual_seed(0)
    step = _trains_alike(Words(kind), LOSSES[loss])
    assert step.memory_report()[0]["split"]["pieces"] == 0


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"clip_norm": 0.1}])
def test_a_split_loss_goes_with_other_options(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    step = _trains_alike(Words(), _flat, **options)
    assert step.memory_report()[0]["split"]["pieces"] == 3


def test_sizes_that_meet_by_chance_are_told_apart() -> None:
    torch.manual_seed(0)
    for rows, classes, width in ((320, 700, 320), (320, 320, 8)):
        _trains_alike(Words("", width, classes), _flat, classes, rows)


def test_small_logits_and_few_rows_stay_whole() -> None:
    torch.manual_seed(0)
    step = _trains_alike(Words(), _flat, rows=128)
    assert step.memory_report()[0]["split"]["pieces"] == 0


def test_a_label_out_of_range_in_a_later_piece_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Words()
    step = _trains_alike(model, _flat)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = _batch(9, ROWS, CLASSES)
    y[1, -1] = CLASSES
    with pytest.raises((RuntimeError, IndexError)):
        step(x, y)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_without_splitting_the_arena_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    arenas = []
    for least in (1 << 16, 1 << 40):
        monkeypatch.setattr(program, "SPLIT_BYTES", least)
        torch.manual_seed(0)
        arenas.append(_trains_alike(Words(), _flat).memory_report()[0]["arena"])
    assert arenas[1] >= ROWS * CLASSES * 4 and arenas[0] < 0.75 * arenas[1], arenas


def _drawn(draw: random.Random) -> tuple[int, int, dict[str, Any], float, str]:
    """(classes, rows around the edges of pieces, options of the loss, share ignored, layout)"""
    classes = draw.choice([129, 300, 513])
    options = {
        "reduction": draw.choice(["mean", "sum"]),
        "label_smoothing": draw.choice([0.0, 0.1, 0.9]),
        "ignore_index": draw.choice([-100, 0, classes - 1]),
    }
    rows = draw.choice([256, 257, 287, 288, 383, 384, 511, 513])
    layout = draw.choice(["rows", "columns", "every other"])
    return classes, rows, options, draw.choice([0.0, 0.4, 1.0]), layout


@pytest.mark.parametrize("number", range(2))
def test_drawn_losses_by_pieces_train_as_in_eager(number: int, seed: int) -> None:
    """With one batch whose targets are all ignored, or some; the rows lie in any way."""
    draw = random.Random(seed * 2 + number)
    classes, rows, options, share, layout = _drawn(draw)
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ours = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, classes, bias=draw.random() < 0.5))
    theirs = copy.deepcopy(ours)
    rate = 0.05 if options["reduction"] == "mean" else 1e-4
    a, b = (torch.optim.SGD(m.parameters(), lr=rate, momentum=0.9) for m in (ours, theirs))

    def loss(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(o, t, **options)

    step = rm.compile_step(ours, loss, a, options={"fallback": "error"})
    for i in range(4):
        x = torch.randn(rows, 18, generator=g)[:, ::2]
        if layout == "columns":
            x = torch.randn(9, rows, generator=g).t()
        elif layout == "rows":
            x = x.contiguous()
        y = torch.randint(0, classes, (rows,), generator=g)
        ignored = torch.rand(rows, generator=g) < (share if i == 3 else 0.3)
        y[ignored] = options["ignore_index"]
        got = step(x, y)
        b.zero_grad()
        wanted = loss(theirs(x), y)
        wanted.backward()
        b.step()
        torch.testing.assert_close(got, wanted.detach(), rtol=2e-4, atol=1e-5, equal_nan=True)
    assert step.memory_report()[0]["split"]["pieces"] > 1
    assert step.report()["compiled"] == 2
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-4, equal_nan=True)
