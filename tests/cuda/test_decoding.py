"""Attention of few rows to short caches, which blocks hold whole, and launches that begin early.

Sizes lie around the blocks' 96 and 192 keys, their tiles of 16 and the cluster's eight blocks.
Every tensor lies in guard bytes, and what no row sees is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from arena import Arena
from problems import DTYPES, assert_close, rotated, tolerance
from programs import OPCODES

pytestmark = pytest.mark.cuda

KEYS = (1, 2, 15, 16, 17, 33, 95, 96, 97, 191, 192, 193, 383, 384, 385, 575, 577, 767, 768, 769,
        1151, 1153, 1535, 1536, 1537)  # fmt: skip
NAN = float("nan")
Module = Callable[[str], ModuleType]


def drawn(rng: np.random.Generator, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def placed(
    arena: Arena, rng: np.random.Generator, shape: tuple[int, ...], t: torch.dtype
) -> torch.Tensor:
    """[B, H, N, D] of normal numbers: heads or rows outside, rows with gaps or without."""
    order = drawn(rng, (0, 1, 2, 3), (0, 2, 1, 3))
    pad = 16 // t.itemsize * int(rng.integers(0, 3))
    return arena.put(torch.randn(*shape, device="cuda"), t, order=order, pitch=shape[-1] + pad)


def padded(rng: np.random.Generator, batch: int, keys: int) -> torch.Tensor:
    """[B, 1, 1, T] of bool: each row of the batch begins somewhere, and one has holes."""
    starts = torch.from_numpy(rng.integers(0, max(1, keys), batch)).cuda()
    seen = torch.arange(keys, device="cuda") >= starts[:, None]
    seen[0] &= torch.rand(keys, device="cuda") < 0.8
    return seen[:, None, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_attention_to_few_keys_equals_float64(
    module: Module, dtype: str, dim: int, seed: int
) -> None:
    m, t, rng, arena = module("sdpa"), DTYPES[dtype], np.random.default_rng(seed), Arena(256 << 20)
    torch.manual_seed(seed)
    kernel = "sdpa_decode_f32_sm80" if dtype == "float32" else "sdpa_decode_sm80"
    for number in range(60):
        arena.clear()
        keys = KEYS[number % len(KEYS)] if number % 3 else int(rng.integers(1, 1700))
        batch, groups = int(rng.integers(1, 9)), int(rng.integers(1, 5))
        ratio = drawn(rng, 1, 2, 3, 4, 8, 16)
        rows = int(rng.integers(1, 1 + 16 // ratio)) if number % 2 else 1
        q = placed(arena, rng, (batch, groups * ratio, rows, dim), t)
        k, v = (placed(arena, rng, (batch, groups, keys, dim), t) for _ in "kv")
        seen = torch.ones(batch, groups * ratio, rows, keys, dtype=torch.bool, device="cuda")
        options: dict[str, Any] = {"overlap": number % 4 > 1}
        mask = None
        if number % 3 == 1:
            mask = arena.put(padded(rng, batch, keys), torch.bool).expand(seen.shape)
            seen = seen & mask
        if number % 5 < 3:
            lengths = torch.from_numpy(rng.integers(0, keys + 1, batch)).cuda()
            lengths[0] = drawn(rng, 0, 1, keys)
            inside = torch.arange(keys, device="cuda") < lengths[:, None]
            for x in (k, v):
                x.masked_fill_(~inside[:, None, :, None], NAN)
            seen = seen & inside[:, None, None]
            options["lengths"] = lengths.int() if number % 2 else lengths
        if number % 7 == 3:
            offset = int(rng.integers(-2, keys))
            options |= {"causal": True, "causal_offset": offset}
            at = torch.arange(rows, device="cuda")[:, None] + offset
            seen = seen & (torch.arange(keys, device="cuda") <= at)
        o = arena.result(arena.view(tuple(q.shape), t, order=(0, 2, 1, 3)))
        lse = arena.result(arena.view(tuple(q.shape[:-1]), torch.float32))
        space = arena.workspace(m.workspace(q, k))
        arena.freeze()
        m.forward(q, k, v, mask, o=o, lse=lse, workspace=space, kernel=kernel, **options)
        wide = [x.double().nan_to_num(0.0).repeat_interleave(ratio, 1) for x in (k, v)]
        score = (q.double() @ wide[0].mT / dim**0.5).masked_fill(~seen, -float("inf"))
        wanted = torch.softmax(score, -1).nan_to_num(0.0) @ wide[1]
        what = f"{number}: {tuple(q.shape)} x {keys}, groups {groups}, {options}, seed {seed}"
        rounding = 2.0**-18 if dtype == "float32" else 2 * tolerance(dtype, keys)
        assert_close(o, wanted, rounding, float(wide[1].abs().max()) + 1e-3, what)
        assert_close(lse, torch.logsumexp(score, -1), 2.0**-16, 8.0, f"{what}, lse")
        assert not arena.changed(), what


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_steps_over_short_caches_equal_float64(
    module: Module, dtype: str, dim: int, seed: int
) -> None:
    m, t, rng, arena = module("sdpa"), DTYPES[dtype], np.random.default_rng(seed), Arena(256 << 20)
    torch.manual_seed(seed)
    for number in range(75):
        arena.clear()
        capacity = KEYS[number % len(KEYS)] if number % 4 else int(rng.integers(1, 1700))
        batch, groups, ratio = (
            int(rng.integers(1, 9)),
            int(rng.integers(1, 9)),
            drawn(rng, 1, 2, 3, 4, 8, 16),
        )
        places = [p for p in (0, 1, 15, 16, 95, 96, 191, 192, capacity - 1) if p < capacity]
        position = drawn(rng, *places) if number % 2 else int(rng.integers(0, capacity))
        ends, masked = number % 3 != 1, number % 3 != 0
        q = placed(arena, rng, (batch, groups * ratio, 1, dim), t)
        k_new, v_new = (placed(arena, rng, (batch, groups, 1, dim), t) for _ in "kv")
        angle = torch.rand(batch, 1, 1, dim, device="cuda") * 6
        cos, sin = arena.put(angle.cos(), t), arena.put(angle.sin(), t)
        k, v = (placed(arena, rng, (batch, groups, capacity, dim), t) for _ in "kv")
        first = position if ends else capacity  # what is not there yet may be anything
        for x in (k, v):
            x[:, :, first:] = NAN
            x[:, :, position] = NAN
        seen = padded(rng, batch, capacity)
        seen &= torch.arange(capacity, device="cuda") <= position
        if not masked:
            seen[:] = torch.arange(capacity, device="cuda") <= position
        mask = arena.put(seen, torch.bool).expand(batch, groups * ratio, 1, capacity)
        o = arena.result(arena.view(tuple(q.shape), t, order=(0, 2, 1, 3)))
        for x in (k, v):
            arena.result(x[:, :, position])
        at = arena.put(
            torch.tensor([position], device="cuda"), drawn(rng, torch.int32, torch.int64)
        )
        space = arena.workspace(m.workspace(q, k))
        arena.freeze()
        early = {"overlap": number % 4 != 0, "stable_caches": number % 4 > 1}
        m.step(q, k_new, v_new, cos, sin, at, k, v, o=o, mask=mask if masked else None, ends=ends,
               workspace=space, **early)  # fmt: skip
        c, s = cos.double(), sin.double()
        what = f"{number}: {tuple(q.shape)} x {capacity} at {position}, ends {ends}, {early}"
        what += f", seed {seed}"
        new = rotated(k_new.double(), c, s)[:, :, 0]
        assert_close(k[:, :, position], new, tolerance(dtype, 2), 2.0, f"{what}: the key")
        assert torch.equal(v[:, :, position], v_new[:, :, 0]), what
        wide = [x.double().nan_to_num(0.0).repeat_interleave(ratio, 1) for x in (k, v)]
        score = rotated(q.double(), c, s).to(t).double() @ wide[0].mT * dim**-0.5
        score = score.masked_fill(~seen, -float("inf"))
        wanted = torch.softmax(score, -1).nan_to_num(0.0) @ wide[1]
        assert_close(o, wanted, 4 * tolerance(dtype, 64), 2.0, what)
        assert not arena.changed(), what


@pytest.mark.parametrize("dim,capacity", [(64, 640), (128, 200), (256, 700), (64, 4096)])
def test_steps_in_a_graph_read_what_the_two_launches_before_wrote(
    module: Module, dim: int, capacity: int
) -> None:
    """Operands and position of a step come from launches that overlap; old keys are read early."""
    m, ewise, t = module("sdpa"), module("ewise"), torch.bfloat16
    torch.manual_seed(7)
    heads, groups, copy_code = 8, 2, [OPCODES["copy"], 0, 0, -1, -1]
    shapes = [(1, heads, 1, dim), (1, groups, 1, dim), (1, groups, 1, dim)]
    source = [torch.empty(s, device="cuda", dtype=t) for s in shapes]
    given = [torch.zeros_like(s) for s in source]
    angles = torch.rand(2, 1, 1, 1, dim, device="cuda").to(t)
    turned = torch.zeros_like(angles)
    number, position = (torch.zeros(1, dtype=torch.long, device="cuda") for _ in range(2))
    caches = torch.randn(2, 1, groups, capacity, dim, device="cuda").to(t)
    start = caches.clone()
    big = torch.zeros(8 << 20, device="cuda")
    o = torch.zeros(shapes[0], device="cuda", dtype=t)
    space = torch.empty(m.workspace(given[0], caches[0]), dtype=torch.uint8, device="cuda")

    def step(**early: bool) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        big.add_(1)  # what starts only after all before it has ended
        ewise.forward(copy_code, [], [big], y=big, stream=stream)
        pairs = [*zip(source, given, strict=True), (number, position), (angles, turned)]
        for a, b in pairs:
            cls = 2 if a.dtype == torch.long else 0
            ewise.forward([OPCODES["copy"], cls, 0, -1, -1], [], [a], y=b, stream=stream)
        m.step(*given, turned[0], turned[1], position, caches[0], caches[1], o=o, ends=True,
               workspace=space, stream=stream, **early)  # fmt: skip

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(overlap=True, stable_caches=True)
    found: list[list[torch.Tensor]] = []
    for run in (graph.replay, step):
        caches.copy_(start)
        draw = torch.Generator("cuda").manual_seed(3)
        found.append([])
        for place in range(0, capacity, max(1, capacity // 150)):
            for x in source:
                x.copy_(torch.randn(x.shape, device="cuda", generator=draw))
            number.fill_(place)
            run()
            found[-1].append(o.clone())
        found[-1].append(caches.clone())
    wrong = [i for i, (a, b) in enumerate(zip(*found, strict=True)) if not torch.equal(a, b)]
    assert wrong == []


def test_a_step_that_overlaps_reads_keys_that_the_launch_two_before_wrote(module: Module) -> None:
    """Without stable_caches: nothing of the caches is read before the wait."""
    m, ewise, t = module("sdpa"), module("ewise"), torch.bfloat16
    copy_code, wrong, stream = [OPCODES["copy"], 0, 0, -1, -1], 0, torch.cuda.Stream()
    with torch.cuda.stream(stream):
        handle = stream.cuda_stream
        big = torch.zeros(32 << 20, device="cuda")
        small, other = torch.zeros(2, 2048, device="cuda")
        caches = torch.zeros(2, 1, 8, 512, 64, device="cuda", dtype=t)
        x = torch.zeros(1, 8, 1, 64, device="cuda", dtype=t)
        table = torch.ones(1, 1, 1, 64, device="cuda", dtype=t)
        at, o = torch.tensor([511], device="cuda"), torch.empty_like(x)
        space = torch.empty(m.workspace(x, caches[0]), dtype=torch.uint8, device="cuda")
        for number in range(1, 201):
            value = float(number % 100 + 1)
            source = torch.full_like(caches, value)
            new = torch.full_like(x, value)
            ewise.forward(copy_code, [], [big], y=big, stream=handle)  # keeps the writer waiting
            ewise.forward(copy_code, [], [source], y=caches, stream=handle)
            ewise.forward(copy_code, [], [small], y=other, stream=handle)
            m.step(x, new, new, table, table, at, caches[0], caches[1], o=o, ends=True,
                   overlap=True, workspace=space, stream=handle)  # fmt: skip
            wrong += int(not bool((o.float() == value).all()))
    assert wrong == 0, f"{wrong} of 200 steps read old data"


@pytest.mark.parametrize("captured", [False, True])
def test_lookups_copies_and_programs_that_overlap_see_what_is_new(
    module: Module, captured: bool
) -> None:
    """A chain in which each launch reads what the one before wrote."""
    embedding, copy, ewise = module("embedding"), module("copy"), module("ewise")
    torch.manual_seed(1)
    rows, columns, words = 64, 256, 1000
    table = torch.randn(words, columns, device="cuda")
    big = torch.zeros(8 << 20, device="cuda")
    first = torch.zeros(rows, dtype=torch.long, device="cuda")
    step = torch.ones(rows, dtype=torch.long, device="cuda")
    ids = torch.zeros(rows, dtype=torch.long, device="cuda")
    looked = torch.zeros(rows, columns, device="cuda")
    packed = torch.zeros(rows, 2, columns, device="cuda")
    turned, back = (
        torch.zeros(columns, rows, device="cuda"),
        torch.zeros(rows, columns, device="cuda"),
    )
    odd = torch.zeros(rows, columns - 1, device="cuda")
    sums = torch.zeros(rows, device="cuda", dtype=torch.float64)
    add, same, interp = OPCODES["add"], OPCODES["copy"], "ewise_interp_any"

    def chain() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        ewise.forward([same, 0, 0, -1, -1], [], [big], y=big, stream=stream)
        for _ in range(8):
            ewise.forward([add, 2, 0, 1, -1], [], [first, step], y=ids, stream=stream)
            embedding.forward(table, ids, y=looked, stream=stream)
            copy.forward(looked, y=packed[:, 1], stream=stream)
            copy.forward(packed[:, 1].T, y=turned, stream=stream)
            copy.forward(turned.T, y=back, stream=stream)
            copy.forward(back[:, 1:], y=odd, stream=stream)
            ewise.forward(
                [same, 1, 0, -1, -1], [], [odd[:, 3]], y=sums, stream=stream, kernel=interp
            )
            ewise.forward([same, 2, 0, -1, -1], [], [ids], y=first, stream=stream)

    run: Callable[[], None] = chain
    if captured:
        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        run = graph.replay
    for _ in range(20):
        first.copy_(torch.randint(0, words - 8, (rows,), device="cuda"))
        wanted = first + 8
        run()
        torch.cuda.synchronize()
        assert torch.equal(ids, wanted) and torch.equal(first, wanted)
        right = table[wanted]
        assert torch.equal(looked, right) and torch.equal(packed[:, 1], right)
        assert torch.equal(turned, right.T) and torch.equal(back, right)
        assert torch.equal(odd, right[:, 1:]) and torch.equal(sums, right[:, 4].double())
