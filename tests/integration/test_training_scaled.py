"""Steps in fp16: losses scaled before their gradients, as torch's autocast and GradScaler do it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm

STRICT = {"fallback": "error"}


class _Net(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 32), nn.Linear(32, 5), nn.LayerNorm(32)
        self.factor = factor  # small ones make gradients that fp16 cannot hold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(F.gelu(self.a(x)))) * self.factor


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(16, 6, generator=g), torch.randint(0, 5, (16,), generator=g)


def _eager(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    batch: tuple[torch.Tensor, torch.Tensor],
    clip_norm: float | None = None,
) -> float:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(batch[0]), batch[1])
    scaler.scale(loss).backward()
    if clip_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    scaler.step(optimizer)
    scaler.update()
    return float(loss.detach())


def _pair(kind: str, factor: float = 1.0) -> tuple[Any, ...]:
    torch.manual_seed(0)
    ours = _Net(factor)
    theirs = copy.deepcopy(ours)
    if kind == "sgd":
        made = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]
    else:
        made = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (ours, theirs)]
    return ours, theirs, *made


@pytest.mark.parametrize(("kind", "clip_norm"), [("sgd", None), ("adamw", 0.5)])
def test_a_step_is_that_of_a_loop_with_a_scaler(kind: str, clip_norm: float | None) -> None:
    ours, theirs, a, b = _pair(kind)
    mine, scaler = (torch.amp.GradScaler("cpu", growth_interval=4) for _ in range(2))
    step = rm.compile_step(
        ours, F.cross_entropy, a, precision="fp16", scaler=mine, clip_norm=clip_norm, options=STRICT
    )
    for i in range(12):
        wanted = _eager(theirs, b, scaler, _batch(i), clip_norm)
        assert float(step(*_batch(i))) == pytest.approx(wanted, rel=5e-3)
        assert mine.state_dict() == scaler.state_dict(), i
    assert mine.get_scale() > 2.0**15  # it grew, or was found too large and grew again
    assert step.report()["compiled"] >= 7 and step.scaler is mine
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0.05, atol=0.02)


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [t for state in optimizer.state.values() for t in state.values()]
    return [t.detach().clone() for t in (*model.parameters(), *moments)]


def test_a_gradient_that_is_no_number_changes_nothing_but_the_scale() -> None:
    model, _, optimizer, _ = _pair("adamw")
    step = rm.compile_step(model, F.cross_entropy, optimizer, precision="fp16", options=STRICT)
    for i in range(8):
        step(*_batch(i))
    compiled, scale = step.report()["compiled"], step.scaler.get_scale()
    assert compiled > 0
    before = _held(model, optimizer)
    x, y = _batch(0)
    x[0, 0] = math.nan
    assert step(x, y).isnan()
    assert step.report()["compiled"] == compiled + 1
    assert step.scaler.get_scale() == scale / 2
    after = _held(model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True))
    assert step(*_batch(1)).isfinite()
    changed = _held(model, optimizer)
    assert not any(torch.equal(p, q) for p, q in zip(before, changed, strict=True))


def test_gradients_that_fp16_cannot_hold_arrive_by_the_scale() -> None:
    model, _, optimizer, _ = _pair("sgd", factor=1e-7)
    small = torch.amp.GradScaler("cpu", init_scale=1.0)
    step = rm.compile_step(
        model, F.cross_entropy, optimizer, precision="fp16", scaler=small, options=STRICT
    )
    before = model.a.weight.detach().clone()
    for i in range(4):
        step(*_batch(i))
    assert torch.equal(model.a.weight, before)  # all gradients became zeros
    small.load_state_dict({**small.state_dict(), "scale": 2.0**16})
    compiled = step.report()["compiled"]
    step(*_batch(5))
    assert step.report()["compiled"] == compiled + 1
    assert not torch.equal(model.a.weight, before)


def test_a_loop_of_its_own_gives_its_scaler_to_the_loss() -> None:
    ours, theirs, a, b = _pair("adamw")
    mine, scaler = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    compiled = rm.compile_loss(ours, F.cross_entropy, precision="fp16", scaler=mine, options=STRICT)
    for i in range(10):
        for optimizer in (a, b):
            optimizer.zero_grad()
        for part in range(2):  # accumulated
            batch = _batch(2 * i + part)
            loss = compiled(*batch)
            mine.scale(loss / 2).backward()
            with torch.autocast("cpu", torch.float16):
                wanted = F.cross_entropy(theirs(batch[0]), batch[1])
            scaler.scale(wanted / 2).backward()
            assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=5e-3)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            if q.grad.isfinite().all():
                atol = 0.02 * float(q.grad.abs().max())
                torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=atol)
        for optimizer, each in ((a, mine), (b, scaler)):
            each.step(optimizer)
            each.update()
        assert mine.get_scale() == scaler.get_scale()
    assert compiled.report()["compiled"] >= 10


def test_a_checkpoint_with_its_scaler_goes_on_alike() -> None:
    model, other, optimizer, theirs = _pair("adamw")
    step = rm.compile_step(model, F.cross_entropy, optimizer, precision="fp16", options=STRICT)
    for i in range(8):
        step(*_batch(i))
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.scaler.state_dict()))
    scaler = torch.amp.GradScaler("cpu")
    for part, held in zip((other, theirs, scaler), state, strict=True):
        part.load_state_dict(held)
    for i in range(8, 12):
        wanted = _eager(other, theirs, scaler, _batch(i))
        assert float(step(*_batch(i))) == pytest.approx(wanted, rel=5e-3)
    assert scaler.state_dict() == step.scaler.state_dict()


def test_values_are_clipped_as_torch_clips_them() -> None:
    torch.manual_seed(0)
    ours = _Net()
    theirs = copy.deepcopy(ours)
    a, b = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, theirs))
    step = rm.compile_step(ours, F.cross_entropy, a, clip_value=0.01, options=STRICT)
    for i in range(5):
        x, y = _batch(i)
        b.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        nn.utils.clip_grad_value_(theirs.parameters(), 0.01)
        b.step()
        step(x, y)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert step.report()["compiled"] >= 3
    step.clip_value = None  # another program
    x, y = _batch(9)
    before = ours.b.weight.detach().clone()
    step(x, y)
    assert float((ours.b.weight.detach() - before).abs().max()) > 0.5 * 0.01 * 1.01
    with pytest.raises(ValueError, match="clip_norm or clip_value"):
        rm.compile_step(ours, F.cross_entropy, a, clip_value=1.0, clip_norm=1.0)


def test_a_scaler_that_is_switched_off_is_none() -> None:
    model, _, optimizer, _ = _pair("sgd")
    off = torch.amp.GradScaler("cpu", enabled=False)
    step = rm.compile_step(model, F.cross_entropy, optimizer, scaler=off, options=STRICT)
    for i in range(3):
        step(*_batch(i))
    assert step.scaler is None and step.report()["compiled"] >= 1
