"""What decoding does in one launch: groups of products behind a norm, and the step of attention.

Against float64, with guard bytes around every tensor, and through plans that fuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from arena import Arena
from problems import ACTIVATIONS, DTYPES, assert_close, quantised_weight, rotated, tolerance

pytestmark = pytest.mark.cuda

GROUP = ("gemv_group_waves_sm90", "gemv_group_naive_any")
QUANT_GROUP = "gemv_group_quant_sm90"
TURNED = "gemv_group_turned_sm80"


def normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float) -> torch.Tensor:
    x = x.double()
    if weight is None:
        return x
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.double() + offset)


def spread(x: torch.Tensor, w: torch.Tensor) -> float:
    """A typical magnitude of what is summed into an element."""
    return float((x.square() @ w.double().square().T).sqrt().max()) + 1e-30


# Sizes around the kernel's turns of 16 rows, its stages and its warps' 512 bytes.
DEPTHS = (8, 64, 248, 256, 264, 896, 2040, 2048, 2056, 4096, 8192, 9216, 16384)
ROWS = (16, 48, 512, 4864)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_groups_of_products_equal_float64(
    module: Callable[[str], ModuleType], dtype: str, depth: int, seed: int
) -> None:
    m, t, arena = module("gemv"), DTYPES[dtype], Arena(400 << 20)
    torch.manual_seed(seed)
    for k in range(24):
        arena.clear()
        count, gated = (2, True) if k % 3 == 0 else (1 + k % 3, False)
        rows = [ROWS[(k // 3 + i) % len(ROWS)] for i in range(count)]
        rows = [min(n, (40 << 20) // depth // 16 * 16) for n in rows]
        if gated:
            rows = [rows[0] + k % 5] * 2
        else:
            rows[-1] += (0, 1, 7)[k % 3]
        bias_at = [not gated and (k + i) % 2 == 0 for i in range(count)]
        weight_offset = 1.0 if k % 4 == 1 else 0.0
        name, act = ACTIVATIONS[(k // 2) % 7] if gated or count == 1 else ACTIVATIONS[0]
        many = (1, 8, 1, 2, 3, 5, 4)[k % 7]  # rows of x, where eight or four rows of w fit 72 KiB
        fits = many == 1 or 2 * depth * (8 if many > 2 else 4) <= 72 * 1024
        kernels = (GROUP[0],) if fits else ()
        if many > 2 and depth >= 1024:  # blocks that share rows of w
            kernels += ("gemv_group_parts_sm90",)
        elif not fits:
            many, kernels = 1, (GROUP[0],)
        x = arena.put(torch.randn(many, depth, device="cuda") * 2, t)
        norm = arena.put(torch.rand(depth, device="cuda"), t) if k % 4 else None
        layer = norm is not None and many == 1 and k % 3 != 1
        shift = arena.put(torch.randn(depth, device="cuda"), t) if layer and k % 2 else None
        weight_offset = 0.0 if layer else weight_offset
        w = [arena.put(torch.randn(n, depth, device="cuda") * depth**-0.5, t) for n in rows]
        bias = [
            arena.put(torch.randn(n, device="cuda"), t) if b else None
            for n, b in zip(rows, bias_at, strict=True)
        ]
        alone = count == 1 and k % 2 == 1
        residual = arena.put(torch.randn(many, rows[0], device="cuda"), t) if alone else None
        made = rows[:1] if gated else rows
        y = [arena.result(arena.view((many, n), t)) for n in made]
        arena.freeze()
        h = normed(x, norm, 1e-3, weight_offset)
        if layer and norm is not None:
            h = centred(x, norm, shift)
        wanted = [h @ a.double().T for a in w]
        scales = [spread(h, a) + 1 for a in w]
        wanted = [v if b is None else v + b.double() for v, b in zip(wanted, bias, strict=True)]
        if gated:
            scales = [scales[0] * scales[1]]
            wanted = [act(wanted[0]) * wanted[1]]
        elif count == 1:
            wanted = [act(wanted[0]) + (0 if residual is None else residual.double())]
        # x times the norm's weight is rounded before it is multiplied.
        bound = 4 * tolerance(dtype, depth) + 8 * 2.0**-23
        for overlap, kernel in product((False, True), kernels):
            arena.poison()
            m.group(x, w, y=y, norm=norm, norm_bias=shift, centred=layer, eps=1e-3,
                    weight_offset=weight_offset, bias=bias, residual=residual, activation=name,
                    gated=gated, stable_weights=overlap, overlap=overlap,
                    kernel=kernel)  # fmt: skip
            what = f"problem {k}, {many} {rows} x {depth}, {name}, gated {gated}, {kernel}"
            what += f", seed {seed}"
            for got, right, scale in zip(y, wanted, scales, strict=True):
                assert_close(got, right, bound, scale, what)
            assert not arena.changed(), what


def centred(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    wide = None if bias is None else bias.double()
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], weight.double(), wide, 1e-3)


@pytest.mark.parametrize("depth", (4, 124, 128, 768, 1000, 1024, 1028, 2052, 3072, 4096, 8192))
def test_groups_in_float32_equal_float64(
    module: Callable[[str], ModuleType], depth: int, seed: int
) -> None:
    """Fewer rows than multiprocessors, whole blocks, and more than a block's slots hold."""
    m, t, arena = module("gemv"), torch.float32, Arena(400 << 20)
    torch.manual_seed(seed)
    for k in range(18):
        arena.clear()
        count, gated = (2, True) if k % 3 == 0 else (1 + k % 3, False)
        rows = [(1, 50, 768, 2304, 50257)[(k + i) % 5] for i in range(count)]
        rows = [max(1, min(n, (24 << 20) // depth)) for n in rows]
        rows = [rows[0]] * 2 if gated else rows
        layer, rms = k % 4 >= 2, k % 4 == 1
        x = arena.put(torch.randn(1, depth, device="cuda") * 2 + (30 if layer else 0), t)
        norm = arena.put(torch.rand(depth, device="cuda") + 0.5, t) if layer or rms else None
        shift = arena.put(torch.randn(depth, device="cuda"), t) if k % 4 == 2 else None
        w = [arena.put(torch.randn(n, depth, device="cuda") * depth**-0.5, t) for n in rows]
        bias = [None if gated or i == 1 else arena.put(torch.randn(n, device="cuda"), t)
                for i, n in enumerate(rows)]  # fmt: skip
        alone = count == 1 and k % 2 == 1
        residual = arena.put(torch.randn(1, rows[0], device="cuda"), t) if alone else None
        name, act = ACTIVATIONS[(k // 2) % 7] if gated or count == 1 else ACTIVATIONS[0]
        y = [arena.result(arena.view((1, n), t)) for n in (rows[:1] if gated else rows)]
        arena.freeze()
        h = centred(x, norm, shift) if layer else normed(x, norm, 1e-3, 0.0)
        wanted, scales = [h @ a.double().T for a in w], [spread(h, a) + 1 for a in w]
        wanted = [v if b is None else v + b.double() for v, b in zip(wanted, bias, strict=True)]
        if gated:
            wanted, scales = [act(wanted[0]) * wanted[1]], [scales[0] * scales[1]]
        elif count == 1:
            wanted = [act(wanted[0]) + (0 if residual is None else residual.double())]
        for overlap in (False, True):
            arena.poison()
            m.group(x, w, y=y, norm=norm, norm_bias=shift, centred=layer, eps=1e-3, bias=bias,
                    residual=residual, activation=name, gated=gated, stable_weights=overlap,
                    overlap=overlap, kernel="gemv_group_f32_sm90")  # fmt: skip
            what = f"problem {k}, {rows} x {depth}, {name}, gated {gated}, seed {seed}"
            for got, right, scale in zip(y, wanted, scales, strict=True):
                assert_close(got, right, 8 * tolerance("float32", depth), scale, what)
            assert not arena.changed(), what


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", (8, 64, 120, 768, 776, 1544, 3072, 6144))
def test_a_weight_of_columns_equals_float64(
    module: Callable[[str], ModuleType], dtype: str, depth: int, seed: int
) -> None:
    m, t, arena = module("gemv"), DTYPES[dtype], Arena(200 << 20)
    torch.manual_seed(seed)
    for k, n in enumerate((8, 16, 40, 136, 768, 2304, 3072, 32)):
        arena.clear()
        layer, rms = k % 4 >= 2, k % 4 == 1
        x = arena.put(torch.randn(1, depth, device="cuda") * 2, t)
        norm = arena.put(torch.rand(depth, device="cuda") + 0.5, t) if layer or rms else None
        shift = arena.put(torch.randn(depth, device="cuda"), t) if k % 4 == 2 else None
        w = arena.put(torch.randn(depth, n, device="cuda") * depth**-0.5, t)
        bias = arena.put(torch.randn(n, device="cuda"), t) if k % 3 else None
        residual = arena.put(torch.randn(1, n, device="cuda"), t) if k % 2 else None
        name, act = ACTIVATIONS[k % 7]
        y = arena.result(arena.view((1, n), t))
        arena.freeze()
        h = centred(x, norm, shift) if layer else normed(x, norm, 1e-3, 0.0)
        v = h @ w.double() + (0 if bias is None else bias.double())
        wanted = act(v) + (0 if residual is None else residual.double())
        for kernel, overlap in ((TURNED, False), (TURNED, True), (GROUP[1], False)):
            arena.poison()
            m.group(x, [w], y=[y], norm=norm, norm_bias=shift, centred=layer, turned=True, eps=1e-3,
                    bias=[bias], residual=residual, activation=name, stable_weights=overlap,
                    overlap=overlap, kernel=kernel)  # fmt: skip
            what = f"{n} x {depth}, {name}, {kernel}, seed {seed}"
            # x is rounded where it is normalised, as a norm of its own would store it.
            assert_close(y, wanted, 4 * tolerance(dtype, depth), spread(h, w.T) + 1, what)
            assert not arena.changed(), what


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_on_odd_addresses_are_done_by_the_other_kernel(
    module: Callable[[str], ModuleType], dtype: str, seed: int
) -> None:
    m, t, arena = module("gemv"), DTYPES[dtype], Arena()
    torch.manual_seed(seed)
    for depth, gated, many in ((65, False, 1), (64, True, 1), (1000, False, 3), (65, True, 12)):
        arena.clear()
        odd = t.itemsize
        x = arena.put(torch.randn(many, depth, device="cuda"), t, offset=odd)
        norm = arena.put(torch.rand(depth, device="cuda"), t, offset=odd)
        w = [
            arena.put(torch.randn(48, depth, device="cuda") * depth**-0.5, t, offset=odd)
            for _ in range(2)
        ]
        y = [arena.result(arena.view((many, 48), t, offset=odd)) for _ in range(1 if gated else 2)]
        arena.freeze()
        m.group(x, w, y=y, norm=norm, activation="silu" if gated else "none", gated=gated)
        h = normed(x, norm, 1e-5, 0.0)
        wanted = [h @ a.double().T for a in w]
        scale = spread(h, w[0]) + 1
        if gated:
            wanted, scale = [torch.nn.functional.silu(wanted[0]) * wanted[1]], scale**2
        for got, right in zip(y, wanted, strict=True):
            assert_close(got, right, 4 * tolerance(dtype, depth), scale, f"{depth}, {gated}")
        assert not arena.changed()
        if depth % 8 == 0 and dtype != "float32":
            with pytest.raises(m.Unsupported, match="aligned"):
                m.group(x, w, y=y, norm=norm, gated=gated, kernel=GROUP[0])


# (K, weights a scale covers; 0: a row): around a warp's 256 values, eight warps' 2048, where
# sixteen warps take over (4096 of int8, 8192 of int4) and the most.
QUANT_DEPTHS = (
    (96, 0), (128, 128), (256, 128), (384, 128), (896, 128), (2048, 128), (2080, 0), (2304, 256),
    (4096, 512), (4224, 128), (8192, 128), (8320, 128), (9216, 1024), (16384, 128),
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("depth", QUANT_DEPTHS)
def test_groups_of_quantised_products_equal_float64(
    module: Callable[[str], ModuleType], dtype: str, bits: int, depth: tuple[int, int], seed: int
) -> None:
    m, t, arena = module("gemv"), DTYPES[dtype], Arena(300 << 20)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    long, group = depth[0], depth[1] or depth[0]
    for k in range(16):
        arena.clear()
        count, gated = (2, True) if k % 3 == 0 else (1 + k % 3, False)
        rows = [ROWS[(k // 3 + i) % len(ROWS)] for i in range(count)]
        # More than one turn of all blocks where rows are short.
        rows = [min(n, max(16, (8 << 20) // long // 16 * 16)) for n in rows]
        if gated:
            rows = [rows[0] + 8 * (k % 4)] * 2
        else:
            rows[-1] += (0, 8, 24)[k % 3]
        stored, full = [], []
        for n in rows:
            size = (0.36 if bits == 4 else 0.02) * long**-0.5
            q, scales, wide = quantised_weight(rng, n, long, group, bits, t, size)
            stored.append((arena.put(q, q.dtype), arena.put(scales, t)))
            full.append(wide)
        bias_at = [not gated and (k + i) % 2 == 0 for i in range(count)]
        weight_offset = 1.0 if k % 4 == 1 else 0.0
        name, act = ACTIVATIONS[(k // 2) % 7] if gated or count == 1 else ACTIVATIONS[0]
        x = arena.put(torch.randn(1, long, device="cuda") * 2, t)
        norm = arena.put(torch.rand(long, device="cuda"), t) if k % 4 else None
        bias = [
            arena.put(torch.randn(n, device="cuda"), t) if b else None
            for n, b in zip(rows, bias_at, strict=True)
        ]
        alone = count == 1 and k % 2 == 1
        residual = arena.put(torch.randn(1, rows[0], device="cuda"), t) if alone else None
        y = [arena.result(arena.view((1, n), t)) for n in (rows[:1] if gated else rows)]
        arena.freeze()
        h = normed(x, norm, 1e-3, weight_offset)
        wanted = [h @ a.T for a in full]
        scales_of = [spread(h, a) + 1 for a in full]
        wanted = [v if b is None else v + b.double() for v, b in zip(wanted, bias, strict=True)]
        if gated:
            scales_of = [scales_of[0] * scales_of[1]]
            wanted = [act(wanted[0]) * wanted[1]]
        elif count == 1:
            wanted = [act(wanted[0]) + (0 if residual is None else residual.double())]
        bound = 4 * tolerance(dtype, long) + 8 * 2.0**-23
        for kernel, overlap in ((QUANT_GROUP, False), (QUANT_GROUP, True), (GROUP[1], False)):
            arena.poison()
            m.group(x, [q for q, _ in stored], scales=[s for _, s in stored], y=y, norm=norm,
                    eps=1e-3, weight_offset=weight_offset, bias=bias, residual=residual,
                    activation=name, gated=gated, stable_weights=overlap, overlap=overlap,
                    kernel=kernel)  # fmt: skip
            what = f"problem {k}, {rows} x {long}, {name}, gated {gated}, {kernel}, seed {seed}"
            for got, right, scale in zip(y, wanted, scales_of, strict=True):
                assert_close(got, right, bound, scale, what)
            assert not arena.changed(), what


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_spread_through_quantised_groups(
    module: Callable[[str], ModuleType], bits: int, value: float, seed: int
) -> None:
    """x that has no digits is multiplied by plain arithmetic, over several turns of each block."""
    m, rng = module("gemv"), np.random.default_rng(seed)
    for long, n, gated in (
        (256, 40, False),
        (2048, 4864, True),
        (9216, 48, True),
        (2048, 40, True),
    ):
        x = torch.randn(1, long, device="cuda").bfloat16()
        x[0, long - 3] = value
        parts = [quantised_weight(rng, n, long, 128, bits, torch.bfloat16) for _ in range(2)]
        y = [torch.zeros(1, n, device="cuda").bfloat16() for _ in range(1 if gated else 2)]
        w, scales = [p[0] for p in parts], [p[1] for p in parts]
        for norm in (None, torch.ones(long, device="cuda").bfloat16()):
            if not gated and norm is None:
                w[0], scales[0] = w[0][:32], scales[0][:, :32].contiguous()
                y[0] = y[0][:, :32].contiguous()
            m.group(x, w, scales=scales, y=y, norm=norm, gated=gated, kernel=QUANT_GROUP)
            what = f"{long}, {n}, gated {gated}, norm {norm is not None}, seed {seed}"
            if norm is not None:  # the root of the mean is as bad
                assert all(bool(v.isnan().all()) for v in y), what
                continue
            wanted = [x.double() @ p[2].T for p in parts]
            wanted = [wanted[0] * wanted[1]] if gated else [wanted[0][:, :32], wanted[1]]
            for got, right in zip(y, wanted, strict=True):
                assert torch.equal(got.isnan(), right.isnan()), what
                assert torch.equal(got.isinf(), right.isinf()), what
                assert torch.equal(got[got.isinf()].double(), right[right.isinf()]), what


def test_a_chain_of_quantised_groups_overlaps_in_a_graph(
    module: Callable[[str], ModuleType], seed: int
) -> None:
    """A launch reads what the one before wrote; its weights are asked for before that is there."""
    m, rng = module("gemv"), np.random.default_rng(seed)
    torch.manual_seed(seed)
    t, long = torch.bfloat16, 2048
    layers = [
        [quantised_weight(rng, long, long, 128, bits, t)[:2] for _ in range(2)]
        for bits in (4, 8, 4, 4, 8, 8, 4, 8)
    ]
    norm = torch.rand(long, device="cuda").to(t)
    x = torch.randn(1, long, device="cuda").to(t)

    def chain(overlap: bool) -> torch.Tensor:
        value = x
        for layer in layers:
            y = torch.empty_like(value)
            m.group(value, [q for q, _ in layer], scales=[s for _, s in layer], y=[y], norm=norm,
                    gated=True, activation="tanh", stable_weights=True, overlap=overlap,
                    stream=torch.cuda.current_stream().cuda_stream, kernel=QUANT_GROUP)  # fmt: skip
            value = y
        return value

    chain(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(True)
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(got, chain(False))


@pytest.mark.parametrize("rows", [3, 8])
def test_a_chain_of_groups_whose_blocks_share_rows_overlaps_in_a_graph(
    module: Callable[[str], ModuleType], rows: int, seed: int
) -> None:
    """Each launch reads what the one before wrote; every replay gives the same bits."""
    m = module("gemv")
    torch.manual_seed(seed)
    kernel = {"kernel": "gemv_group_parts_sm90"}
    layers = [
        [torch.randn(n, k, device="cuda").bfloat16() * k**-0.5 for n, k in
         ((3000, 4096), (3000, 4096), (4096, 3000))] for _ in range(4)
    ]  # fmt: skip
    norm = torch.rand(4096, device="cuda").bfloat16() + 0.5
    start = torch.randn(rows, 4096, device="cuda").bfloat16()
    x, inner = torch.empty_like(start), torch.empty(rows, 3000, device="cuda").bfloat16()

    def chain(**early: bool) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        x.copy_(start)
        for gate, up, down in layers:
            m.group(x, [gate, up], y=[inner], norm=norm, gated=True, activation="silu",
                    stream=stream, **early, **kernel)  # fmt: skip
            m.group(inner, [down], y=[x], residual=x, stream=stream, **early, **kernel)

    chain()
    wanted = x.clone()
    assert wanted.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(stable_weights=True, overlap=True)
    for _ in range(100):
        x.fill_(7)
        graph.replay()
        assert torch.equal(x, wanted)


def test_groups_that_are_not_legal_are_refused(module: Callable[[str], ModuleType]) -> None:
    m = module("gemv")
    x, w = torch.ones(1, 64, device="cuda"), torch.ones(16, 64, device="cuda")
    y = torch.empty(1, 16, device="cuda")
    with pytest.raises(m.InvalidArgument, match=r"y \[M, N\]"):
        m.group(torch.ones(2, 64, device="cuda"), [w], y=[y])
    with pytest.raises(m.InvalidArgument, match=r"x \[M, K\]"):
        m.group(
            torch.ones(2, 128, device="cuda")[:, :64], [w], y=[torch.empty(2, 16, device="cuda")]
        )
    with pytest.raises(m.InvalidArgument, match="without gaps"):
        m.group(x, [torch.ones(16, 128, device="cuda")[:, :64]], y=[y])
    with pytest.raises(m.InvalidArgument, match="gated"):
        m.group(x, [w], y=[y], gated=True)
    with pytest.raises(m.InvalidArgument, match="one weight with a residual"):
        m.group(x, [w, w], y=[y, torch.empty_like(y)], residual=y.clone())
    q, s = torch.ones(16, 64, device="cuda", dtype=torch.int8), torch.ones(1, 16, device="cuda")
    with pytest.raises(m.InvalidArgument, match="scales"):
        m.group(x, [q], y=[y])
    with pytest.raises(m.InvalidArgument, match="scales"):
        m.group(x, [w], scales=[s], y=[y])
    with pytest.raises(m.InvalidArgument, match="of one group"):
        two = torch.ones(2, 16, device="cuda")
        m.group(x, [q, q], scales=[s, two], y=[y, torch.empty_like(y)])
    with pytest.raises(m.InvalidArgument, match="weights"):
        m.group(x, [q, w], scales=[s, s], y=[y, torch.empty_like(y)])
    with pytest.raises(m.InvalidArgument, match="one to three"):
        m.group(x, [w] * 4, y=[y.clone() for _ in range(4)])


# (batch, heads, groups, dim, capacity): one block a head, clusters, long caches of few heads; above
# 1536 clusters of blocks of sixteen warps, and more of those than a card takes at once.
STEPS = (
    (1, 32, 8, 64, 512),
    (1, 14, 2, 64, 1024),
    (1, 32, 8, 128, 4096),
    (3, 8, 8, 128, 192),
    (2, 16, 1, 64, 64),
    (1, 4, 4, 256, 640),
    (1, 2, 1, 128, 32768),
    (9, 32, 8, 64, 128),
    (1, 32, 8, 64, 4096),
    (2, 12, 2, 64, 1552),
    (2, 32, 8, 64, 2500),
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", STEPS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("turns", [True, False])
def test_a_step_of_attention_equals_its_parts(
    module: Callable[[str], ModuleType],
    dtype: str,
    shape: tuple[int, int, int, int, int],
    masked: bool,
    turns: bool,
    seed: int,
) -> None:
    m, t, arena = module("sdpa"), DTYPES[dtype], Arena(512 << 20)
    torch.manual_seed(seed)
    batch, heads, groups, dim, capacity = shape
    positions = {0, 1, 15, 16, 17, 31, 63, 127, 128, capacity // 2, capacity - 2, capacity - 1}
    for position in sorted(p for p in positions if p < capacity):
        for ends in (True, False) if masked else (True,):
            arena.clear()
            draw = lambda *s: torch.randn(*s, device="cuda")  # noqa: E731
            # As a product of q, k and v leaves them: rows of one memory.
            q = arena.put(draw(batch, 1, heads, dim), t).transpose(1, 2)
            k_new = arena.put(draw(batch, 1, groups, dim), t).transpose(1, 2)
            v_new = arena.put(draw(batch, 1, groups, dim), t).transpose(1, 2)
            angle = torch.rand(batch, 1, 1, dim, device="cuda") * 6
            cos, sin = arena.put(angle.cos(), t), arena.put(angle.sin(), t)
            k = arena.put(draw(batch, groups, capacity, dim), t)
            v = arena.put(draw(batch, groups, capacity, dim), t)
            k[:, :, position], v[:, :, position] = float("nan"), float("inf")  # not there yet
            o = arena.result(arena.view((batch, 1, heads, dim), t)).transpose(1, 2)
            at = torch.tensor([position], device="cuda")
            seen = torch.arange(capacity, device="cuda") <= position
            seen = seen.expand(batch, 1, 1, capacity).clone()
            if masked:
                seen[:, :, :, : position // 3] = torch.rand(position // 3, device="cuda") < 0.5
            mask = arena.put(seen, torch.bool).expand(batch, heads, 1, capacity)
            arena.result(k[:, :, position]), arena.result(v[:, :, position])
            arena.freeze()
            space = torch.empty(m.workspace(q, k), dtype=torch.uint8, device="cuda")
            given = {"mask": mask} if masked else {}
            angles = (cos, sin) if turns else (None, None)
            m.step(q, k_new, v_new, *angles, at, k, v, o=o, ends=ends, workspace=space,
                   overlap=position % 2 == 1, stable_caches=position % 3 == 1, **given)  # fmt: skip
            c, s = (cos.double(), sin.double()) if turns else (1.0, 0.0)
            new_k = rotated(k_new.double(), c, s)
            assert_close(k[:, :, position], new_k[:, :, 0], tolerance(dtype, 2), 2.0, "the key")
            assert torch.equal(v[:, :, position], v_new[:, :, 0])
            right_q = rotated(q.double(), c, s).to(t).double()
            share = heads // groups
            keys, values = (x.double().repeat_interleave(share, 1) for x in (k, v))
            scores = right_q @ keys.transpose(-1, -2) * dim**-0.5
            scores = scores.masked_fill(~seen, float("-inf"))
            wanted = scores.softmax(-1) @ values.masked_fill(~seen.transpose(-1, -2), 0)
            what = f"{shape}, position {position}, masked {masked}, ends {ends}, seed {seed}"
            # Weights are rounded to 16 bits before they are multiplied with values.
            assert_close(o, wanted, 4 * tolerance(dtype, 64), 2.0, what)
            assert not arena.changed(), what


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["", "sdpa_step_naive_any"])
def test_a_position_outside_the_cache_is_not_written(
    module: Callable[[str], ModuleType], dtype: str, kernel: str
) -> None:
    m, arena, t = module("sdpa"), Arena(), DTYPES[dtype]
    new = arena.put(torch.ones(1, 2, 1, 64, device="cuda"), t)
    table = arena.put(torch.ones(1, 1, 1, 64, device="cuda"), t)
    k, v = (arena.put(torch.zeros(1, 2, 32, 64, device="cuda"), t) for _ in range(2))
    o = arena.result(arena.view((1, 2, 1, 64), t))
    space = torch.empty(m.workspace(new, k), dtype=torch.uint8, device="cuda")
    arena.freeze()
    for position in (32, 1 << 40, -1):
        at = torch.tensor([position], device="cuda")
        m.step(new, new, new, table, table, at, k, v, o=o, ends=True, workspace=space,
               kernel=kernel)  # fmt: skip
        assert not arena.changed()


def step_text(batch: int, dtype: str) -> str:
    """A decoder's layer for one token a row, 64 columns a head, a cache of s0 positions."""
    b, d = batch, dtype
    return f"""rmir 1
sym s0 [2,4096]
input %0 "x" : {d}[{b},1,256]
input %1 "length" : i64[]
input %2 "open" : bool[{b},1,1,s0]
input %3 "keys" : {d}[{b},2,s0,64] donated
input %4 "values" : {d}[{b},2,s0,64] donated
input %5 "cos" : {d}[{b},1,1,64]
input %6 "sin" : {d}[{b},1,1,64]
weight %7 "n1" : {d}[256]
weight %8 "q" : {d}[256,256]
weight %9 "k" : {d}[128,256]
weight %10 "v" : {d}[128,256]
weight %11 "o" : {d}[256,256]
weight %12 "n2" : {d}[256]
weight %13 "gate" : {d}[640,256]
weight %14 "up" : {d}[640,256]
weight %15 "down" : {d}[256,640]
weight %16 "kb" : {d}[128]
literal %17 : i64[1] = 0000000000000000
%18 = add(%1, %17) : i64[1]
%19 = iota() {{start=<0>, step=1}} : i64[s0]
%20 = reshape(%18) {{shape=<1,1,1,1>}} : i64[1,1,1,1]
%21 = reshape(%19) {{shape=<1,1,1,s0>}} : i64[1,1,1,s0]
%22 = le(%21, %20) : bool[1,1,1,s0]
%23 = and(%2, %22) : bool[{b},1,1,s0]
%24 = rms_norm(%0, %7) {{eps=0x1p-10}} : {d}[{b},1,256]
%25 = gemm(%24, %8, _, _) {{activation="none", trans_b=1}} : {d}[{b},1,256]
%26 = gemm(%24, %9, %16, _) {{activation="none", trans_b=1}} : {d}[{b},1,128]
%27 = gemm(%24, %10, _, _) {{activation="none", trans_b=1}} : {d}[{b},1,128]
%28 = reshape(%25) {{shape=<{b},4,1,64>}} : {d}[{b},4,1,64]
%29 = reshape(%26) {{shape=<{b},2,1,64>}} : {d}[{b},2,1,64]
%30 = reshape(%27) {{shape=<{b},2,1,64>}} : {d}[{b},2,1,64]
%31 = rope(%28, %5, %6) {{interleaved=0}} : {d}[{b},4,1,64]
%32 = rope(%29, %5, %6) {{interleaved=0}} : {d}[{b},2,1,64]
%33 = index_copy(%3, %18, %32) {{axis=2}} : {d}[{b},2,s0,64]
%34 = index_copy(%4, %18, %30) {{axis=2}} : {d}[{b},2,s0,64]
%35 = sdpa(%31, %33, %34, %23) {{is_causal=0, scale=0x1p-3}} : {d}[{b},4,1,64]
%36 = reshape(%35) {{shape=<{b},1,256>}} : {d}[{b},1,256]
%37 = gemm(%36, %11, _, %0) {{activation="none", trans_b=1}} : {d}[{b},1,256]
%38 = rms_norm(%37, %12) {{eps=0x1p-10}} : {d}[{b},1,256]
%39 = gemm(%38, %13, _, _) {{activation="silu", trans_b=1}} : {d}[{b},1,640]
%40 = gemm(%38, %14, _, _) {{activation="none", trans_b=1}} : {d}[{b},1,640]
%41 = mul(%39, %40) : {d}[{b},1,640]
%42 = gemm(%41, %15, _, %37) {{activation="none", trans_b=1}} : {d}[{b},1,256]
return %42, %33, %34
"""


def gpt2_text(dtype: str) -> str:
    """A layer as GPT-2 has it: layer norms, weights [K, N], one product for q, k and v."""
    d = dtype
    return f"""rmir 1
sym s0 [2,4096]
input %0 "x" : {d}[1,1,256]
input %1 "length" : i64[]
input %2 "open" : bool[1,1,1,s0]
input %3 "keys" : {d}[1,4,s0,64] donated
input %4 "values" : {d}[1,4,s0,64] donated
weight %5 "n1" : {d}[256]
weight %6 "n1b" : {d}[256]
weight %7 "qkv" : {d}[256,768]
weight %8 "qkvb" : {d}[768]
weight %9 "o" : {d}[256,256]
weight %10 "ob" : {d}[256]
weight %11 "n2" : {d}[256]
weight %12 "n2b" : {d}[256]
weight %13 "fc" : {d}[256,1024]
weight %14 "fcb" : {d}[1024]
weight %15 "down" : {d}[1024,256]
weight %16 "downb" : {d}[256]
literal %17 : i64[1] = 0000000000000000
%18 = add(%1, %17) : i64[1]
%19 = iota() {{start=<0>, step=1}} : i64[s0]
%20 = reshape(%18) {{shape=<1,1,1,1>}} : i64[1,1,1,1]
%21 = reshape(%19) {{shape=<1,1,1,s0>}} : i64[1,1,1,s0]
%22 = le(%21, %20) : bool[1,1,1,s0]
%23 = and(%2, %22) : bool[1,1,1,s0]
%24 = layer_norm(%0, %5, %6) {{eps=0x1p-10}} : {d}[1,1,256]
%25 = gemm(%24, %7, %8, _) {{activation="none", trans_b=0}} : {d}[1,1,768]
%26 = slice(%25) {{axis=2, start=<0>, step=1, stop=<256>}} : {d}[1,1,256]
%27 = slice(%25) {{axis=2, start=<256>, step=1, stop=<512>}} : {d}[1,1,256]
%28 = slice(%25) {{axis=2, start=<512>, step=1, stop=<768>}} : {d}[1,1,256]
%29 = reshape(%26) {{shape=<1,4,1,64>}} : {d}[1,4,1,64]
%30 = reshape(%27) {{shape=<1,4,1,64>}} : {d}[1,4,1,64]
%31 = reshape(%28) {{shape=<1,4,1,64>}} : {d}[1,4,1,64]
%33 = index_copy(%3, %18, %30) {{axis=2}} : {d}[1,4,s0,64]
%34 = index_copy(%4, %18, %31) {{axis=2}} : {d}[1,4,s0,64]
%35 = sdpa(%29, %33, %34, %23) {{is_causal=0, scale=0x1p-3}} : {d}[1,4,1,64]
%36 = reshape(%35) {{shape=<1,1,256>}} : {d}[1,1,256]
%37 = gemm(%36, %9, %10, %0) {{activation="none", trans_b=0}} : {d}[1,1,256]
%38 = layer_norm(%37, %11, %12) {{eps=0x1p-10}} : {d}[1,1,256]
%39 = gemm(%38, %13, %14, _) {{activation="gelu_tanh", trans_b=0}} : {d}[1,1,1024]
%40 = gemm(%39, %15, %16, %37) {{activation="none", trans_b=0}} : {d}[1,1,256]
return %40, %33, %34
"""


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_a_layer_as_gpt2_has_it_gives_what_the_host_gives(dtype: str) -> None:
    pytest.importorskip("rm_abstract")
    from rm_abstract import _core, device

    device.load_plugins(gpu=True)
    torch.manual_seed(3)
    t = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
    shapes: dict[str, tuple[int, ...]] = {n: (256,) for n in ("n1", "n1b", "n2", "n2b", "ob")}
    shapes |= {"qkv": (256, 768), "qkvb": (768,), "o": (256, 256), "fc": (256, 1024)}
    shapes |= {"fcb": (1024,), "down": (1024, 256), "downb": (256,)}
    weights = {n: (torch.randn(s) * s[0] ** -0.5).to(t) for n, s in shapes.items()}
    text = gpt2_text(dtype)
    host = _core.Program(text, weights, ["cpu"])
    there = {n: w.cuda() for n, w in weights.items()}
    here = _core.Program(text, there, ["cuda"])
    capacity = 320
    k, v = (torch.randn(1, 4, capacity, 64).to(t) for _ in range(2))
    k_there, v_there = k.cuda(), v.cuda()
    for position in (3, 4, 5, 6, 200, 319):
        seen = torch.rand(1, 1, 1, capacity) < 0.8
        seen[:, :, :, position] = True
        given = [torch.randn(1, 1, 256).to(t) * 2 + 1, torch.tensor(position), seen, k, v]
        moved = [k_there if a is k else v_there if a is v else a.cuda() for a in given]
        expected, actual = host.run(given)[0], here.run(moved)[0]
        bound = 1e-4 if dtype == "f32" else 3e-2
        scale = float(expected.float().abs().max())
        assert float((actual.cpu().float() - expected.float()).abs().max()) <= bound * scale
        for mine, right in ((k_there, k), (v_there, v)):
            assert float((mine.cpu().float() - right.float()).abs().max()) <= bound * 4
    counts: dict[str, Any] = here.report()["kernels"]
    fused = {name: n for name, n in counts.items() if "step" in name or "group" in name}
    step = "cuda/sdpa_step_f32_sm80" if dtype == "f32" else "cuda/sdpa_step_sm80"
    assert fused == {step: 1, "cuda/gemv_group_turned_sm80": 4}
    assert sum(counts.values()) <= 8
    assert here.report()["recordings"] == 1


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_decoders_layer_gives_what_the_host_gives(dtype: str, batch: int) -> None:
    pytest.importorskip("rm_abstract")
    from rm_abstract import _core, device

    device.load_plugins(gpu=True)
    torch.manual_seed(2)
    t = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
    shapes = {"n1": (256,), "n2": (256,), "kb": (128,), "q": (256, 256), "k": (128, 256)}
    shapes |= {"v": (128, 256), "o": (256, 256), "gate": (640, 256), "up": (640, 256)}
    shapes |= {"down": (256, 640)}
    weights = {n: (torch.randn(s) * s[-1] ** -0.5).to(t) for n, s in shapes.items()}
    text = step_text(batch, dtype)
    host = _core.Program(text, weights, ["cpu"])
    there = {n: w.cuda() for n, w in weights.items()}
    here = _core.Program(text, there, ["cuda"])
    capacity = 320
    k, v = (torch.randn(batch, 2, capacity, 64).to(t) for _ in range(2))
    k_there, v_there = k.cuda(), v.cuda()
    for position in (3, 4, 5, 6, 200, 319):
        x = torch.randn(batch, 1, 256).to(t)
        seen = torch.rand(batch, 1, 1, capacity) < 0.8
        seen[:, :, :, position] = True
        angle = torch.rand(batch, 1, 1, 64) * 6
        given = [x, torch.tensor(position), seen, k, v, angle.cos().to(t), angle.sin().to(t)]
        moved = [k_there if a is k else v_there if a is v else a.cuda() for a in given]
        expected, actual = host.run(given)[0], here.run(moved)[0]
        bound = 1e-4 if dtype == "f32" else 3e-2
        scale = float(expected.float().abs().max())
        assert float((actual.cpu().float() - expected.float()).abs().max()) <= bound * scale
        for mine, right in ((k_there, k), (v_there, v)):
            assert float((mine.cpu().float() - right.float()).abs().max()) <= bound * 4
    counts: dict[str, Any] = here.report()["kernels"]
    fused = {name: n for name, n in counts.items() if "step" in name or "group" in name}
    if dtype == "f32":  # of groups of several rows f32 has no kernel
        groups = {"cuda/gemv_group_f32_sm90": 2} if batch == 1 else {}
        assert fused == {"cuda/sdpa_step_f32_sm80": 1} | groups
    else:
        assert fused == {"cuda/sdpa_step_sm80": 1, "cuda/gemv_group_waves_sm90": 2}
        assert sum(counts.values()) <= 8  # the mask and the position are three of them
    assert here.report()["recordings"] == 1
