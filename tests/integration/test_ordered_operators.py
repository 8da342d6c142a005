"""Medians, quantiles, pools to any size, shifts, writes by mask or number: equal to torch's, where
sizes are even, odd or 1, and with ties, NaN and infinities among the elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_capture_operators import check, cube, floats, matrix
from test_special_functions import run

NAN = torch.tensor(
    [[1.0, math.nan, 3, 2], [4, 4, 4, 4], [math.nan] * 4, [math.inf, 1, -math.inf, 0]]
)


def _treats_nan_as_torch_does(function: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
    for x in (NAN, NAN.nan_to_num(posinf=7.0, neginf=-7.0), torch.randn(4, 4)):
        for found, expected in zip(run(function, x), function(x), strict=True):
            torch.testing.assert_close(found, expected, equal_nan=True)


def test_medians_treat_nan_as_torch_does() -> None:
    def medians(x: torch.Tensor) -> list[torch.Tensor]:
        places = [x.median(1).values, x.nanmedian(1, keepdim=True).values]
        return [x.median(), x.nanmedian(), *places, x.nanmean(1), x.nanmean()]

    _treats_nan_as_torch_does(medians)


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="this PyTorch traces no quantile of symbolic sizes"
)
def test_quantiles_treat_nan_as_torch_does() -> None:
    def quantiles(x: torch.Tensor) -> list[torch.Tensor]:
        q = torch.tensor([0.0, 0.3, 1.0])
        kinds = ("linear", "lower", "higher", "midpoint", "nearest")
        return [
            *(torch.quantile(x, 0.4, dim=1, interpolation=kind) for kind in kinds),
            torch.quantile(x, q, dim=0, keepdim=True),
            torch.nanquantile(x, q, dim=1),
            torch.nanquantile(x, 0.25),
        ]

    _treats_nan_as_torch_does(quantiles)


CASES: dict[str, tuple[Callable[..., Any], Callable[[int, int], Any]]] = {
    "the k-th value": (lambda x: (*x.kthvalue(2, 1), x.kthvalue(1, 0, keepdim=True)[0]), matrix),
    "median and its place": (lambda x: x.median(2), cube),
    "mean pool to any size": (
        lambda x: (F.adaptive_avg_pool2d(x, (3, 5)), F.adaptive_avg_pool1d(x.mT, 3)),
        lambda a, b: floats(a, b, 8),
    ),
    "maximum pool to any size": (
        lambda x: (F.adaptive_max_pool2d(x, (3, 5)), F.adaptive_max_pool1d(x.mT, 3)),
        lambda a, b: floats(a, b, 8),
    ),
    "nearest resizing to a size": (
        lambda x: (F.interpolate(x.mT, 9), F.interpolate(x.mT, 3, mode="nearest-exact")),
        cube,
    ),
    "shifted halves": (lambda x: torch.fft.fftshift(x) - torch.fft.ifftshift(x, dim=1), matrix),
    "rolled by a size": (lambda x: x.roll(x.shape[1] + 1, 0) + x.roll(-2, 1), matrix),
    "windows": (
        lambda x: (x.unfold(1, 3, 2), x.unfold(0, 2, 1)),
        lambda a, b: floats(a, b + 3),
    ),
    "a written diagonal": (
        lambda x: (
            torch.diagonal_scatter(x, x.diagonal(-1) * 2, -1),
            torch.diagonal_copy(x, 1),
            x.trace(),
        ),
        matrix,
    ),
    "written by mask": (
        lambda x: x.masked_scatter(x > 0, torch.arange(float(x.numel())) + x.sum()),
        matrix,
    ),
    "written by number": (
        lambda x: (
            x.put(torch.tensor([3, -1]), x[0, :2]),
            x.put(torch.tensor([3, 3]), x[0, :2], accumulate=True),
        ),
        matrix,
    ),
    "a source larger than its index": (
        lambda x: x.scatter(1, torch.zeros(2, 1, dtype=torch.long), x * 2),
        matrix,
    ),
    "a sum of products": (
        lambda x: torch.addbmm(x[0], x, x.transpose(1, 2) @ x, beta=0.5, alpha=2),
        lambda a, b: floats(a, b, b),
    ),
    "bilinear": (
        lambda x, w, b: F.bilinear(x, x * 2, w, b),
        lambda a, b: (floats(a, b), floats(5, b, b), floats(5)),
    ),
    "a norm and its numbers": (
        lambda x: torch.native_layer_norm(x, (8,), None, None, 1e-5),
        cube,
    ),
    "losses that write in place": (
        lambda x, y: (
            F.margin_ranking_loss(x, y, x.sign(), margin=0.1),
            F.hinge_embedding_loss(x, y.sign()),
        ),
        lambda a, b: (floats(a, b), floats(a, b)),
    ),
    "a matrix's power": (lambda x: torch.linalg.matrix_power(x, 5), lambda a, b: floats(a, a)),
    "an identity": (lambda x: (torch.positive(x) + 1, torch.real(x) * 2), matrix),
}


@pytest.mark.parametrize("name", CASES)
def test_operator(name: str) -> None:
    check(*CASES[name], True)


def test_infinities_stay_in_their_window() -> None:
    x = torch.arange(30.0).reshape(1, 1, 30)
    x[..., 4], x[..., 20] = math.inf, math.nan
    for pool in (F.adaptive_avg_pool1d, F.adaptive_max_pool1d):
        found = run(lambda x, pool=pool: pool(x, 7), x)
        torch.testing.assert_close(found, pool(x, 7), equal_nan=True)


def test_a_forward_without_tensors_is_a_program() -> None:
    windows = run(lambda: [torch.arange(5.0) / 2, torch.signal.windows.hann(6)])
    torch.testing.assert_close(windows[0], torch.arange(5.0) / 2)
    torch.testing.assert_close(windows[1], torch.signal.windows.hann(6))
