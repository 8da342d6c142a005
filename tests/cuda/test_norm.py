"""layernorm and rmsnorm against float64, every kernel, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from problems import DTYPES, EPSILON, assert_close, from_numpy, row_shapes, to_numpy, tolerance

pytestmark = pytest.mark.cuda
KERNELS = ("norm_moments_sm80", "norm_vector_sm80", "norm_naive_any")
BACKWARD_KERNELS = ("norm_ring_sm90", "norm_teams_sm80", *KERNELS[1:])


def reference(name: str, h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    if name == "layernorm":
        return torch.nn.functional.layer_norm(h, h.shape[-1:], w, b, 1e-5)
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * w


def problems(seed: int, dtype: str) -> list[dict[str, torch.Tensor]]:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    out = []
    for rows, n in row_shapes(rng, 100, 40_000):
        kind = {"dtype": DTYPES[dtype], "device": "cuda"}
        pitch = n + int(rng.integers(0, 3)) * 8
        x = torch.randn(rows, pitch, **kind)[:, :n] * 2 + 0.5
        x = x if pitch == n else torch.randn(rows, pitch, **kind)[:, :n]
        out.append(
            {"x": x, "w": torch.randn(n, **kind), "b": torch.randn(n, **kind)}
            | {"r": torch.randn(rows, n, **kind), "dy": torch.randn(rows, n, **kind)}
        )
    return out


def runs(m: ModuleType, kernel: str, x: torch.Tensor) -> bool:
    """The vector kernels take whole 16-byte vectors only, and say so."""
    vectors = x.shape[1] * x.element_size()
    if kernel in ("norm_moments_sm80", "norm_ring_sm90") and x.element_size() != 2:
        return False
    if kernel == "norm_ring_sm90" and not 512 <= x.shape[1] <= 8192:
        return False
    most = (16 if kernel == "norm_teams_sm80" else 32) * 1024
    return kernel.endswith("_any") or (vectors % 16 == 0 and vectors <= most)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_forward_equals_float64(
    module: Callable[[str], ModuleType], name: str, kernel: str, dtype: str, seed: int
) -> None:
    m = module(name)
    for k, p in enumerate(problems(seed, dtype)):
        x, w = p["x"], p["w"]
        b = p["b"] if name == "layernorm" else None
        r = p["r"] if k % 2 and kernel != "norm_moments_sm80" else None
        y, h = torch.empty_like(p["r"]), torch.empty_like(p["r"]) if r is not None else None
        call = dict(y=y, sum=h, stream=torch.cuda.current_stream().cuda_stream, kernel=kernel)
        if not runs(m, kernel, x):
            with pytest.raises(m.Unsupported, match=f"{kernel}: "):
                m.forward(x, w, b, r, **call)
            continue
        m.forward(x, w, b, r, **call)
        total = x.double() + (0 if r is None else r.double())
        expected = reference(name, total, w.double(), None if b is None else b.double())
        what = f"problem {k}, {tuple(x.shape)}, seed {seed}"
        n = x.shape[1]
        # centring loses |mean| / deviation; short rows have tiny deviations
        centre = (total.mean(-1).abs() / (total.var(-1, unbiased=False) + 1e-5).sqrt()).max().item()
        bound = tolerance(dtype, n) * (1 if n >= 64 else 8) + centre * 2.0**-22
        assert_close(y, expected, bound, 4.0, what)
        if h is not None:
            assert_close(h, total, EPSILON[dtype], 1e-6, what + ", sum")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_backward_equals_float64_autograd(
    module: Callable[[str], ModuleType], name: str, kernel: str, dtype: str, seed: int
) -> None:
    m = module(name)
    for k, p in enumerate(problems(seed, dtype)):
        h, w, dy = p["x"], p["w"], p["dy"]
        if not runs(m, kernel, h) or h.shape[1] < 8:
            continue
        has_bias = name == "layernorm"
        dsum = p["r"] if k % 2 else None
        dx, dw = torch.empty_like(dy), torch.empty_like(w)
        db = torch.empty_like(w) if has_bias else None
        workspace = torch.empty(m.backward_workspace(h), dtype=torch.uint8, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        m.backward(dy, h, w, dsum, dx=dx, dweight=dw, dbias=db, workspace=workspace, stream=stream,
                   kernel=kernel)  # fmt: skip
        leaves = [h.double().requires_grad_(), w.double().requires_grad_()]
        leaves += [p["b"].double().requires_grad_()] if has_bias else []
        y = reference(name, leaves[0], leaves[1], leaves[2] if has_bias else None)
        grads = torch.autograd.grad(y, leaves, dy.double())
        extra = 0 if dsum is None else dsum.double()
        what = f"problem {k}, {tuple(h.shape)}, seed {seed}"
        deviation = (h.double().var(-1, unbiased=False) + 1e-5).sqrt().min().item()
        bound = 4 * tolerance(dtype, h.shape[1]) / min(1.0, deviation)
        assert_close(dx, grads[0] + extra, bound, 4.0 / min(1.0, deviation), what)
        scale = 4.0 * np.sqrt(h.shape[0])
        assert_close(dw, grads[1], tolerance(dtype, h.shape[0]), scale, what + ", dweight")
        if db is not None:
            assert_close(db, grads[2], tolerance(dtype, h.shape[0]), scale, what + ", dbias")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [64, 768, 2048, 4096, 8192])
def test_rows_far_from_zero_and_rows_with_outliers_keep_their_deviation(
    module: Callable[[str], ModuleType], dtype: str, n: int, seed: int
) -> None:
    m = module("layernorm")
    torch.manual_seed(seed)
    kind = {"dtype": DTYPES[dtype], "device": "cuda"}
    x = torch.randn(1200, n, device="cuda")
    x[::4] += 100.0  # a mean of 100 deviations
    x[1::4, :8] = 3e4  # outliers where a row begins
    x[2::4] = x[2::4] * 1e-3 + 7.0  # hardly any deviation
    x, w, b, dy = x.to(kind["dtype"]), *torch.randn(2, n, **kind), torch.randn(1200, n, **kind)
    leaves = [t.double().requires_grad_() for t in (x, w, b)]
    expected = reference("layernorm", *leaves)
    grads = torch.autograd.grad(expected, leaves, dy.double())
    deviation = (x.double().var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    # a rounding of the mean, in deviations, in fp32
    centre = (x.double().mean(-1, keepdim=True).abs() / deviation).max().item() * 2.0**-22
    for kernel, _ in m.kernels():
        if not runs(m, kernel, x):
            continue
        y = torch.empty_like(x)
        m.forward(x, w, b, y=y, kernel=kernel)
        assert_close(y, expected, tolerance(dtype, n) + centre, 4.0, f"{kernel} {n}, seed {seed}")
    for kernel, _ in m.backward_kernels():
        if not runs(m, kernel, x):
            continue
        dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(b)
        space = torch.empty(m.backward_workspace(x), dtype=torch.uint8, device="cuda")
        m.backward(dy, x, w, dx=dx, dweight=dw, dbias=db, workspace=space, kernel=kernel)
        what = f"{kernel} {n}, seed {seed}"
        bound = 4 * tolerance(dtype, n) + 16 * centre
        assert_close(dx * deviation, grads[0] * deviation, bound, 8.0, what)
        assert_close(dw, grads[1], tolerance(dtype, 1200) + 4 * centre, 4 * 1200**0.5, what)
        assert_close(db, grads[2], tolerance(dtype, 1200), 4 * 1200**0.5, what)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numpy_form_gives_what_the_dlpack_form_gives(
    module: Callable[[str], ModuleType], dtype: str
) -> None:
    m = module("layernorm")
    x, w, dy = (torch.randn(s, dtype=DTYPES[dtype]) for s in ((5, 64), (64,), (5, 64)))
    y = torch.empty(5, 64, dtype=DTYPES[dtype], device="cuda")
    m.forward(x.cuda(), w.cuda(), y=y)
    torch.cuda.synchronize()
    host, total = m.forward_numpy(to_numpy(x), to_numpy(w), residual=to_numpy(x), return_sum=True)
    assert torch.equal(from_numpy(total), x + x)
    assert torch.equal(from_numpy(m.forward_numpy(to_numpy(x), to_numpy(w))), y.cpu())
    dx, dw, db = m.backward_numpy(to_numpy(dy), to_numpy(x), to_numpy(w), has_bias=True)
    assert dx.shape == (5, 64) and dw.shape == db.shape == (64,) and host.shape == (5, 64)
    assert_close(from_numpy(db), dy.double().sum(0), tolerance(dtype, 5), 8.0, "dbias")


def test_zero_rows_give_zero_weight_gradients_and_nan_stays_in_its_row(
    module: Callable[[str], ModuleType],
) -> None:
    m = module("rmsnorm")
    empty = np.empty((0, 16), "float32")
    dx, dw, _ = m.backward_numpy(empty, empty, np.ones(16, "float32"))
    assert dx.shape == (0, 16) and not dw.any()
    for kind, n in (("float32", 16), ("float16", 64), ("float16", 4096)):
        x = np.ones((3, n), kind)
        for odd in (np.nan, np.inf):
            x[1, 3] = odd
            y = m.forward_numpy(x)
            assert np.isnan(y[1, 3]) and not np.isnan(y[[0, 2]]).any()
            assert np.isnan(y[1]).all() or odd == np.inf


def test_an_operand_of_another_dtype_is_refused(module: Callable[[str], ModuleType]) -> None:
    m = module("layernorm")
    with pytest.raises(
        m.InvalidArgument, match=r"\[layernorm\] expected weight dense \[16\] of float32"
    ):
        m.forward_numpy(np.ones((2, 16), "float32"), np.ones(16, "float16"))
