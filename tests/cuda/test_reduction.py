"""reduction over any axes against float64, every kernel and kind."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from problems import DTYPES, assert_close, tolerance

pytestmark = pytest.mark.cuda
KINDS = ("sum", "mean", "prod", "max", "min", "argmax", "argmin")
KERNELS = ("", "reduction_rows_sm80", "reduction_columns_any", "reduction_naive_any")


def reference(x: torch.Tensor, kind: str, axes: list[int]) -> torch.Tensor:
    """The value over `axes`, kept with size 1."""
    kept = [d for d in range(x.ndim) if d not in axes]
    flat = x.permute(*kept, *axes).reshape(*(x.shape[d] for d in kept), -1)
    value = getattr(flat, kind)(-1)
    value = value[0] if isinstance(value, tuple) else value
    value = value.values if kind in ("max", "min") and not torch.is_tensor(value) else value
    return value.reshape([1 if d in axes else x.shape[d] for d in range(x.ndim)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_reductions_equal_float64(
    module: Callable[[str], ModuleType], dtype: str, kernel: str, seed: int
) -> None:
    m, rng, t = module("reduction"), np.random.default_rng(seed), DTYPES[dtype]
    torch.manual_seed(seed)
    ran = 0
    for k in range(245):
        rank, kind = int(rng.integers(1, 5)), KINDS[k % 7]
        shape = [int(rng.integers(1, 7)) * int(rng.choice([1, 8])) for _ in range(rank)]
        if k >= 210 and kind != "prod":  # few results of many elements, by several blocks each
            rank, shape = 2, [[3, 50_000], [40_000, 8], [999, 520], [5_000, 64], [1, 70_001]][k % 5]
        x = torch.randn(shape, device="cuda")
        x = (1 + x / 16 if kind == "prod" else x).to(t)
        if k % 3 == 0:
            x = x.permute(*(int(a) for a in rng.permutation(rank)))
        axes = [d for d in range(rank) if rng.random() < 0.5] or [rank - 1]
        count = int(np.prod([x.shape[d] for d in axes]))
        if kind == "prod" and count > 64:
            continue
        out = torch.int64 if kind.startswith("arg") else t
        y = torch.zeros([1 if d in axes else n for d, n in enumerate(x.shape)], device="cuda").to(
            out
        )
        try:
            size = m.workspace(x, kind, y=y) if k % 2 == 0 else 0
            room = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
            m.forward(x, kind, y=y, workspace=room, kernel=kernel)
        except m.Unsupported:
            assert kernel and kernel != "reduction_naive_any"
            continue
        ran += 1
        wanted = reference(x.double(), kind, axes)
        what = f"problem {k}, {kind}, {tuple(x.shape)}, {axes}, seed {seed}"
        if kind.startswith("arg"):
            # equal values: torch on CUDA does not promise the first
            flat = x.permute(*[d for d in range(rank) if d not in axes], *axes).reshape(-1, count)
            best = flat.max(1).values if kind == "argmax" else flat.min(1).values
            picked = flat.gather(1, y.reshape(-1, 1)).squeeze(1)
            assert torch.equal(picked, best), what
            first = (flat == best[:, None]).int().argmax(1) if count else y.reshape(-1)
            assert torch.equal(y.reshape(-1), first), what
        else:
            assert_close(y, wanted, tolerance(dtype, count, 2 if kind == "prod" else 1),
                         float(np.sqrt(count)) + 1, what)  # fmt: skip
    assert ran >= 20


def test_special_values_are_those_of_torch(module: Callable[[str], ModuleType]) -> None:
    m, nan, inf = module("reduction"), float("nan"), float("inf")
    x = np.array(
        [[1, nan, 2, nan], [inf, -inf, 0, 1], [inf, 1, 2, 3], [0, 0, -0.0, 0]] * 8, "float32"
    )
    t = torch.from_numpy(x)
    for kernel in ("reduction_rows_sm80", "reduction_naive_any"):
        for kind in KINDS:
            got = m.forward_numpy(x, kind, axes=[1], kernel=kernel)[:, 0]
            np.testing.assert_array_equal(got, reference(t, kind, [1])[:, 0].numpy(), kind)
    hostile = torch.zeros(6, 64)
    hostile[0] = -inf
    hostile[1] = inf
    hostile[2, 13], hostile[2, 11:13], hostile[2, 40] = nan, inf, nan
    hostile[3, 5], hostile[3, 30:] = -0.0, -1.0
    hostile[4, 33], hostile[4, 31], hostile[4, :31] = 3.0, 3.0, -inf
    hostile[5, :63] = inf
    for dtype in DTYPES.values():
        y = torch.empty(6, 1, dtype=torch.int64, device="cuda")
        for kind, wanted in (("argmax", [0, 0, 13, 0, 31, 0]), ("argmin", [0, 0, 13, 30, 0, 63])):
            for kernel in ("reduction_rows_sm80", "reduction_naive_any"):
                m.forward(hostile.to(dtype).cuda(), kind, y=y, kernel=kernel)
                assert y[:, 0].tolist() == wanted, (kind, kernel, dtype)
    assert m.forward_numpy(x[:0], "sum", axes=[0]).tolist() == [[0.0] * 4]
    assert np.isnan(m.forward_numpy(x[:0], "mean", axes=[0])).all()
    assert np.isneginf(m.forward_numpy(x[:0], "max", axes=[0])).all()
    with pytest.raises(m.InvalidArgument, match="something to search"):
        m.forward_numpy(x[:0], "argmax", axes=[0])
    with pytest.raises(m.InvalidArgument, match="kind of sum, mean"):
        m.forward_numpy(x, "median", axes=[0])
