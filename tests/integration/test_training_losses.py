"""Losses in a compiled step: each against eager over several steps, value and update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm

_CLASSES = 5
_HEAVY = torch.tensor([0.5, 2.0, 0.0, 1.5, 3.0])  # weights of the classes


def _classes(rows: int, g: torch.Generator) -> torch.Tensor:
    return torch.randint(0, _CLASSES, (rows,), generator=g)


def _some_ignored(rows: int, g: torch.Generator) -> torch.Tensor:
    target = _classes(rows, g)
    target[::3] = -100
    return target


def _numbers(rows: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, _CLASSES, generator=g)


def _chances(rows: int, g: torch.Generator) -> torch.Tensor:
    chances = torch.rand(rows, _CLASSES, generator=g)
    chances[0, 0] = 0.0
    return chances / chances.sum(1, keepdim=True)


Loss = Callable[..., Any]
LOSSES: dict[str, tuple[Loss, Loss]] = {
    "cross entropy": (F.cross_entropy, _classes),
    "ignored": (F.cross_entropy, _some_ignored),
    "logarithm of a sum": (
        lambda o, t: (
            (torch.logsumexp(o, 1) - o.gather(1, t[:, None])[:, 0]).mean()
            + 0.1 * torch.logsumexp(o, (0, 1))
            + torch.logsumexp(o, 0, keepdim=True).square().mean()
        ),
        _classes,
    ),
    "smoothed": (lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1), _some_ignored),
    "sum": (lambda o, t: F.cross_entropy(o, t, reduction="sum", ignore_index=2), _classes),
    "none": (lambda o, t: F.cross_entropy(o, t, reduction="none").mean(), _some_ignored),
    "chances": (lambda o, t: F.cross_entropy(o, t, label_smoothing=0.2), _chances),
    "pixels": (
        lambda o, t: F.cross_entropy(o.view(2, -1, _CLASSES).mT, t.view(2, -1)),
        _classes,
    ),
    "module": (nn.CrossEntropyLoss(label_smoothing=0.05), _classes),
    "nll": (lambda o, t: F.nll_loss(F.log_softmax(o, 1), t), _classes),
    "weights": (lambda o, t: F.cross_entropy(o, t, weight=_HEAVY), _some_ignored),
    "weights, smoothed": (
        lambda o, t: F.cross_entropy(o, t, weight=_HEAVY, label_smoothing=0.1),
        _some_ignored,
    ),
    "weights, sum": (lambda o, t: F.cross_entropy(o, t, _HEAVY, reduction="sum"), _classes),
    "weights, none": (
        lambda o, t: F.cross_entropy(o, t, _HEAVY, reduction="none").square().mean(),
        _some_ignored,
    ),
    "weights, chances": (
        lambda o, t: F.cross_entropy(o, t, _HEAVY, label_smoothing=0.2),
        _chances,
    ),
    "weights, pixels": (
        lambda o, t: F.cross_entropy(o.view(2, -1, _CLASSES).mT, t.view(2, -1), _HEAVY),
        _some_ignored,
    ),
    "weights, module": (nn.CrossEntropyLoss(weight=_HEAVY), _classes),
    "weights, nll": (lambda o, t: F.nll_loss(F.log_softmax(o, 1), t, _HEAVY), _some_ignored),
    "mse": (F.mse_loss, _numbers),
    "l1": (F.l1_loss, _numbers),
    "huber": (lambda o, t: F.huber_loss(o, t, delta=0.7), _numbers),
    "smooth l1": (lambda o, t: F.smooth_l1_loss(o, t, beta=0.3, reduction="sum"), _numbers),
    "bce": (F.binary_cross_entropy_with_logits, _chances),
    "bce, weights": (
        lambda o, t: F.binary_cross_entropy_with_logits(
            o, t, pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0, 0.5])
        ),
        _chances,
    ),
    "kl": (lambda o, t: F.kl_div(F.log_softmax(o, 1), t, reduction="batchmean"), _chances),
    "kl of logs": (
        lambda o, t: F.kl_div(F.log_softmax(o, 1), F.log_softmax(t, 1), log_target=True),
        _numbers,
    ),
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, _CLASSES))


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_trains_as_in_eager(name: str) -> None:
    loss_fn, targets = LOSSES[name]
    ours, theirs = _model(), _model()
    a, b = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (ours, theirs))
    step = rm.compile_step(ours, loss_fn, a, options={"fallback": "error"})
    g = torch.Generator().manual_seed(2)
    for _ in range(6):
        x, y = torch.randn(8, 6, generator=g), targets(8, g)
        loss = step(x, y)
        b.zero_grad()
        wanted = loss_fn(theirs(x), y)
        wanted.backward()
        b.step()
        assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-4)
    assert step.report()["compiled"] == 4
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


def test_the_logits_loss_has_its_slope_at_nought() -> None:
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_fn = F.binary_cross_entropy_with_logits
    step = rm.compile_step(model, loss_fn, optimizer, options={"fallback": "error"})
    batch = (torch.ones(1, 2), torch.zeros(1, 2))
    for _ in range(2):  # eager, then the gate
        step(*batch)
    optimizer.param_groups[0]["lr"] = 1.0
    step(*batch)
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 2), -0.25))


def test_a_label_outside_is_eagers_error_and_changes_nothing() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = rm.compile_step(model, F.cross_entropy, optimizer, options={"fallback": "allow"})
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 4])
    for _ in range(3):
        step(x, y)
    kept = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(IndexError):
        step(x, torch.tensor([0, 1, 2, 5]))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), kept, strict=True))


@pytest.mark.parametrize("how", ["in place", "another tensor", "through numpy"])
def test_weights_of_classes_that_change_are_seen(how: str) -> None:
    losses = [nn.CrossEntropyLoss(weight=_HEAVY.clone()) for _ in range(2)]
    ours, theirs = _model(), _model()
    a, b = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (ours, theirs))
    step = rm.compile_step(ours, losses[0], a, options={"fallback": "allow"})
    for number in range(8):
        x, y = torch.randn(8, 6), torch.randint(0, _CLASSES, (8,))
        if number in (3, 5):
            for loss in losses:
                assert loss.weight is not None
                if how == "in place":
                    loss.weight.mul_(torch.tensor([1.0, 3.0, 1.0, 0.2, 1.0]))
                elif how == "another tensor":
                    loss.weight = loss.weight.flip(0) + number
                else:
                    loss.weight.numpy()[number - 3] = 7.0
        loss = step(x, y)
        b.zero_grad()
        wanted = losses[1](theirs(x), y)
        wanted.backward()
        b.step()
        assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-4), number
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)
