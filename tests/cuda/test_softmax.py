"""softmax and cross entropy against float64, every kernel, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from problems import DTYPES, assert_close, from_numpy, row_shapes, to_numpy, tolerance

pytestmark = pytest.mark.cuda
F = torch.nn.functional


def rows_of(seed: int, dtype: str, longest: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    out = []
    for rows, n in row_shapes(rng, 100, longest):
        pitch = n + int(rng.integers(0, 2)) * 8
        out.append(torch.randn(rows, pitch, dtype=DTYPES[dtype], device="cuda")[:, :n] * 3)
        if pitch != n:
            out[-1] = torch.randn(rows, pitch, dtype=DTYPES[dtype], device="cuda")[:, :n]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["softmax_vector_sm80", "softmax_naive_any"])
@pytest.mark.parametrize("log", [False, True])
def test_softmax_equals_float64(
    module: Callable[[str], ModuleType], dtype: str, kernel: str, log: bool, seed: int
) -> None:
    m = module("softmax")
    for k, x in enumerate(rows_of(seed, dtype, 100_000)):
        size = x.shape[1] * x.element_size()
        vector = kernel.startswith("softmax_vector")
        if vector and (size % 16 or size > 64 * 1024):
            with pytest.raises(m.Unsupported, match="softmax_vector_sm80"):
                m.forward(x, y=torch.empty_like(x), kernel=kernel)
            continue
        y = torch.empty(x.shape, dtype=x.dtype, device="cuda")
        m.forward(x, y=y, log=log, kernel=kernel)
        expected = torch.log_softmax(x.double(), -1) if log else torch.softmax(x.double(), -1)
        what = f"problem {k}, {tuple(x.shape)}, seed {seed}"
        # e to a difference d is off by |d| roundings of fp32; fp16 results may be subnormal
        bound = tolerance(dtype, x.shape[1]) + 32 * 2.0**-23
        assert_close(y, expected, bound, 1.0 if log else 2.0**-14, what)
        if vector and size > 32 * 1024:
            continue
        dy = torch.randn_like(y)
        dx = torch.empty_like(y)
        m.backward(dy, y, dx=dx, log=log, kernel=kernel)
        yd, d = y.double(), dy.double()
        wanted = d - yd.exp() * d.sum(-1, True) if log else yd * (d - (d * yd).sum(-1, True))
        scale = 1.0 + (d.abs().sum(-1).max().item() * yd.exp().max().item() if log else 0)
        assert_close(dx, wanted, bound, scale, what + ", dx")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["cross_entropy_online_sm80", "cross_entropy_naive_any"])
def test_cross_entropy_equals_float64(
    module: Callable[[str], ModuleType], dtype: str, kernel: str, seed: int
) -> None:
    m = module("cross_entropy")
    for k, x in enumerate(rows_of(seed, dtype, 200_000)):
        rows, n = x.shape
        if kernel.endswith("sm80") and n * x.element_size() % 16:
            continue
        target = torch.randint(0, n, (rows,), device="cuda")
        target[:: 1 + rows // 3] = -100
        loss, lse = torch.empty(2, rows, device="cuda")
        workspace = torch.empty(m.forward_workspace(x), dtype=torch.uint8, device="cuda")
        m.forward(x, target, loss=loss, lse=lse, workspace=workspace, kernel=kernel)
        leaf = x.double().requires_grad_()
        expected = F.cross_entropy(leaf, target, reduction="none")
        what = f"problem {k}, {tuple(x.shape)}, seed {seed}"
        bound = tolerance("float32", n) + 32 * 2.0**-23
        assert_close(loss, expected, bound, 16.0, what)
        assert_close(lse, torch.logsumexp(x.double(), -1), bound, 4.0, what + ", lse")
        dloss = torch.rand(rows, device="cuda") + 0.5
        (wanted,) = torch.autograd.grad(expected, leaf, dloss.double())
        dx = x.clone()
        m.backward(dloss, dx, target, lse, dlogits=dx, kernel=kernel)  # in place
        # fp32 lse carries |lse| roundings into every exponential, whatever the result's dtype
        bound = tolerance(dtype, 1) + 64 * 2.0**-23
        scale = 64 * 2.0**-23 / bound + 2.0**-14
        assert_close(dx, wanted, bound, scale, what + ", dlogits")


def test_special_values_are_those_of_torch(module: Callable[[str], ModuleType]) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [
        [1.0, inf, 2.0],
        [1.0, -inf, 2.0],
        [-inf, -inf, -inf],
        [nan, 1.0, 2.0],
        [1e30, 1.0, -1e30],
    ]
    x = np.array([row * 8 for row in rows], "float32")
    for kernel, _ in module("softmax").kernels():
        y = module("softmax").forward_numpy(x, kernel=kernel)
        np.testing.assert_allclose(y, torch.softmax(torch.from_numpy(x), -1).numpy(), rtol=1e-6)
    target = np.zeros(5, "int64")
    for kernel, _ in module("cross_entropy").kernels():
        loss, _ = module("cross_entropy").forward_numpy(x, target, kernel=kernel)
        expected = F.cross_entropy(torch.from_numpy(x), torch.from_numpy(target), reduction="none")
        np.testing.assert_allclose(loss, expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numpy_forms_give_what_the_dlpack_forms_give(
    module: Callable[[str], ModuleType], dtype: str
) -> None:
    x, dy = torch.randn(2, 7, 40, dtype=DTYPES[dtype])
    y = torch.empty(7, 40, dtype=DTYPES[dtype], device="cuda")
    m, ce = module("softmax"), module("cross_entropy")
    m.forward(x.cuda(), y=y)
    assert torch.equal(from_numpy(m.forward_numpy(to_numpy(x))), y.cpu())
    dx = torch.empty_like(y)
    m.backward(dy.cuda(), y, dx=dx)
    assert torch.equal(from_numpy(m.backward_numpy(to_numpy(dy), to_numpy(y))), dx.cpu())
    target = np.arange(7)
    loss, lse = ce.forward_numpy(to_numpy(x), target)
    assert_close(torch.from_numpy(lse), torch.logsumexp(x.double(), -1), 1e-5, 1.0, "lse")
    grad = ce.backward_numpy(np.ones(7, "float32"), to_numpy(x), target, lse)
    assert_close(
        from_numpy(grad).double().sum(-1), torch.zeros(7), tolerance(dtype, 40), 1.0, "sum"
    )
    assert loss.shape == (7,)


def test_a_target_outside_the_vocabulary_gives_nan_and_reads_nothing(
    module: Callable[[str], ModuleType],
) -> None:
    m = module("cross_entropy")
    x = np.zeros((3, 8), "float32")
    loss, lse = m.forward_numpy(x, np.array([0, 8, -1]))
    assert not np.isnan(loss[0]) and np.isnan(loss[1:]).all() and np.isfinite(lse).all()
    assert m.forward_numpy(np.empty((0, 8), "float32"), np.empty(0, "int64"))[0].shape == (0,)
    with pytest.raises(m.InvalidArgument, match="target dense"):
        m.forward_numpy(x, np.zeros(3, "int32"))


def test_a_workspace_that_is_too_small_is_refused(module: Callable[[str], ModuleType]) -> None:
    m = module("cross_entropy")
    x, target = torch.zeros(2, 8, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    loss, lse = torch.empty(2, 2, device="cuda")
    with pytest.raises(m.InvalidArgument, match="workspace of 16 bytes, got 0"):
        m.forward(x, target, loss=loss, lse=lse)
