"""Models people train, as compiled steps: the losses are eager's, step by step."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm
from rm_abstract.training import check

STRICT = {"fallback": "error"}
_STEPS = 20


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.first(x)).split(width, dim=2)
        q, k, v = (p.view(rows, length, self.heads, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class _Gpt(nn.Module):
    """Token and position tables, pre-norm blocks, the token table again as the head."""

    def __init__(self, tokens: int = 32, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(_Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_a_small_gpt_with_tied_tables_trains_as_in_eager() -> None:
    torch.manual_seed(0)
    ours = _Gpt()
    theirs = copy.deepcopy(ours)
    a, b = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (ours, theirs))
    step = rm.compile_step(ours, _token_loss, a, clip_norm=1.0, options=STRICT)
    g = torch.Generator().manual_seed(1)
    for _ in range(_STEPS):
        ids = torch.randint(0, 32, (4, 17), generator=g)
        loss = step(ids[:, :-1], ids[:, 1:])
        b.zero_grad()
        wanted = _token_loss(theirs(ids[:, :-1]), ids[:, 1:])
        wanted.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        b.step()
        assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-4)
    assert step.report()["compiled"] == _STEPS - 2
    assert ours.head.weight is ours.tokens.weight


@pytest.mark.parametrize("name", ["train_char_gpt", "finetune_minilm"])
def test_the_example_trains_and_draws_its_curves(
    name: str, repository: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """RM_HEAVY=1 runs the fine-tuning too."""
    if name == "finetune_minilm":
        if os.environ.get("RM_HEAVY") != "1":
            pytest.skip("RM_HEAVY=1 trains MiniLM")
        request.getfixturevalue("minilm")
    picture = tmp_path / "curves.png"
    script = repository / "examples" / f"{name}.py"
    command = [sys.executable, "-W", "ignore", str(script), "4", str(picture)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert "2 compiled steps" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def _bert() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config).train()


def test_a_bert_is_fine_tuned_as_in_eager_with_padding_and_its_own_loss() -> None:
    ours = _bert()
    theirs = copy.deepcopy(ours)
    a, b = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (ours, theirs))
    step = rm.compile_step(ours, None, a, options=STRICT)
    g = torch.Generator().manual_seed(1)
    for _ in range(_STEPS):
        ids = torch.randint(1, 64, (4, 12), generator=g)
        mask = torch.ones_like(ids)
        ids[0, 8:], mask[0, 8:] = 0, 0  # padding, whose row of the table is not trained
        labels = torch.randint(0, 3, (4,), generator=g)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        loss = step(batch)
        b.zero_grad()
        wanted = theirs(**batch).loss
        wanted.backward()
        b.step()
        assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-4)
    assert step.report()["compiled"] == _STEPS - 3  # the first one set something of its config
    table = "bert.embeddings.word_embeddings.weight"
    torch.testing.assert_close(
        ours.state_dict()[table][0], theirs.state_dict()[table][0], rtol=1e-4, atol=1e-6
    )


def test_convolutions_train_as_in_eager() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )
    theirs = copy.deepcopy(ours)
    a, b = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (ours, theirs))
    step = rm.compile_step(ours, F.cross_entropy, a, options=STRICT)
    for _ in range(5):
        x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
        b.zero_grad()
        wanted = F.cross_entropy(theirs(x), y)
        wanted.backward()
        b.step()
        assert float(step(x, y)) == pytest.approx(float(wanted.detach()), rel=1e-4)
    assert step.report()["compiled"] == 3


class _Normed(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6, momentum=momentum)
        self.flat = nn.BatchNorm1d(6, affine=False)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return self.head(self.flat(x.mean((2, 3))))


def test_batch_norm_trains_as_in_eager_and_moves_its_running_values() -> None:
    torch.manual_seed(0)
    ours = _Normed()
    theirs = copy.deepcopy(ours)
    a, b = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs))
    step = rm.compile_step(ours, F.cross_entropy, a, options=STRICT)

    def both() -> None:
        x, y = torch.randn(8, 3, 6, 6) * 2 + 1, torch.randint(0, 5, (8,))
        b.zero_grad()
        wanted = F.cross_entropy(theirs(x), y)
        wanted.backward()
        b.step()
        assert float(step(x, y)) == pytest.approx(float(wanted.detach()), rel=1e-4)

    for _ in range(6):
        both()
    assert step.report()["compiled"] == 4
    with torch.no_grad():  # somebody starts the statistics again: the next step reads it
        for model in (ours, theirs):
            model.norm.reset_running_stats()
    both()
    assert step.report()["compiled"] == 5
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(ours.state_dict()[name], buffer, rtol=1e-4, atol=1e-5)
    assert int(ours.norm.num_batches_tracked) == 1 and int(ours.flat.num_batches_tracked) == 7
    x = torch.randn(4, 3, 6, 6)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-3, atol=1e-4)


def test_running_values_that_are_plain_averages_are_left_to_eager() -> None:
    model = _Normed(momentum=None)
    step = rm.compile_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(rm.RoutingWarning):
        for _ in range(3):
            step(torch.randn(8, 3, 6, 6), torch.randint(0, 5, (8,)))
    report = step.report()
    assert report["compiled"] == 0 and report["reasons"]
    assert int(model.norm.num_batches_tracked) == 3


def test_a_buffer_that_the_forward_writes_is_written_once_a_step() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x.detach().sum(0))
            return self.head(x)

    model = Counts()
    step = rm.compile_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    total = torch.zeros(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            x = torch.randn(8, 4)
            step(x, torch.randint(0, 2, (8,)))
            total += x.sum(0)
    torch.testing.assert_close(model.seen, total)


def test_dropout_draws_anew_at_every_step_and_is_checked() -> None:
    def train(seed: int) -> tuple[list[float], dict[str, Any]]:
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(64, 64),
            nn.Dropout(0.5),
            nn.Linear(64, 5),
        )
        x, y = torch.randn(16, 3, 6, 6), torch.randint(0, 5, (16,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        torch.manual_seed(seed)
        step = rm.compile_step(model, F.cross_entropy, optimizer, options=STRICT)
        losses = [float(step(x, y)) for _ in range(13)]
        with torch.no_grad():
            wanted = [float(F.cross_entropy(model(x), y)) for _ in range(200)]
        mean, spread = torch.tensor(wanted).mean(), torch.tensor(wanted).std()
        assert abs(torch.tensor(losses).mean() - mean) < 1.5 * spread
        return losses, step.report()

    losses, report = train(1)
    assert report["compiled"] == 11 and len(set(losses)) == 13
    assert train(2)[0] != losses


def test_other_draws_than_the_programs_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from rm_abstract.training import step as steps

    monkeypatch.setattr(steps, "Drawing", lambda _: contextlib.nullcontext())
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = rm.compile_step(model, F.cross_entropy, optimizer)
    with pytest.warns(rm.RoutingWarning, match="RM705"):
        for _ in range(3):  # the first one is watched, and one that differs is no proof
            step(torch.randn(8, 16), torch.randint(0, 4, (8,)))
    assert step.report()["compiled"] == 0


@pytest.mark.parametrize("kind", ["step", "loss"])
@pytest.mark.parametrize(("differing", "compiled"), [((1,), 3), ((1, 2), 0), ((1, 3), 0)])
def test_a_program_is_refused_at_the_second_batch_that_differs(
    kind: str, differing: tuple[int, ...], compiled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value at the corner of a ReLU may fall on either side of it."""
    name = "differs" if kind == "step" else "gradients_differ"
    genuine, calls = getattr(check, name), itertools.count(1)

    def sometimes(*arguments: Any) -> str:
        return "a bias" if next(calls) in differing else genuine(*arguments)

    monkeypatch.setattr(check, name, sometimes)
    torch.manual_seed(0)
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = (
        rm.compile_step(model, F.cross_entropy, optimizer)
        if kind == "step"
        else rm.compile_loss(model, F.cross_entropy)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rm.RoutingWarning)
        for _ in range(7):  # one watched, one that differs, two that agree, three compiled
            made(torch.randn(8, 16), torch.randint(0, 4, (8,)))
    report = made.report()
    assert report["compiled"] == compiled, report
    assert ("RM705" in report["reasons"]) == (compiled == 0)


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def _curve_of(kind: str, steps: int) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses eager and compiled of one run on batches with something to learn."""
    torch.manual_seed(0)
    ours = {"mlp": _mlp, "cnn with batch norm": _Normed, "gpt": _Gpt}[kind]()
    theirs = copy.deepcopy(ours)
    loss_fn = _token_loss if kind == "gpt" else F.cross_entropy
    a, b = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (ours, theirs))
    step = rm.compile_step(ours, loss_fn, a, options=STRICT)
    g = torch.Generator().manual_seed(1)
    eager, compiled = [], []
    for _ in range(steps):
        if kind == "gpt":
            start = torch.randint(0, 32, (8, 1), generator=g)
            ids = (start + 3 * torch.arange(17)) % 32
            x, y = ids[:, :-1], ids[:, 1:]
        elif kind == "mlp":
            x = torch.randn(32, 16, generator=g)
            y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        else:
            x = torch.randn(32, 3, 6, 6, generator=g)
            y = x.mean((2, 3)).argmax(1)
        b.zero_grad()
        wanted = loss_fn(theirs(x), y)
        wanted.backward()
        b.step()
        eager.append(float(wanted.detach()))
        compiled.append(float(step(x, y)))
    return eager, compiled, step.report()


@pytest.mark.parametrize("kind", ["mlp", "cnn with batch norm", "gpt"])
def test_loss_curves_are_eagers(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """RM_HEAVY=1 runs 1,000 steps and prints how far the curves are apart."""
    heavy = os.environ.get("RM_HEAVY") == "1"
    steps = 1000 if heavy else 40
    eager, compiled, report = _curve_of(kind, steps)
    assert report["compiled"] == steps - 2
    apart = [abs(c - e) / max(abs(e), 1e-3) for e, c in zip(eager, compiled, strict=True)]
    assert max(apart[:100]) < 1e-4
    tail = steps // 10
    assert sum(compiled[-tail:]) < 0.8 * sum(compiled[:tail]) or not heavy
    assert sum(compiled[-tail:]) == pytest.approx(sum(eager[-tail:]), rel=0.02, abs=0.02 * tail)
    if heavy:
        with capsys.disabled():
            print(
                f"\n{kind}: first {eager[0]:.4f}, last eager {eager[-1]:.6f} compiled "
                f"{compiled[-1]:.6f}; apart {max(apart[:100]):.1e} in 100 steps, {max(apart):.1e} "
                f"in {steps}"
            )


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sum"},
        {"mode": "mean", "padding_idx": 0},
        {"mode": "sum", "padding_idx": 3},
    ],
    ids=str,
)
def test_embedding_bags_train_as_in_eager(options: dict[str, Any]) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.EmbeddingBag(12, 6, **options)
            self.head = nn.Linear(6, 3)

        def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
            return self.head(self.bags(ids, offsets))

    torch.manual_seed(0)
    ours = Bags()
    theirs = copy.deepcopy(ours)
    a, b = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs))
    step = rm.compile_step(ours, F.cross_entropy, a, options=STRICT)
    g = torch.Generator().manual_seed(1)
    for i in range(8):
        if i % 2:
            inputs: Any = torch.randint(0, 12, (4, 5), generator=g)
            inputs[1] = inputs[1, 0]
        else:  # the third bag is empty
            inputs = (torch.randint(0, 12, (9,), generator=g), torch.tensor([0, 3, 7, 7]))
        y = torch.randint(0, 3, (4,), generator=g)
        b.zero_grad()
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        wanted = F.cross_entropy(theirs(*args), y)
        wanted.backward()
        b.step()
        assert float(step(inputs, y)) == pytest.approx(float(wanted.detach()), rel=1e-4)
    assert step.report()["compiled"] == 4  # of each kind one was watched and one compared
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("writer", ["compiled", "eager"])
def test_a_checkpoint_goes_on_alike_in_eager_and_compiled(writer: str, tmp_path: Path) -> None:
    """RM_HEAVY=1 writes it at step 500 and goes on for 500."""
    half = 500 if os.environ.get("RM_HEAVY") == "1" else 8

    def start() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = _Gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * half)

    def run(parts: Any, kind: str, steps: range) -> list[float]:
        model, optimizer, schedule = parts
        step = rm.compile_step(model, _token_loss, optimizer, options=STRICT)
        losses = []
        for i in steps:
            first = torch.randint(0, 32, (8, 1), generator=torch.Generator().manual_seed(i))
            ids = (first + 3 * torch.arange(17)) % 32
            x, y = ids[:, :-1], ids[:, 1:]
            if kind == "compiled":
                losses.append(float(step(x, y)))
            else:
                optimizer.zero_grad()
                loss = _token_loss(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            schedule.step()
        if kind == "compiled":
            assert step.report()["compiled"] >= len(steps) - 2
        return losses

    file = tmp_path / "checkpoint.pt"
    parts = start()
    run(parts, writer, range(half))
    torch.save([part.state_dict() for part in parts], file)
    curves = {}
    for reader in ("compiled", "eager"):
        parts = start()
        for part, state in zip(parts, torch.load(file), strict=True):
            part.load_state_dict(state)
        curves[reader] = run(parts, reader, range(half, 2 * half))
    wanted = curves["eager"]
    assert curves["compiled"][:100] == pytest.approx(wanted[:100], rel=1e-4)
    assert curves["compiled"] == pytest.approx(wanted, rel=1e-2)
    uncut = start()
    assert run(uncut, writer, range(2 * half))[half:][:100] == pytest.approx(wanted[:100], rel=1e-4)
