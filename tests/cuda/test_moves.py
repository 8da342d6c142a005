"""copy, rope, kv_append and embedding: every kernel, odd sizes, strides, gradients."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from problems import DTYPES, assert_close, from_numpy, to_numpy, tolerance

pytestmark = pytest.mark.cuda
ALL_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8,
             torch.uint8, torch.bool, torch.float64)  # fmt: skip


def random_like(shape: tuple[int, ...], t: torch.dtype) -> torch.Tensor:
    if t.is_floating_point:
        return torch.randn(shape, device="cuda").to(t)
    return torch.randint(0, 2 if t == torch.bool else 120, shape, device="cuda").to(t)


COPIES = ("copy_vector_sm80", "copy_turned_any", "copy_tiled_any", "copy_naive_any")


@pytest.mark.parametrize("kernel", COPIES)
def test_copies_between_any_strides_are_exact(
    module: Callable[[str], ModuleType], kernel: str, seed: int
) -> None:
    m, rng, ran = module("copy"), np.random.default_rng(seed), 0
    for k in range(300):
        rank = int(rng.integers(1, 5))
        t = ALL_TYPES[k % len(ALL_TYPES)]
        shape = tuple(int(rng.integers(1, 5)) * int(rng.choice([1, 8, 16])) for _ in range(rank))
        x = random_like(shape, t).permute(*(int(a) for a in rng.permutation(rank)))
        if k % 3 == 0:
            x = x[..., :: 2 if k % 2 else 1]
            x = x[1:] if x.shape[0] > 1 else x
        if k % 7 == 0:
            x = x[:1].expand(3, *x.shape[1:])
        y = random_like(tuple(x.shape), t)
        try:
            m.forward(x, y=y, kernel=kernel)
        except m.Unsupported:
            assert kernel != "copy_naive_any"
            continue
        ran += 1
        assert torch.equal(x, y), f"problem {k}, {tuple(x.shape)}, {x.stride()}, seed {seed}"
    assert ran >= (5 if kernel == "copy_turned_any" else 20)


@pytest.mark.parametrize("kernel", COPIES)
def test_transposes_of_vectors_are_exact(
    module: Callable[[str], ModuleType], kernel: str, seed: int
) -> None:
    m, rng = module("copy"), np.random.default_rng(seed)
    for k in range(40):
        t = (torch.bfloat16, torch.float32, torch.float64, torch.int8)[k % 4]
        wide, tall = (16 * int(rng.integers(1, 30)) for _ in "wt")
        x = random_like((int(rng.integers(1, 4)), 2, tall, wide), t).transpose(2, 3)
        x = x.transpose(0, 1) if k % 8 < 4 else x
        y = random_like(tuple(x.shape), t)
        try:
            m.forward(x, y=y, kernel=kernel)
        except m.Unsupported:
            assert kernel == "copy_vector_sm80" or (kernel == COPIES[1] and t != torch.bfloat16)
            continue
        assert torch.equal(x, y), f"problem {k}, {tuple(x.shape)}, {x.stride()}, seed {seed}"


def test_concatenation_of_many_parts_some_in_vectors(module: Callable[[str], ModuleType]) -> None:
    m = module("copy")
    for wide in (torch.randn(6, 3, 4000, device="cuda"), torch.randn(9, 160, device="cuda").half()):
        for axis in range(wide.ndim):
            sizes = [16, 8, 8, 1, 7, 32, 8, 8, 8, 8, 16, 0, 24]
            index = [torch.arange(n, device="cuda") % wide.shape[axis] for n in sizes]
            parts = [wide.index_select(axis, i) for i in index]
            expected = torch.cat(parts, axis)
            y = torch.empty_like(expected)
            m.concat(parts, axis, y=y)
            assert torch.equal(y, expected)


def test_concatenation_along_each_axis(module: Callable[[str], ModuleType]) -> None:
    m = module("copy")
    for axis in range(-3, 3):
        parts = []
        for n in (3, 1, 16):
            shape = [4, 5, 8]
            shape[axis] = n
            parts.append(torch.randn(shape, device="cuda"))
        expected = torch.cat(parts, axis)
        y = torch.empty_like(expected)
        m.concat(parts, axis, y=y)
        assert torch.equal(y, expected)
        with pytest.raises(m.InvalidArgument, match="fill y"):
            m.concat(parts[:2], axis, y=y)
    x = np.arange(24).reshape(2, 3, 4)
    assert np.array_equal(m.forward_numpy(x, axes=[2, 0, 1]), x.transpose(2, 0, 1))


def rotated(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["rope_vector_sm80", "rope_naive_any"])
def test_rope_and_its_gradient_equal_float64(
    module: Callable[[str], ModuleType], dtype: str, kernel: str, seed: int
) -> None:
    m, rng, t = module("rope"), np.random.default_rng(seed), DTYPES[dtype]
    torch.manual_seed(seed)
    vector = kernel == "rope_vector_sm80"
    for k in range(100):
        b, h, s = (int(rng.integers(1, 6)) for _ in range(3))
        d = int(rng.choice([16, 64, 128])) if vector else 2 * int(rng.integers(1, 40))
        x = torch.randn(b, s, h, d, device="cuda").to(t).transpose(1, 2)
        tables = [torch.rand(1, 1, s, d, device="cuda").to(t if k % 2 else torch.float32) * 2 - 1
                  for _ in range(2)]  # fmt: skip
        interleaved = not vector and k % 3 == 0
        y = torch.full(x.shape, float("nan"), dtype=t, device="cuda")
        m.forward(x, *tables, y=y, interleaved=interleaved, kernel=kernel)
        leaf = x.double().requires_grad_()
        cos, sin = (table.double() for table in tables)
        expected = leaf * cos + rotated(leaf, interleaved) * sin
        what = f"problem {k}, {tuple(x.shape)}, seed {seed}"
        assert_close(y, expected.detach(), tolerance(dtype, 2), 4.0, what)
        dy = torch.randn_like(y)
        (wanted,) = torch.autograd.grad(expected, leaf, dy.double())
        m.backward(dy, *tables, dx=dy, interleaved=interleaved, kernel=kernel)  # in place
        assert_close(dy, wanted, tolerance(dtype, 2), 4.0, what + ", dx")


@pytest.mark.parametrize("kernel", ["kv_append_vector_sm80", "kv_append_naive_any"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_appended_rows_are_where_they_belong(
    module: Callable[[str], ModuleType], dtype: str, kernel: str, seed: int
) -> None:
    m, rng, t = module("kv_append"), np.random.default_rng(seed), DTYPES[dtype]
    for k in range(50):
        b, g, s, slots = (int(rng.integers(1, n)) for n in (4, 5, 6, 40))
        d = int(rng.choice([8, 64])) if "vector" in kernel else int(rng.integers(1, 30))
        new = [torch.randn(b, s, g, d, device="cuda").to(t).transpose(1, 2) for _ in range(2)]
        caches = [torch.randn(b, g, slots, d, device="cuda").to(t) for _ in range(2)]
        expected = [cache.clone() for cache in caches]
        positions = torch.from_numpy(rng.integers(-2, slots + 2, b)).cuda()
        positions = positions.int() if k % 2 else positions
        for i, start in enumerate(positions.tolist()):
            for j in range(s):
                if 0 <= start + j < slots:
                    for cache, rows in zip(expected, new, strict=True):
                        cache[i, :, start + j] = rows[i, :, j]
        m.forward(*new, *caches, positions, kernel=kernel)
        assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))
    got = m.forward_numpy(*(to_numpy(x.contiguous()) for x in (*new, *caches)),
                          to_numpy(positions), kernel=kernel)  # fmt: skip
    assert torch.equal(from_numpy(got[0]), caches[0].cpu())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["embedding_vector_sm80", "embedding_naive_any"])
def test_embedding_and_its_gradient_equal_torch(
    module: Callable[[str], ModuleType], dtype: str, kernel: str, seed: int
) -> None:
    m, rng, t = module("embedding"), np.random.default_rng(seed), DTYPES[dtype]
    torch.manual_seed(seed)
    for k in range(100):
        vocabulary, n = int(rng.integers(1, 400)), int(rng.integers(1, 300))
        n = max(8, n // 8 * 8) if "vector" in kernel else n
        table = torch.randn(vocabulary, n, device="cuda").to(t)
        shape = [(7,), (3, 50), (), (1, 300)][k % 4]
        ids = torch.randint(0, vocabulary, shape, device="cuda")
        ids = ids.int() if k % 2 else ids
        y = torch.empty(*shape, n, dtype=t, device="cuda")
        m.forward(table, ids, y=y, kernel=kernel)
        assert torch.equal(y, table[ids.long()])
        dy = torch.randn_like(y)
        space = torch.empty(m.backward_workspace(ids), dtype=torch.uint8, device="cuda")
        got = torch.full_like(table, float("nan"))
        m.backward(dy, ids, dtable=got, workspace=space)
        wanted = torch.zeros(vocabulary, n, device="cuda", dtype=torch.float64)
        wanted.index_add_(0, ids.long().reshape(-1), dy.double().reshape(-1, n))
        assert_close(got, wanted, tolerance(dtype, 300), 4.0, f"problem {k}, seed {seed}")


def test_ids_outside_the_table_give_nan_and_no_gradient(
    module: Callable[[str], ModuleType],
) -> None:
    m = module("embedding")
    table, ids = np.ones((4, 6), "float32"), np.array([0, 4, -1, 3])
    on, at = torch.from_numpy(table).cuda(), torch.from_numpy(ids).cuda()
    y, grad = torch.empty(4, 6, device="cuda"), torch.empty(4, 6, device="cuda")
    m.forward(on, at, y=y)
    assert y[1:3].isnan().all() and (y[::3] == 1).all()
    space = torch.empty(m.backward_workspace(at), dtype=torch.uint8, device="cuda")
    m.backward(torch.ones_like(y), at, dtable=grad, workspace=space)
    assert grad.sum(1).tolist() == [6, 0, 0, 6]
    assert m.forward_numpy(table, ids[:0]).shape == (0, 6)
    assert not m.backward_numpy(np.ones((0, 6), "float32"), ids[:0], vocabulary=4).any()
