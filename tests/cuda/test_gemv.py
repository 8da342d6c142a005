"""gemv against float64: every kernel, weights of 32, 16, 8 and 4 bits, chains that overlap."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from problems import (
    ACTIVATIONS,
    DTYPES,
    HOSTILE,
    assert_as_torch,
    assert_close,
    from_numpy,
    quantised_weight,
    to_numpy,
    tolerance,
)

pytestmark = pytest.mark.cuda
KERNELS = ("gemv_bulk_sm90", "gemv_naive_any")
DIGITS = ("gemv_quant_sm90", "gemv_tensor_sm90")  # one row of x, integer products
ALL = ("gemv_waves_sm90", "gemv_rows_sm90", *KERNELS)


def product_scale(x: torch.Tensor, w: torch.Tensor) -> float:
    """A typical magnitude of what is summed into an element."""
    return float((x.double().square() @ w.double().square().T).sqrt().max()) + 1e-30


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ALL)
def test_gemv_equals_float64(
    module: Callable[[str], ModuleType], dtype: str, kernel: str, seed: int
) -> None:
    m, rng = module("gemv"), np.random.default_rng(seed)
    torch.manual_seed(seed)
    t = DTYPES[dtype]
    if kernel in ALL[:2] and (t == torch.float32) != ("rows" in kernel):
        with pytest.raises(m.Unsupported, match="fp32"):
            m.forward_numpy(*[to_numpy(torch.ones(1, 64, dtype=t))] * 2, kernel=kernel)
        return
    for k in range(100):
        bulk = kernel != "gemv_naive_any"
        several = kernel in (*KERNELS, "gemv_waves_sm90")
        rows = int(rng.integers(1, 9 if bulk else 14)) if several else 1
        n, depth = int(rng.integers(1, 700)), int(np.exp(rng.uniform(1, np.log(12000))))
        if kernel == "gemv_waves_sm90":  # the rows of a turn fit shared memory
            depth = min(depth, 2304 if rows > 4 else 4608 if rows > 2 else 9216)
        if bulk:
            depth = max(8, depth // 8 * 8)
        pitch = depth + int(rng.integers(0, 2)) * 64
        x = torch.randn(rows, depth, device="cuda").to(t)
        w = torch.randn(n, pitch, device="cuda").to(t)[:, :depth]
        y = torch.full((rows, n), float("nan"), device="cuda", dtype=t)
        bias = torch.randn(n, device="cuda").to(t) if k % 2 else None
        residual = torch.randn(rows, n, device="cuda").to(t) if k % 3 == 0 else None
        activation = ACTIVATIONS[k % len(ACTIVATIONS)][0]
        m.forward(x, w, None, bias, residual, y=y, activation=activation, slope=0.1,
                  kernel=kernel)  # fmt: skip
        expected = x.double() @ w.double().T
        scale = product_scale(x, w) + 1
        if bias is not None:
            expected = expected + bias.double()
        expected = ACTIVATIONS[k % len(ACTIVATIONS)][1](expected)
        if residual is not None:
            expected = expected + residual.double()
        what = f"problem {k}, {rows} x {n} x {depth}, {activation}, seed {seed}"
        assert_close(y, expected, tolerance(dtype, depth) + 8 * 2.0**-23, scale, what)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_blocks_that_stay_take_all_rows(
    module: Callable[[str], ModuleType], rows: int, seed: int
) -> None:
    """Several turns of each block; the last one is not whole."""
    m = module("gemv")
    torch.manual_seed(seed)
    for n, depth in ((9001, 2048), (5001, 2048), (3001, 1032), (4999, 520 if rows > 4 else 4096)):
        x = torch.randn(rows, depth, device="cuda").bfloat16()
        w = torch.randn(n, depth, device="cuda").bfloat16()
        y = torch.full((rows, n), float("nan"), device="cuda").bfloat16()
        m.forward(x, w, y=y, kernel="gemv_waves_sm90")
        bound = tolerance("bfloat16", depth) + 8 * 2.0**-23
        what = f"{rows} x {n} x {depth}, seed {seed}"
        assert_close(y, x.double() @ w.double().T, bound, product_scale(x, w), what)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kernel", (*DIGITS, *KERNELS))
def test_quantised_weights_equal_float64(
    module: Callable[[str], ModuleType], dtype: str, bits: int, kernel: str, seed: int
) -> None:
    m, rng, t = module("gemv"), np.random.default_rng(seed), DTYPES[dtype]
    torch.manual_seed(seed)
    for k in range(50):
        group = int(rng.choice([128, 256, 512]))
        if kernel == "gemv_naive_any":
            group = int(rng.choice([8, 24, 128]))
        depth = group * int(rng.integers(1, (16384 // group + 1) if "quant" in kernel else 40))
        if k % 5 == 0:
            depth -= 32 * int(rng.integers(0, 4)) if kernel in DIGITS else 0
            group = depth  # one scale a row
        n, rows = 8 * int(rng.integers(1, 60 if k % 10 else 350)), int(rng.integers(1, 9))
        if kernel in DIGITS:
            rows = 1
            if k % 10 == 5:  # short rows, more of them than all blocks take in one turn
                n, depth = 8 * int(rng.integers(530, 700)), 512 * int(rng.integers(1, 5))
                group = int(rng.choice([128, 256, 512]))
        w, scales, full = quantised_weight(rng, n, depth, group, bits, t)
        x = torch.randn(rows, depth, device="cuda").to(t)
        y = torch.full((rows, n), float("nan"), device="cuda", dtype=t)
        m.forward(x, w, scales, y=y, kernel=kernel)
        what = f"problem {k}, int{bits}, {rows} x {n} x {depth}, group {group}, seed {seed}"
        bound = tolerance(dtype, depth) + 8 * 2.0**-23
        assert_close(y, x.double() @ full.T, bound, product_scale(x, full), what)


def test_a_chain_that_overlaps_in_a_graph_equals_one_that_does_not(
    module: Callable[[str], ModuleType], seed: int
) -> None:
    m = module("gemv")
    torch.manual_seed(seed)
    weights = [torch.randn(2048, 2048, device="cuda").bfloat16() / 45 for _ in range(16)]
    x = torch.randn(1, 2048, device="cuda").bfloat16()

    def chain(overlap: bool) -> torch.Tensor:
        value = x
        for w in weights:
            y = torch.empty_like(value)
            stream = torch.cuda.current_stream().cuda_stream
            m.forward(value, w, y=y, activation="tanh", overlap=overlap,
                      stable_weights=True, stream=stream)  # fmt: skip
            value = y
        return value

    expected = chain(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(True)
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(got, chain(False))
    assert expected.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_hostile_values_become_what_torch_makes_of_them(
    module: Callable[[str], ModuleType], dtype: str
) -> None:
    m, t, ran = module("gemv"), DTYPES[dtype], 0
    values = torch.tensor(HOSTILE, device="cuda").to(t)
    x, w = torch.zeros(1, 64, device="cuda", dtype=t), torch.zeros(len(values), 64, device="cuda")
    x[0, 0], w[:, 0] = 1, values.float()
    w, y = w.to(t), torch.empty(1, len(values), device="cuda", dtype=t)
    for activation, function in ACTIVATIONS:
        for kernel, _ in m.kernels():
            try:
                m.forward(x, w, y=y, activation=activation, slope=0.1, kernel=kernel)
            except m.Unsupported:
                continue
            ran += 1
            assert_as_torch(y[0], function(values), f"{activation} by {kernel}, {dtype}")
    assert ran >= 2 * len(ACTIVATIONS)


def test_nan_and_inf_spread_as_in_torch(module: Callable[[str], ModuleType]) -> None:
    m = module("gemv")
    x = torch.ones(3, 64)
    x[0, 3], x[1, 5], x[2, 7] = float("nan"), float("inf"), -float("inf")
    w = torch.randn(16, 64)
    for kernel in KERNELS:
        got = torch.from_numpy(m.forward_numpy(x.numpy(), w.numpy(), kernel=kernel))
        assert_close(got, x.double() @ w.double().T, 1e-5, 1.0, kernel)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_nan_and_inf_spread_through_the_tensor_cores(
    module: Callable[[str], ModuleType], bits: int, value: float, rows: int, seed: int
) -> None:
    m, rng = module("gemv"), np.random.default_rng(seed)
    # All blocks take fewer rows in one turn, and then x has no digits; nor have long rows.
    for n, depth in ((24, 384), (4256, 384), (24, 8192)) if rows == 1 else ((24, 384),):
        x = torch.ones(rows, depth, device="cuda").bfloat16()
        x[rows // 2, 200] = value
        if bits == 16:
            w, scales = torch.randn(n, depth, device="cuda").bfloat16(), None
            full = w.double()
        else:
            w, scales, full = quantised_weight(rng, n, depth, 128, bits, torch.bfloat16)
        scale = product_scale(x[:, :128], full[:, :128])
        y = torch.zeros(rows, n, device="cuda").bfloat16()
        for kernel in ("gemv_waves_sm90",) if bits == 16 else DIGITS if rows == 1 else ("",):
            m.forward(x, w, scales, y=y, kernel=kernel)
            what = f"{kernel}, {rows} rows, {n} x {depth}"
            assert_close(y, x.double() @ full.T, 2.0**-8, scale, what)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("power", [-14, 0, 3])
@pytest.mark.parametrize("kernel", DIGITS)
def test_quantised_weights_meet_x_of_any_magnitude(
    module: Callable[[str], ModuleType], dtype: str, bits: int, power: int, kernel: str, seed: int
) -> None:
    """x becomes whole numbers, scaled by the largest of each 64 or 128: a few values that are
    10 bits above the others, and segments that are 20 bits apart, cost nothing that is seen."""
    m, rng, t = module("gemv"), np.random.default_rng(seed), DTYPES[dtype]
    torch.manual_seed(seed)
    # More rows than all blocks take in one turn, where there are no digits; and long rows.
    for n, depth in ((4256, 2048), (2048, 8192), (104, 4608)):
        any_magnitude(
            m, rng, t, n, depth, bits, kernel, tolerance(dtype, depth) + 8 * 2.0**-23, power
        )


def any_magnitude(
    m: ModuleType, rng: np.random.Generator, t: torch.dtype, n: int, depth: int, bits: int,
    kernel: str, bound: float, power: int,
) -> None:  # fmt: skip
    largest = 0.1 if depth <= 2048 else 0.02  # float16 holds what long rows give
    w, scales, full = quantised_weight(rng, n, depth, 128, bits, t, largest)
    x = torch.randn(1, depth, device="cuda") * 2.0**power
    x[0, 5::512] *= 1000 if power < 1 else 50
    x[0, 256:512] = x[0, 256:512] * 2.0 ** (-20 if t == torch.bfloat16 else -6)
    x[0, 1024:1152] = 0
    x = x.to(t)
    got = torch.zeros(1, n, device="cuda").to(t)
    m.forward(x, w, scales, y=got, kernel=kernel)
    assert_close(got, x.double() @ full.T, bound, product_scale(x, full), "all")
    x[0, 5::512] = 0  # what the large values hid
    m.forward(x, w, scales, y=got, kernel=kernel)
    assert_close(got, x.double() @ full.T, bound, product_scale(x, full), "without large values")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numpy_form_gives_what_the_dlpack_form_gives(
    module: Callable[[str], ModuleType], dtype: str
) -> None:
    m, t = module("gemv"), DTYPES[dtype]
    x, w, b = torch.randn(3, 64).to(t), torch.randn(40, 64).to(t), torch.randn(40).to(t)
    y = torch.empty(3, 40, dtype=t, device="cuda")
    m.forward(x.cuda(), w.cuda(), None, b.cuda(), y=y)
    assert torch.equal(
        from_numpy(m.forward_numpy(*map(to_numpy, (x, w)), None, to_numpy(b))), y.cpu()
    )


def test_what_is_not_legal_is_named(module: Callable[[str], ModuleType]) -> None:
    m = module("gemv")
    x, w = np.ones((2, 64), "float32"), np.ones((8, 64), "float32")
    with pytest.raises(m.InvalidArgument, match="scales exactly where w is quantised"):
        m.forward_numpy(x, w.astype("int8"))
    with pytest.raises(m.InvalidArgument, match=r"expected w \[N, 64\]"):
        m.forward_numpy(x, w[:, :32])
    with pytest.raises(m.InvalidArgument, match="activation of none, relu"):
        m.forward_numpy(x, w, activation="swish")
    with pytest.raises(m.Unsupported, match="more than 8 rows of x"):
        m.forward_numpy(np.ones((9, 64), "float32"), w, kernel="gemv_bulk_sm90")
    assert m.forward_numpy(x[:, :0], w[:, :0]).tolist() == [[0.0] * 8] * 2
    assert m.forward_numpy(x[:0], w).shape == (0, 8)
