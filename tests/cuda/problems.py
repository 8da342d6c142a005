"""Random problems and tolerances that the operator tests share.

A tolerance is one rounding of the result's dtype plus fp32 accumulation over the reduction, in
units of the largest magnitude that was summed.
"""

from __future__ import annotations

import numpy as np
import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
F = torch.nn.functional
ACTIVATIONS = (
    ("none", lambda x: x),
    ("gelu", F.gelu),
    ("relu", F.relu),
    ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    ("silu", F.silu),
    ("tanh", torch.tanh),
    ("sigmoid", torch.sigmoid),
    ("leaky_relu", lambda x: F.leaky_relu(x, 0.1)),
)
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def tolerance(dtype: str, reduction: int, roundings: int = 1) -> float:
    """Relative to the magnitude of the terms: result roundings and a pairwise-like fp32 sum."""
    return roundings * EPSILON[dtype] + (8 + np.sqrt(reduction)) * 2.0**-23


def assert_close(
    got: torch.Tensor, expected: torch.Tensor, bound: float, scale: float, what: str
) -> None:
    """|got - expected| <= bound * (|expected| + scale), NaN and Inf in the same places."""
    got = got.double()
    expected = expected.double().to(got.device)
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isnan(got), torch.isnan(expected)), f"{what}: NaNs differ"
    difference = (got - expected).abs()[finite]
    limit = (bound * (expected.abs() + scale))[finite]
    worst = (difference - limit).max().item() if difference.numel() else 0.0
    assert worst <= 0, f"{what}: off by {difference.max().item():.3e}, {worst:.3e} above the bound"
    same = (got == expected) | torch.isnan(expected) | finite
    assert bool(same.all()), f"{what}: infinities differ"


MAGNITUDES = "inf 1e38 1e20 6e4 300 88 30 12 10 6 5 4.5 4 1 1e-3 0"
HOSTILE = (float("nan"), *(float(sign + v) for v in MAGNITUDES.split() for sign in ("", "-")))


def assert_as_torch(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """NaN, infinities and values as torch's; both are of the same dtype."""
    rounding = EPSILON[str(got.dtype)[6:]]
    torch.testing.assert_close(
        got.double(), wanted.double(), rtol=2 * rounding + 1e-5, atol=3e-7, equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


def row_shapes(rng: np.random.Generator, count: int, longest: int) -> list[tuple[int, int]]:
    """(rows, n): odd sizes, whole vectors, one-element and long rows."""
    shapes = []
    for k in range(count):
        n = int(np.exp(rng.uniform(0, np.log(longest))))
        if k % 2 == 0:
            n = max(8, n // 8 * 8)
        shapes.append((int(rng.integers(1, max(2, min(300, 400_000 // n)))), n))
    return shapes


def to_numpy(t: torch.Tensor) -> np.ndarray:
    """Host arrays as the modules take them: bfloat16 as its bit patterns."""
    t = t.cpu().contiguous()
    return t.view(torch.int16).numpy().view(np.uint16) if t.dtype == torch.bfloat16 else t.numpy()


def from_numpy(a: np.ndarray) -> torch.Tensor:
    if a.dtype == np.uint16:
        return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(a)


def quantised_weight(
    rng: np.random.Generator,
    n: int,
    depth: int,
    group: int,
    bits: int,
    t: torch.dtype,
    largest_scale: float = 0.1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(w as stored, scales, the weights in float64)."""
    low, high = (-128, 128) if bits == 8 else (-8, 8)
    draw = torch.Generator("cuda").manual_seed(int(rng.integers(1 << 31)))
    q = torch.randint(low, high, (n, depth), device="cuda", generator=draw)
    scales = (torch.rand(depth // group, n, device="cuda") + 0.1) * largest_scale
    scales = scales.to(t)
    full = q.double() * scales.double().T.repeat_interleave(group, 1)
    if bits == 8:
        return q.to(torch.int8), scales, full
    u = (q + 8).to(torch.uint8)
    return u[:, ::2] | (u[:, 1::2] << 4), scales, full


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding by halves."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin
