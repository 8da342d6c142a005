"""Losses of the small framework with all their options: values and gradients are torch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as TF

import rm_abstract as rm
from rm_abstract import functional as F

REDUCTIONS = ("mean", "sum", "none")
Arguments = dict[str, Any]


def _ids(rows: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 5, rows)


def _chances(shape: tuple[int, ...]) -> torch.Tensor:
    chances = torch.rand(shape, dtype=torch.float64)
    chances.view(-1)[0] = 0.0
    return chances / chances.sum(-1, keepdim=True)


def _check(
    ours: Callable[..., Any], theirs: Callable[..., Any], x: torch.Tensor, *rest: Any
) -> None:
    """``rest``: what both take; tensors become ours."""
    mine, wanted = rm.Tensor(x.clone(), requires_grad=True), x.clone().requires_grad_()
    given = [
        {k: rm.Tensor(v) if isinstance(v, torch.Tensor) else v for k, v in r.items()}
        if isinstance(r, dict)
        else rm.Tensor(r)
        for r in rest
    ]
    a = ours(mine, *(g for g in given if not isinstance(g, dict)), **given[-1])
    b = theirs(wanted, *(r for r in rest if not isinstance(r, dict)), **rest[-1])
    torch.testing.assert_close(a.torch(), b.detach(), rtol=1e-9, atol=1e-12)
    weights = torch.rand(b.shape, dtype=torch.float64)
    (a * rm.Tensor(weights)).sum().backward()
    (b * weights).sum().backward()
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad.torch(), wanted.grad, rtol=1e-8, atol=1e-11)


def _rows_last(x: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    """torch has the classes on axis 1."""
    if target.is_floating_point():
        target = target.movedim(-1, 1)
    return TF.cross_entropy(x.movedim(-1, 1), target, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("kind", ["numbers", "ignored", "chances"])
def test_cross_entropy(
    reduction: str, smoothing: float, weighed: bool, kind: str, seed: int
) -> None:
    torch.manual_seed(seed)
    options: Arguments = {"reduction": reduction, "label_smoothing": smoothing}
    if weighed:
        options["weight"] = torch.rand(5, dtype=torch.float64) + 0.1
    if kind == "ignored":
        options["ignore_index"] = 2
    for rows in ((7,), (2, 3)):
        target = _chances((*rows, 5)) if kind == "chances" else _ids(rows)
        if kind == "ignored":
            target.view(-1)[0] = 0  # one row counts
        x = torch.randn(*rows, 5, dtype=torch.float64)
        _check(F.cross_entropy, _rows_last, x, target, options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_losses_of_numbers(reduction: str, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = torch.randn(2, 4, 5, dtype=torch.float64)
    options: Arguments = {"reduction": reduction}
    _check(F.mse_loss, TF.mse_loss, x, y, options)
    _check(F.l1_loss, TF.l1_loss, x, y, options)
    for delta in (0.3, 2.0):
        _check(F.huber_loss, TF.huber_loss, x, y, {**options, "delta": delta})


@pytest.mark.parametrize("reduction, heavy", itertools.product(REDUCTIONS, [False, True]))
def test_losses_of_chances(reduction: str, heavy: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = 3.0 * torch.randn(4, 5, dtype=torch.float64), _chances((4, 5))
    x[0, 0], x[1, 1] = 800.0, -800.0  # exp of these is not finite
    options: Arguments = {"reduction": reduction}
    if heavy:
        options["pos_weight"] = torch.rand(5, dtype=torch.float64) * 3
    ours, theirs = F.binary_cross_entropy_with_logits, TF.binary_cross_entropy_with_logits
    _check(ours, theirs, x, y, options)


@pytest.mark.parametrize("reduction", [*REDUCTIONS, "batchmean"])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div(reduction: str, log_target: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = torch.randn(4, 5, dtype=torch.float64).log_softmax(1), _chances((4, 5))
    if log_target:
        y = torch.randn(4, 5, dtype=torch.float64).log_softmax(1)
    _check(F.kl_div, TF.kl_div, x, y, {"reduction": reduction, "log_target": log_target})


def test_another_reduction_is_refused() -> None:
    x = rm.Tensor(torch.ones(2, 3))
    for loss in (F.mse_loss, F.l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.kl_div):
        with pytest.raises(ValueError, match="expected 'mean'"):
            loss(x, x, reduction="median")
