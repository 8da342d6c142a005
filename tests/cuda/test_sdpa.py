"""Attention against float64: every kernel, masks, grouped heads, lengths, strides, gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from problems import DTYPES, assert_close, from_numpy, to_numpy, tolerance

pytestmark = pytest.mark.cuda
LONGEST = {
    "sdpa_decode_sm80": 256, "sdpa_decode_f32_sm80": 256, "sdpa_wgmma_sm90a": 256,
    "sdpa_flash_sm80": 256, "sdpa_flash_f32_sm80": 128, "sdpa_short_sm80": 64,
}  # fmt: skip
KERNELS = (*LONGEST, "sdpa_tiles_any", "sdpa_naive_any")
BACKWARD = (
    "sdpa_backward_wgmma_sm90a", "sdpa_backward_f32_sm80", "sdpa_backward_tiles_any",
    "sdpa_backward_naive_any",
)  # fmt: skip
DIMS = (8, 32, 64, 80, 96, 128, 192, 256)


@dataclass
class Problem:
    """Operands, what each query sees as [B, H, S, T], and the options that say the same."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seen: torch.Tensor
    added: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]
    what: str


def problem(
    k: int, rng: np.random.Generator, dtype: torch.dtype, batch: int, groups: int, ratio: int,
    rows: int, keys: int, dim: int, masks: bool = True,
) -> Problem:  # fmt: skip
    """Number k of a series: layouts, masks, lengths and causality take turns."""

    def make(h: int, n: int) -> torch.Tensor:
        if k % 2 == 0:
            return torch.randn(batch, h, n, dim, device="cuda").to(dtype)
        return torch.randn(batch, n, h, dim, device="cuda").to(dtype).transpose(1, 2)

    heads = groups * ratio
    q, key, value = make(heads, rows), make(groups, keys), make(groups, keys)
    shape = (batch, heads, rows, keys)
    seen = torch.ones(shape, dtype=torch.bool, device="cuda")
    added, mask, lengths, offset = torch.zeros((), device="cuda"), None, None, 0
    if masks and k % 4 == 1:
        mask = seen = (torch.rand(batch, 1, rows, keys, device="cuda") < 0.7).expand(shape)
    elif masks and k % 4 == 2:
        mask = added = torch.randn(1, heads, rows, keys, device="cuda").to(dtype).expand(shape)
    elif (
        masks and k % 8 == 3
    ):  # the same for all rows, as padding is; tiles of keys that nobody sees
        mask = torch.rand(batch, 1, 1, keys, device="cuda") < float(rng.choice([0.02, 0.7]))
        mask[:, :, :, : int(rng.integers(0, keys + 1))] = bool(rng.random() < 0.5)
        mask = seen = mask.expand(shape)
    elif masks and k % 8 == 7:
        mask = added = torch.randn(batch, 1, 1, keys, device="cuda").to(dtype).expand(shape)
    if k % 3 == 1:
        lengths = torch.randint(0, keys + 1, (batch,), device="cuda")
        lengths = lengths.int() if k % 2 else lengths
        inside = torch.arange(keys, device="cuda") < lengths[:, None]
        seen = seen & inside[:, None, None]
        for t in (key, value):  # what lies behind a length may be anything
            t.masked_fill_(~inside[:, None, :, None], float("nan"))
    causal = k % 5 < 2
    if causal:
        offset = int(rng.integers(-3, keys))
        at = torch.arange(keys, device="cuda")
        seen = seen & (at <= torch.arange(rows, device="cuda")[:, None] + offset)
    options = {"lengths": lengths, "causal": causal, "causal_offset": offset}
    what = f"problem {k}, {tuple(q.shape)} x {keys}, groups {groups}, causal {causal} {offset}"
    return Problem(q, key, value, seen, added, mask, options, what)


def reference(p: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(o, lse, weights) in float64; a row that sees nothing is 0 and -inf."""
    repeat = p.q.shape[1] // p.k.shape[1]
    k, v = (t.double().nan_to_num(0.0).repeat_interleave(repeat, 1) for t in (p.k, p.v))
    score = p.q.double() @ k.mT / p.q.shape[-1] ** 0.5 + p.added.double()
    score = score.masked_fill(~p.seen, -float("inf"))
    weights = torch.softmax(score, -1).nan_to_num(0.0)
    return weights @ v, torch.logsumexp(score, -1), weights


def forward(m: ModuleType, p: Problem, kernel: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    o = torch.full_like(p.q, float("nan"))
    lse = torch.full(p.q.shape[:-1], float("nan"), device="cuda")
    space = torch.empty(m.workspace(p.q, p.k), dtype=torch.uint8, device="cuda")
    m.forward(p.q, p.k, p.v, p.mask, o=o, lse=lse, workspace=space, kernel=kernel, **p.options)
    return o, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_equals_float64(
    module: Callable[[str], ModuleType], dtype: str, kernel: str, seed: int
) -> None:
    m, rng, t = module("sdpa"), np.random.default_rng(seed), DTYPES[dtype]
    torch.manual_seed(seed)
    if not kernel.endswith("_any") and (dtype == "float32") != ("f32" in kernel):
        pytest.skip("tensor-core kernels take 16-bit dtypes, _f32_ ones float32")
    for k in range(100):
        batch, groups = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        ratio, decode = int(rng.choice([1, 2, 4])), "decode" in kernel
        rows = int(rng.integers(1, 1 + 16 // ratio)) if decode else int(rng.integers(1, 400))
        keys = int(rng.integers(1, 1800 if decode else 500))
        dim = int(rng.choice([d for d in DIMS if d <= LONGEST.get(kernel, 0)] or [1]))
        if kernel == "sdpa_short_sm80":
            dim, keys = 64, int(rng.choice([keys % 128 + 1, 31, 32, 33, 64, 96, 127, 128]))
        if kernel == "sdpa_tiles_any":
            dim, rows, keys = int(rng.integers(1, 257)), min(rows, 200), min(keys, 300)
        if kernel == "sdpa_naive_any":
            dim, rows, keys = int(rng.integers(1, 130)), min(rows, 40), min(keys, 100)
        p = problem(k, rng, t, batch, groups, ratio, rows, keys, dim, kernel != "sdpa_wgmma_sm90a")
        o, lse = forward(m, p, kernel)
        wanted, wanted_lse, _ = reference(p)
        rounding = 2.0**-18 if dtype == "float32" else 2 * tolerance(dtype, keys)
        largest = float(p.v.nan_to_num(0.0).abs().max())
        what = f"{p.what}, seed {seed}"
        assert_close(o, wanted, rounding, largest, what)
        assert_close(lse, wanted_lse, 2.0**-16, 8.0, what + ", lse")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_and_infinity_go_where_float64_has_them(
    module: Callable[[str], ModuleType], dtype: str, kernel: str
) -> None:
    m, t = module("sdpa"), DTYPES[dtype]
    torch.manual_seed(3)
    if not kernel.endswith("_any") and (dtype == "float32") != ("f32" in kernel):
        pytest.skip("tensor-core kernels take 16-bit dtypes, _f32_ ones float32")
    nan, inf = float("nan"), float("inf")
    cases: list[tuple[str, tuple[int, int, int, int], float]] = [
        ("q", (0, 1, 2, 5), nan), ("q", (0, 0, 4, 63), inf), ("k", (0, 1, 69, 0), nan),
        ("k", (0, 0, 3, 7), inf), ("k", (0, 1, 64, 7), -inf), ("v", (0, 0, 65, 9), nan),
        ("v", (0, 1, 2, 40), inf), ("v", (0, 0, 33, 1), -inf),
    ]  # fmt: skip
    if kernel != "sdpa_wgmma_sm90a":
        cases += [("mask", (0, 1, 2, 66), v) for v in (nan, inf, -inf)]
        cases += [("mask", (0, 0, 1, slice(None)), -inf)]  # a row that sees nothing
    for which, at, value in cases:
        p = problem(3, np.random.default_rng(0), t, 1, 2, 1, 5, 70, 64, masks=False)
        p.options = {"causal": False, "causal_offset": 0, "lengths": None}
        p.seen = torch.ones_like(p.seen)
        if which == "mask":
            p.mask = p.added = torch.zeros(1, 2, 5, 70, device="cuda", dtype=t)
            p.mask[at] = value
            p.seen = p.mask != -inf
        else:
            getattr(p, which)[at] = value
        score = p.q.double() @ p.k.double().mT / 8 + p.added.double()
        weights = torch.softmax(score, -1)
        weights = torch.where((score == -inf).all(-1, keepdim=True), 0.0, weights)
        o, _ = forward(m, p, kernel)
        what = f"{which}{at} = {value}"
        rounding = 2.0**-17 if dtype == "float32" else 2 * tolerance(dtype, 70)
        assert_close(o, weights @ p.v.double(), rounding, 8.0, what)


@pytest.mark.parametrize("k", [3, 4])  # all keys, and lengths
def test_rows_beyond_the_last_whole_turn_of_the_card_are_shared_by_warpgroups(
    module: Callable[[str], ModuleType], k: int, seed: int
) -> None:
    m, rng = module("sdpa"), np.random.default_rng(seed)
    torch.manual_seed(seed)
    heads = torch.cuda.get_device_properties(0).multi_processor_count - 2
    p = problem(k, rng, torch.bfloat16, 1, heads, 1, 256, 500, 64, masks=False)
    (o, lse), (again, _) = (forward(m, p, "sdpa_wgmma_sm90a") for _ in range(2))
    wanted, wanted_lse, _ = reference(p)
    largest = float(p.v.nan_to_num(0.0).abs().max())
    assert_close(o, wanted, 2 * tolerance("bfloat16", 500), largest, p.what)
    assert_close(lse, wanted_lse, 2.0**-16, 8.0, p.what)
    assert torch.equal(o, again)


@pytest.mark.parametrize("keys", [1000, 4096])
def test_many_decoding_heads_take_the_kernel_that_splits_keys(
    module: Callable[[str], ModuleType], keys: int
) -> None:
    m = module("sdpa")
    q = torch.randn(16, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(16, 8, keys, 128, device="cuda").to(q.dtype) for _ in range(2))
    space = torch.empty(m.workspace(q, k), dtype=torch.uint8, device="cuda")
    chosen, forced = torch.empty_like(q), torch.empty_like(q)
    m.forward(q, k, v, o=chosen, workspace=space)
    m.forward(q, k, v, o=forced, workspace=space, kernel="sdpa_decode_sm80")
    assert torch.equal(chosen, forced)  # kernels add in different orders


def assert_within(
    got: torch.Tensor, wanted: torch.Tensor, terms: torch.Tensor, bound: float, smallest: float,
    what: str,
) -> None:  # fmt: skip
    """|got - wanted| <= bound * terms and a multiple of float16's smallest, element by element."""
    excess = (got.double() - wanted).abs() - bound * terms - smallest
    worst = excess.max().item()
    assert worst <= 0, f"{what}: {worst:.3e} above the bound, {(excess > 0).sum().item()} elements"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", BACKWARD)
def test_gradients_equal_float64_autograd(
    module: Callable[[str], ModuleType], dtype: str, kernel: str, seed: int
) -> None:
    """Bounds follow the terms of each sum; delta's own error is that of a rounded o."""
    m, rng, t = module("sdpa"), np.random.default_rng(seed), DTYPES[dtype]
    torch.manual_seed(seed)
    if not kernel.endswith("_any") and (dtype == "float32") != ("f32" in kernel):
        pytest.skip("tensor-core kernels take 16-bit dtypes, _f32_ ones float32")
    for k in range(100):
        batch, groups = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        ratio, naive = int(rng.choice([1, 2, 4])), "naive" in kernel
        rows, keys = (int(rng.integers(1, 50 if naive else 300)) for _ in range(2))
        dim = int(rng.choice([d for d in DIMS if d <= (128 if "f32" in kernel else 256)]))
        if kernel.endswith("_any"):
            dim = int(rng.integers(1, 260 if naive else 257))
        p = problem(k, rng, t, batch, groups, ratio, rows, keys, dim)
        o, lse = forward(m, p)
        d_o = torch.randn_like(p.q)
        dq, dk, dv = (torch.full_like(x, float("nan")) for x in (p.q, p.k, p.v))
        space = torch.empty(m.backward_workspace(p.q, p.k), dtype=torch.uint8, device="cuda")
        m.backward(d_o, p.q, p.k, p.v, o, lse, p.mask, dq=dq, dk=dk, dv=dv, workspace=space,
                   kernel=kernel, **p.options)  # fmt: skip
        leaves = [x.double().nan_to_num(0.0).requires_grad_() for x in (p.q, p.k, p.v)]
        p.q, p.k, p.v = leaves
        wanted_o, _, weights = reference(p)
        wanted = torch.autograd.grad(wanted_o, leaves, d_o.double())
        with torch.no_grad():
            key, value = (x.repeat_interleave(ratio, 1) for x in leaves[1:])
            product = d_o.double() * wanted_o
            parts = (d_o.double() @ value.mT).abs() + product.sum(-1, keepdim=True).abs()
            parts = weights * (parts + 4 * product.norm(dim=-1, keepdim=True)) / dim**0.5
            grouped = (batch, groups, ratio, keys, dim)
            terms = (
                parts @ key.abs(),
                (parts.mT @ leaves[0].abs()).view(grouped).sum(2),
                (weights.mT @ d_o.double().abs()).view(grouped).sum(2),
            )
        bound = 2.0**-16 if dtype == "float32" else 3 * tolerance(dtype, max(rows, keys))
        smallest = 2.0**-24 * 8 * max(rows * ratio, keys) ** 0.5 if dtype == "float16" else 1e-30
        for name, got, want, term in zip("qkv", (dq, dk, dv), wanted, terms, strict=True):
            assert_within(got, want, term, bound, smallest, f"d{name}, {p.what}, seed {seed}")


@pytest.mark.parametrize("kernel", BACKWARD)
def test_nan_in_the_gradient_of_o_reaches_what_it_reaches_in_float64(
    module: Callable[[str], ModuleType], kernel: str
) -> None:
    m, dtype = module("sdpa"), torch.float32 if "f32" in kernel else torch.bfloat16
    torch.manual_seed(4)
    p = problem(3, np.random.default_rng(0), dtype, 1, 2, 1, 70, 70, 64, masks=False)
    p.options = {"causal": False, "causal_offset": 0, "lengths": None}
    o, lse = forward(m, p)
    d_o = torch.randn_like(p.q)
    d_o[0, 1, 66, 5] = float("nan")
    got = [torch.zeros_like(x) for x in (p.q, p.k, p.v)]
    space = torch.empty(m.backward_workspace(p.q, p.k), dtype=torch.uint8, device="cuda")
    m.backward(d_o, p.q, p.k, p.v, o, lse, dq=got[0], dk=got[1], dv=got[2], workspace=space,
               kernel=kernel)  # fmt: skip
    leaves = [x.double().requires_grad_() for x in (p.q, p.k, p.v)]
    weights = torch.softmax(leaves[0] @ leaves[1].mT / 8, -1)
    wanted = torch.autograd.grad(weights @ leaves[2], leaves, d_o.double())
    for name, x, y in zip("qkv", got, wanted, strict=True):
        assert torch.equal(x.isnan(), y.isnan()), f"d{name}"


def test_the_numpy_form_gives_what_the_dlpack_form_gives(
    module: Callable[[str], ModuleType],
) -> None:
    m = module("sdpa")
    q, k, v, g = torch.randn(4, 2, 4, 33, 64).bfloat16()
    o, lse = torch.empty_like(q, device="cuda"), torch.empty(2, 4, 33, device="cuda")
    on_device = [t.cuda() for t in (q, k, v)]
    m.forward(*on_device, o=o, lse=lse, causal=True)
    got, got_lse = m.forward_numpy(*map(to_numpy, (q, k, v)), causal=True)
    assert torch.equal(from_numpy(got), o.cpu()) and got_lse.shape == (2, 4, 33)
    gradients = [torch.empty_like(o) for _ in range(3)]
    space = torch.empty(m.backward_workspace(*on_device[:2]), dtype=torch.uint8, device="cuda")
    m.backward(g.cuda(), *on_device, o, lse, causal=True, workspace=space,
               **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))  # fmt: skip
    host = m.backward_numpy(*map(to_numpy, (g, q, k, v)), got, got_lse, causal=True)
    for one, other in zip(host, gradients, strict=True):
        assert torch.equal(from_numpy(one), other.cpu())


def test_what_is_not_legal_is_named(module: Callable[[str], ModuleType]) -> None:
    m = module("sdpa")
    q = np.zeros((1, 4, 3, 8), "float32")
    with pytest.raises(m.InvalidArgument, match="H a multiple of G, got 4 and 3"):
        m.forward_numpy(q, q[:, :3], q[:, :3])
    with pytest.raises(m.InvalidArgument, match=r"v \[B, G, T, D\]"):
        m.forward_numpy(q, q, q[:, :, :2])
    with pytest.raises(m.Unsupported, match="float32: the tensor cores"):
        m.forward_numpy(q, q, q, kernel="sdpa_flash_sm80")
    o, lse = m.forward_numpy(q, q[:, :, :0], q[:, :, :0])
    assert not o.any() and np.isneginf(lse).all()
    dq, dk, dv = m.backward_numpy(q + 1, q, q[:, :, :0], q[:, :, :0], o, lse)
    assert not dq.any() and dk.size == dv.size == 0
    with pytest.raises(m.InvalidArgument, match="the forward's lse"):
        m.backward_numpy(q, q, q, q, q, None)
