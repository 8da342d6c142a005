"""im2col and col2im equal torch's in every form of a window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_special_functions import run
from torch.nn import functional

WINDOWS: dict[str, dict[str, Any]] = {
    "a column": {"kernel_size": (9, 1), "padding": (4, 0)},
    "squares": {"kernel_size": 3},
    "steps and gaps": {"kernel_size": (2, 3), "dilation": (2, 1), "stride": (1, 2), "padding": 1},
    "apart": {"kernel_size": 2, "stride": 3},
    "large": {"kernel_size": (9, 8), "padding": 2, "stride": 2},
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("batched", [True, False], ids=["a batch", "one image"])
def test_windows_and_their_sums_are_torchs(window: str, batched: bool) -> None:
    sizes = WINDOWS[window]
    x = torch.randn(2, 3, 10, 11) if batched else torch.randn(3, 10, 11)
    columns = functional.unfold(x, **sizes)
    assert torch.equal(run(lambda x: functional.unfold(x, **sizes), x), columns)
    folded = run(lambda y: functional.fold(y, (10, 11), **sizes), columns)
    torch.testing.assert_close(folded, functional.fold(columns, (10, 11), **sizes))


def test_windows_in_half_precision_are_moved_only() -> None:
    x = torch.randn(2, 4, 7, 5, dtype=torch.bfloat16)
    found = run(lambda x: functional.unfold(x, (3, 2), padding=1), x)
    assert torch.equal(found, functional.unfold(x, (3, 2), padding=1))


RESIZED: dict[str, dict[str, Any]] = {
    "larger": {"size": (13, 20)},
    "smaller": {"size": (4, 3)},
    "corners": {"size": (13, 5), "align_corners": True},
    "one element": {"size": (1, 1), "align_corners": True},
    "by factors": {"scale_factor": (1.7, 0.6)},
    "as it is": {"size": (7, 9)},
}


@pytest.mark.parametrize("form", RESIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bicubic_resizing_is_torchs(form: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 7, 9).to(dtype)

    def resized(x: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(x, mode="bicubic", **RESIZED[form])

    # torch rounds the weights of elements to bf16 as well.
    wanted = resized(x.float()).bfloat16() if dtype == torch.bfloat16 else resized(x)
    rounding = {"rtol": 2**-7, "atol": 1e-6} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(run(resized, x), wanted, **rounding)
