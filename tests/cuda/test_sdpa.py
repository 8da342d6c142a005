"""Attention against float64: every kernel, masks, grouped heads, lengths, strides."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from problems import DTYPES, assert_close, from_numpy, to_numpy, tolerance

pytestmark = pytest.mark.cuda
KERNELS = ("sdpa_decode_sm80", "sdpa_flash_sm80", "sdpa_naive_any")


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, added: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) in float64; a row that sees nothing is 0 and -inf."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(repeat, 1) for t in (k, v))
    score = q.double() @ k.mT / q.shape[-1] ** 0.5 + added.double()
    score = score.masked_fill(~seen, -float("inf"))
    weights = torch.softmax(score, -1).nan_to_num(0.0)
    return weights @ v, torch.logsumexp(score, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_equals_float64(
    module: Callable[[str], ModuleType], dtype: str, kernel: str, seed: int
) -> None:
    m, rng, t = module("sdpa"), np.random.default_rng(seed), DTYPES[dtype]
    torch.manual_seed(seed)
    if dtype == "float32" and kernel != "sdpa_naive_any":
        pytest.skip("tensor-core kernels take 16-bit dtypes")
    for k in range(100):
        batch, groups = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        ratio, decode = int(rng.choice([1, 2, 4])), kernel == "sdpa_decode_sm80"
        rows = int(rng.integers(1, 1 + 16 // ratio)) if decode else int(rng.integers(1, 300))
        keys = int(rng.integers(1, 900 if decode else 300))
        longest = 256 if decode else 128
        dim = int(rng.choice([d for d in (8, 32, 64, 80, 96, 128, 256) if d <= longest]))
        if kernel == "sdpa_naive_any":
            dim, rows, keys = int(rng.integers(1, 130)), min(rows, 40), min(keys, 100)
        make = [
            lambda h, n, dim=dim, batch=batch: torch.randn(batch, h, n, dim, device="cuda").to(t),
            lambda h, n, dim=dim, batch=batch: torch.randn(batch, n, h, dim, device="cuda")
            .to(t).transpose(1, 2),
        ][k % 2]  # fmt: skip
        q, key, value = make(groups * ratio, rows), make(groups, keys), make(groups, keys)
        shape = (batch, groups * ratio, rows, keys)
        seen = torch.ones(shape, dtype=torch.bool, device="cuda")
        added, mask, lengths, offset = torch.zeros((), device="cuda"), None, None, 0
        if k % 4 == 1:
            mask = seen = torch.rand(batch, 1, rows, keys, device="cuda") < 0.7
            mask = seen = seen.expand(shape)
        elif k % 4 == 2:
            mask = added = (
                torch.randn(1, groups * ratio, rows, keys, device="cuda").to(t).expand(shape)
            )
        if k % 3 == 1:
            lengths = torch.randint(0, keys + 1, (batch,), device="cuda")
            lengths = lengths.int() if k % 2 else lengths
            seen = seen & (torch.arange(keys, device="cuda") < lengths[:, None, None, None])
        causal = k % 5 < 2
        if causal:
            offset = int(rng.integers(-3, keys))
            at = torch.arange(keys, device="cuda")
            seen = seen & (at <= torch.arange(rows, device="cuda")[:, None] + offset)
        o = torch.full(q.shape, float("nan"), dtype=t, device="cuda")
        lse = torch.full(q.shape[:-1], float("nan"), device="cuda")
        space = torch.empty(m.workspace(q, key), dtype=torch.uint8, device="cuda")
        m.forward(q, key, value, mask, o=o, lse=lse, lengths=lengths, causal=causal,
                  causal_offset=offset, workspace=space, kernel=kernel)  # fmt: skip
        wanted, wanted_lse = reference(q, key, value, seen, added)
        what = f"problem {k}, {tuple(q.shape)} x {keys}, causal {causal} {offset}, seed {seed}"
        rounding = 2.0**-18 if dtype == "float32" else 2 * tolerance(dtype, keys)
        assert_close(o, wanted, rounding, float(value.abs().max()), what)
        assert_close(lse, wanted_lse, 2.0**-16, 8.0, what + ", lse")


def test_the_numpy_form_gives_what_the_dlpack_form_gives(
    module: Callable[[str], ModuleType],
) -> None:
    m = module("sdpa")
    q, k, v = torch.randn(3, 2, 4, 33, 64).bfloat16()
    o = torch.empty(2, 4, 33, 64, dtype=torch.bfloat16, device="cuda")
    m.forward(q.cuda(), k.cuda(), v.cuda(), o=o, causal=True)
    got, lse = m.forward_numpy(*map(to_numpy, (q, k, v)), causal=True)
    assert torch.equal(from_numpy(got), o.cpu()) and lse.shape == (2, 4, 33)


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
