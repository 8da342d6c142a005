"""`compile_loss`: losses whose backward is compiled, in loops that torch and others write."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm

STRICT = {"fallback": "error"}


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5)
    )


def _batches(count: int, rows: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 6, generator=g), torch.randint(0, 5, (rows,), generator=g))
        for _ in range(count)
    ]


def _train(
    model: nn.Module, loss_of: Callable[..., torch.Tensor], accumulate: int = 2
) -> tuple[list[float], torch.optim.Optimizer]:
    """A loop with accumulation, clipping, a schedule and an optimizer that no program knows."""
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
    losses = []
    for i, (x, y) in enumerate(_batches(12)):
        loss = loss_of(x, y) / accumulate
        loss.backward()
        losses.append(float(loss.detach()))
        if (i + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses, optimizer


def test_a_loop_with_accumulation_clipping_and_any_optimizer_trains_as_in_eager() -> None:
    ours = _mlp()
    theirs = copy.deepcopy(ours)
    compiled = rm.compile_loss(ours, F.cross_entropy, options=STRICT)
    mine, _ = _train(ours, compiled)
    wanted, _ = _train(theirs, lambda x, y: F.cross_entropy(theirs(x), y))
    assert mine == pytest.approx(wanted, rel=1e-4)
    report = compiled.report()
    assert report["compiled"] == 10 and report["eager"] == 2  # one watched, one compared
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=2e-4, atol=2e-5)


def test_gradients_are_scaled_added_and_given_once() -> None:
    model = _mlp()
    compiled = rm.compile_loss(model, F.cross_entropy, options=STRICT)
    (x, y), (z, w) = _batches(2)
    compiled(x, y)
    parameters = list(model.parameters())

    def eager(scale: float, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        loss = F.cross_entropy(model(x), y) * scale
        return list(torch.autograd.grad(loss, parameters))

    (compiled(x, y) * 3).backward(retain_graph=True)
    wanted = eager(3, x, y)
    for p, g in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-3, atol=1e-6)
    kept = [p.grad.clone() for p in parameters]
    loss = compiled(z, w)
    loss.backward(retain_graph=True)
    loss.backward()  # a graph that was kept
    for p, before, g in zip(parameters, kept, eager(1, z, w), strict=True):
        torch.testing.assert_close(p.grad, before + 2 * g, rtol=1e-3, atol=1e-6)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    first = compiled(x, y)
    got = torch.autograd.grad(first, parameters)
    assert all(p.grad is not g for p, g in zip(parameters, got, strict=True))


def test_a_parameter_that_changed_before_backward_is_torchs_error() -> None:
    model = _mlp()
    compiled = rm.compile_loss(model, F.cross_entropy, options=STRICT)
    x, y = _batches(1)[0]
    for _ in range(2):
        compiled(x, y)
    loss = compiled(x, y)
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    compiled(x, y).backward()  # and the next one is well
    assert compiled.report()["compiled"] == 2


def test_two_gradients_that_are_one_value_are_two_tensors() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(5))
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * x + self.a + self.b

    model = Twice()
    compiled = rm.compile_loss(model, F.cross_entropy, options=STRICT)
    x, y = torch.randn(4, 5), torch.randint(0, 5, (4,))
    for _ in range(2):
        compiled(x, y)
    compiled(x, y).backward()
    kept = model.b.grad.clone()
    model.a.grad.zero_()
    assert torch.equal(model.b.grad, kept) and kept.abs().max() > 0


def test_frozen_and_unused_parameters_have_no_gradient_and_hooks_run() -> None:
    model = _mlp()
    model[0].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    compiled = rm.compile_loss(model, F.cross_entropy, options=STRICT)
    x, y = _batches(1)[0]
    for _ in range(2):
        compiled(x, y)
    seen = []
    model[3].bias.register_hook(lambda g: seen.append(g.clone()) or g * 0)
    compiled(x, y).backward()
    assert model[0].weight.grad is None and model.unused.grad is None
    assert len(seen) == 1 and seen[0].abs().max() > 0 and model[3].bias.grad.abs().max() == 0
    model[0].weight.requires_grad_(True)  # another program, which is checked when the hook is gone
    with pytest.raises(rm.Error, match="RM706"):
        compiled(x, y)


def test_a_gradient_that_is_no_number_makes_the_scaler_skip_the_step() -> None:
    model = _mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = rm.compile_loss(model, F.cross_entropy, options=STRICT)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(compiled(x, y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    batches = _batches(4)
    for x, y in batches[:3]:
        step(x, y)
    kept = [p.detach().clone() for p in model.parameters()]
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    x, y = batches[3]
    step(torch.full_like(x, float("nan")), y)
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), kept, strict=True))
    for i, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(v, moments[i][k]) for k, v in state.items())
    assert compiled.report()["compiled"] == 2  # behind one watched and one compared


def test_a_first_loss_that_is_no_number_decides_nothing() -> None:
    model = _mlp()
    compiled = rm.compile_loss(model, F.cross_entropy, options=STRICT)
    x, y = _batches(1)[0]
    assert compiled(x * float("nan"), y).isnan()
    for _ in range(2):
        compiled(x, y)
    report = compiled.report()
    assert report["compiled"] == 1 and report["eager"] == 2 and not report["reasons"]


def test_shapes_never_seen_and_losses_that_are_no_scalars_are_eagers() -> None:
    model = _mlp()
    compiled = rm.compile_loss(model, F.cross_entropy, options={"fallback": "allow"})
    for rows in (8, 3, 8, 3, 8, 3):
        compiled(*_batches(1, rows)[0]).backward()
    assert compiled.report()["compiled"] == 2
    each = rm.compile_loss(
        model, lambda o, t: F.cross_entropy(o, t, reduction="none"), options={"fallback": "allow"}
    )
    x, y = _batches(1)[0]
    for _ in range(2):
        assert each(x, y).shape == (8,)
    assert "RM704" in each.report()["reasons"]
    with torch.no_grad():
        assert not compiled(x, y).requires_grad


def _trainer(model: nn.Module, folder: Any, **arguments: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    g = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(48):
        ids = torch.randint(1, 64, (12,), generator=g)
        rows.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "labels": ids[0] % 3,
            }
        )
    settings = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-3,
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
    }
    given = transformers.TrainingArguments(output_dir=str(folder), **settings | arguments)
    return transformers.Trainer(model=model, args=given, train_dataset=rows, eval_dataset=rows[:8])


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
    return transformers.BertForSequenceClassification(config)


def _curve(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def test_a_trainer_trains_as_in_eager_on_compiled_losses(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """RM_HEAVY=1 takes 1,000 optimizer steps and prints how far the curves are apart."""
    heavy = os.environ.get("RM_HEAVY") == "1"
    steps = 1000 if heavy else 12
    ours = _bert()
    theirs = copy.deepcopy(ours)
    mine, eager = (_trainer(m, tmp_path, max_steps=steps) for m in (ours, theirs))
    compiled = rm.compile_trainer(mine, options=STRICT)
    mine.train()
    eager.train()
    losses, wanted = _curve(mine, "loss"), _curve(eager, "loss")
    assert len(losses) == steps
    assert losses[:100] == pytest.approx(wanted[:100], rel=1e-4)
    assert _curve(mine, "learning_rate") == _curve(eager, "learning_rate")
    assert _curve(mine, "grad_norm")[:12] == pytest.approx(
        _curve(eager, "grad_norm")[:12], rel=1e-3
    )
    report = compiled.report()
    # The first forward writes a field of the model's configuration; one is watched, one judged.
    assert report["eager"] <= 3
    assert report["compiled"] + report["eager"] == 2 * steps
    assert mine.evaluate()["eval_loss"] == pytest.approx(eager.evaluate()["eval_loss"], rel=1e-2)
    compiled.remove()
    assert "compute_loss" not in vars(mine)
    if heavy:
        apart = [abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, wanted, strict=True)]
        with capsys.disabled():
            print(
                f"\nBERT by Trainer: first {wanted[0]:.4f}, last eager {wanted[-1]:.6f} compiled "
                f"{losses[-1]:.6f}; apart {max(apart[:100]):.1e} in 100 steps, {max(apart):.1e} "
                f"in {steps}"
            )


def test_a_trainer_goes_on_from_a_checkpoint_of_either_kind(tmp_path: Any) -> None:
    curves = []
    for first, second in ((True, False), (False, True), (False, False)):
        folder = tmp_path / f"{first}{second}"
        start = _trainer(_bert(), folder, save_strategy="steps", save_steps=6, max_steps=6)
        if first:
            rm.compile_trainer(start, options=STRICT)
        start.train()
        go_on = _trainer(_bert(), folder, max_steps=12)
        if second:
            rm.compile_trainer(go_on, options=STRICT)
        go_on.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
        curves.append(_curve(go_on, "loss")[-6:])
    assert curves[0] == pytest.approx(curves[2], rel=1e-3)
    assert curves[1] == pytest.approx(curves[2], rel=1e-3)


def test_a_trainer_with_a_loss_of_its_own_stays_eager(tmp_path: Any) -> None:
    trainer = _trainer(_bert(), tmp_path, label_smoothing_factor=0.1, max_steps=2)
    compiled = rm.compile_trainer(trainer, options={"fallback": "allow"})
    trainer.train()
    report = compiled.report()
    assert report["compiled"] == 0 and "RM710" in report["reasons"]
