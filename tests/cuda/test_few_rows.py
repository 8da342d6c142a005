"""gemm of 9 to 128 rows in tiles of 64, K in parts, against float64.

Sizes lie around the tiles of 48, 72 and 96 columns and the parts of 64 of K. Every tensor lies in
guard bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from arena import Arena
from problems import ACTIVATIONS, DTYPES, HOSTILE, assert_as_torch, assert_close, tolerance
from programs import OPCODES

pytestmark = pytest.mark.cuda

KERNEL = "gemm_few_sm90a"
ROWS = (9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128)
Module = Callable[[str], ModuleType]
KINDS = ("none", "column", "row", "scalar")


@pytest.fixture
def m(module: Module) -> ModuleType:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's")
    gemm = module("gemm")
    if KERNEL not in dict(gemm.kernels()):
        pytest.skip("this build has no wgmma")
    return gemm


def drawn(rng: np.random.Generator, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def size(rng: np.random.Generator) -> tuple[int, int]:
    """(N, K) around whole tiles and parts; now and then what a layer of BERT has."""
    if rng.random() < 0.15:
        return drawn(rng, (2304, 768), (768, 768), (3072, 768), (768, 3072), (1024, 1024))
    if rng.random() < 0.2:  # whole tiles of every width
        return 288 * int(rng.integers(1, 9)), 8 * int(rng.integers(1, 150))
    n = max(1, drawn(rng, 48, 72, 96) * int(rng.integers(1, 8)) + int(rng.integers(-2, 3)))
    k = max(1, 64 * drawn(rng, 1, 2, 3, 4, 8, 12, 16, 24) + int(rng.integers(-9, 10)))
    return (n if rng.random() < 0.7 else int(rng.integers(1, 500))), k


def pitched(arena: Arena, rng: np.random.Generator, n: int, k: int, t: torch.dtype) -> torch.Tensor:
    """Rows on 16 bytes, with gaps or without."""
    pitch = -(-k // 8) * 8 + 8 * int(rng.integers(0, 3))
    return arena.put(torch.randn(n, k, device="cuda"), t, pitch=pitch)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_few_rows_equal_float64(m: ModuleType, dtype: str, seed: int) -> None:
    t, rng, arena = DTYPES[dtype], np.random.default_rng(seed), Arena(64 << 20)
    torch.manual_seed(seed)
    for number in range(200):
        arena.clear()
        rows, (n, k) = ROWS[number % len(ROWS)], size(rng)
        a, b = pitched(arena, rng, rows, k, t), pitched(arena, rng, n, k, t)
        whole = n % 288 == 0 and rng.random() < 0.7  # kernels with less to ask
        kind = drawn(rng, "none", "column") if whole else drawn(rng, "column", *KINDS)
        count = {"column": n, "row": rows, "scalar": 1}.get(kind)
        odd = t.itemsize * int(rng.random() < 0.2 and not whole)
        bias = None if count is None else arena.put(torch.randn(count), t, offset=odd)
        name, function = ACTIVATIONS[number % (2 if whole else len(ACTIVATIONS))]
        if name == "tanh" and dtype == "float16":  # another row's
            name, function = ACTIVATIONS[0]
        gap = drawn(rng, 0, 0, 8) if whole else drawn(rng, 0, 0, 1, 8)
        pitch, odd = n + gap, t.itemsize * int(rng.random() < 0.2 and not whole)
        residual = None
        if rng.random() < 0.5:
            residual = arena.put(torch.randn(rows, n), t, pitch=pitch, offset=odd)
        before = 0 if residual is None else residual.double().clone()
        inside = residual is not None and rng.random() < 0.5
        c = residual if inside else arena.view((rows, n), t, pitch=pitch, offset=odd)
        assert c is not None
        aux = (
            arena.view((rows, n), t, pitch=n + drawn(rng, 0, 2, 3))
            if number % 3 == 1 and not whole
            else None
        )
        for result in (c, aux):
            if result is not None:
                arena.result(result)
        arena.freeze()
        options = {"bias_kind": kind, "activation": name, "slope": 0.1}
        options |= {"scale": drawn(rng, 1.0, 0.5), "overlap": number % 2 > 0}
        options |= {"stable_weights": number % 4 > 1, "trans_b": True}
        m.forward(a, b, bias, residual, c=c, aux=aux, kernel=KERNEL, **options)
        product = a.double() @ b.double().T * options["scale"]
        if bias is not None:
            product = product + (bias.double()[:, None] if kind == "row" else bias.double())
        what = f"{number}: {rows} x {n} x {k}, {options}, inside {inside}, seed {seed}"
        bound, scale = tolerance(dtype, k, 3) + 16 * 2.0**-23, 2 * k**0.5 + 1
        assert_close(c, function(product) + before, bound, scale, what)
        if aux is not None:
            assert_close(aux, product, bound, scale, f"{what}, aux")
        assert not arena.changed(), what


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_hostile_values_of_few_rows_become_what_torch_makes_of_them(
    m: ModuleType, dtype: str
) -> None:
    t = DTYPES[dtype]
    values = torch.tensor(HOSTILE, device="cuda").to(t)
    for k in (8, 200, 768):
        a = torch.zeros(16, k, device="cuda", dtype=t)
        b = torch.zeros(len(values), k, device="cuda", dtype=t)
        a[:, k - 1], b[:, k - 1] = 1, values
        c = torch.empty(16, len(values), device="cuda", dtype=t)
        for activation, function in ACTIVATIONS:
            if activation == "tanh" and dtype == "float16":
                continue
            m.forward(a, b, c=c, trans_b=True, bias_kind="none", activation=activation, slope=0.1,
                      kernel=KERNEL)  # fmt: skip
            assert_as_torch(c, function(values).expand_as(c), f"{activation}, K {k}, {dtype}")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row_and_column(m: ModuleType, value: float) -> None:
    torch.manual_seed(4)
    for rows, n, k in ((70, 50, 104), (128, 96, 768), (9, 145, 3072)):
        a, b = (torch.randn(s, k, device="cuda").bfloat16() for s in (rows, n))
        a[rows - 1, k - 1], b[n // 2, k // 3] = value, value
        c = torch.empty(rows, n, device="cuda").bfloat16()
        m.forward(a, b, c=c, trans_b=True, kernel=KERNEL)
        wrong = torch.zeros(rows, n, dtype=torch.bool, device="cuda")
        wrong[rows - 1], wrong[:, n // 2] = True, True
        assert torch.equal(~torch.isfinite(c), wrong), f"{rows} x {n} x {k}"


@pytest.mark.parametrize("rows", [9, 64, 128])
def test_products_in_a_graph_read_what_the_launches_before_wrote(
    m: ModuleType, module: Module, rows: int, seed: int
) -> None:
    """A layer's products, each over what the one before has written, the last with the residual
    in place; among them a weight that the launch before has just written."""
    ewise = module("ewise")
    torch.manual_seed(seed)
    sizes = [(2304, 768), (768, 2304), (768, 768), (3072, 768), (768, 3072)]
    w = [(torch.randn(n, k, device="cuda") / k**0.5).bfloat16() for n, k in sizes]
    bias = [torch.randn(n, device="cuda").bfloat16() for n, _ in sizes]
    x, home = (torch.zeros(rows, 768, device="cuda").bfloat16() for _ in range(2))
    y = [torch.zeros(rows, n, device="cuda").bfloat16() for n, _ in sizes]
    fresh, made = torch.zeros(768, 768, device="cuda").bfloat16(), torch.zeros_like(w[2])
    copy_code = [OPCODES["copy"], 0, 0, -1, -1]

    def chain(overlap: bool) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        how = {"trans_b": True, "stream": stream, "kernel": KERNEL}
        early = how | {"overlap": overlap, "stable_weights": True}
        ewise.forward(copy_code, [], [x], y=home, stream=stream)
        for _ in range(6):
            m.forward(home, w[0], bias[0], c=y[0], **early)
            m.forward(y[0], w[1], bias[1], home, c=y[1], **early)
            ewise.forward(copy_code, [], [fresh], y=made, stream=stream)
            m.forward(y[1], made, bias[2], c=y[2], overlap=overlap, **how)
            m.forward(y[2], w[3], bias[3], c=y[3], activation="gelu", **early)
            m.forward(y[3], w[4], bias[4], home, c=home, scale=0.25, **early)
            ewise.forward(copy_code, [], [w[2]], y=made, stream=stream)

    chain(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for _ in range(10):
        x.copy_(torch.randn(rows, 768, device="cuda"))
        fresh.copy_(torch.randn(768, 768, device="cuda") / 28)
        graph.replay()
        got = [t.clone() for t in (home, *y)]
        chain(False)
        torch.cuda.synchronize()
        for i, (a, b) in enumerate(zip(got, (home, *y), strict=True)):
            assert bool(a.isfinite().all()) and torch.equal(a, b), f"tensor {i}, seed {seed}"


@pytest.mark.parametrize("rows", [128, 77])
def test_a_layer_in_a_graph_gives_what_its_launches_give_one_by_one(
    m: ModuleType, module: Module, rows: int, seed: int
) -> None:
    """Products, attention of short rows and norms, each beginning while the one before ends."""
    sdpa, norm = module("sdpa"), module("layernorm")
    torch.manual_seed(seed)
    sizes = {"qkv": (2304, 768), "out": (768, 768), "wide": (3072, 768), "narrow": (768, 3072)}
    w = {s: (torch.randn(n, k, device="cuda") / k**0.5).bfloat16() for s, (n, k) in sizes.items()}
    bias = {s: torch.randn(n, device="cuda").bfloat16() for s, (n, _) in sizes.items()}
    y = {s: torch.zeros(rows, n, device="cuda").bfloat16() for s, (n, _) in sizes.items()}
    x, home, mid, seen = (torch.zeros(rows, 768, device="cuda").bfloat16() for _ in range(4))
    gamma, beta = torch.randn(2, 768, device="cuda").bfloat16()
    q, k, v = y["qkv"].view(1, rows, 3, 12, 64).permute(2, 0, 3, 1, 4)
    o = seen.view(1, rows, 12, 64).transpose(1, 2)
    mask = (torch.rand(rows, device="cuda") < 0.8).expand(1, 12, rows, rows)

    def chain(together: bool) -> None:
        stream = torch.cuda.current_stream().cuda_stream

        def product(name: str, a: torch.Tensor, **how: Any) -> None:
            m.forward(a, w[name], bias[name], c=y[name], trans_b=True, stream=stream,
                      overlap=together, stable_weights=together, kernel=KERNEL, **how)  # fmt: skip
            wait()

        def wait() -> None:
            if not together:
                torch.cuda.synchronize()

        home.copy_(x)
        for _ in range(12):
            product("qkv", home)
            sdpa.forward(q, k, v, mask, o=o, stream=stream, kernel="sdpa_short_sm80")
            wait()
            product("out", seen, residual=home)
            norm.forward(y["out"], gamma, beta, y=mid, stream=stream)
            wait()
            product("wide", mid, activation="gelu")
            product("narrow", y["wide"], residual=mid)
            norm.forward(y["narrow"], gamma, beta, y=home, stream=stream)
            wait()

    chain(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for _ in range(20):
        x.copy_(torch.randn(rows, 768, device="cuda"))
        graph.replay()
        got = [t.clone() for t in (home, mid, seen, *y.values())]
        chain(False)
        for i, (a, b) in enumerate(zip(got, (home, mid, seen, *y.values()), strict=True)):
            assert bool(a.isfinite().all()) and torch.equal(a, b), f"tensor {i}, seed {seed}"


def test_few_rows_are_what_bert_takes_and_no_more(m: ModuleType) -> None:
    """The table's own choice gives this kernel's bits, where cuBLASLt's differ."""
    torch.manual_seed(5)
    space = torch.empty(m.workspace(), dtype=torch.uint8, device="cuda")
    for rows in (64, 128):
        for n, k in ((2304, 768), (768, 768), (3072, 768), (768, 3072)):
            a, b = (torch.randn(s, k, device="cuda").bfloat16() for s in (rows, n))
            bias, c = (
                torch.randn(n, device="cuda").bfloat16(),
                torch.empty(2, rows, n).cuda().bfloat16(),
            )
            m.forward(a, b, bias, c=c[0], trans_b=True, workspace=space)
            m.forward(a, b, bias, c=c[1], trans_b=True, kernel=KERNEL)
            assert torch.equal(c[0], c[1]), f"{rows} x {n} x {k}"
    a = torch.randn(1024, 768, device="cuda").bfloat16()
    for rows in (8, 129, 1024):
        with pytest.raises(m.Unsupported, match="9 to 128 rows"):
            m.forward(a[:rows], a, c=torch.empty(rows, 1024).cuda().bfloat16(), trans_b=True,
                      kernel=KERNEL)  # fmt: skip


def test_what_few_rows_do_not_take_is_named(m: ModuleType) -> None:
    x = torch.zeros(16, 64, device="cuda").bfloat16()
    c = torch.zeros(16, 16, device="cuda").bfloat16()
    for a, b, why, how in (
        (x, torch.zeros(64, 16).cuda().bfloat16(), "a \\[M, K\\] and b \\[N, K\\]", {}),
        (x.float(), x.float(), "16-bit floats", {"trans_b": True}),
        (x[:, 1:], x[:, 1:], "16 bytes", {"trans_b": True}),
        (x.repeat(1, 200), x.repeat(1, 200), "too long", {"trans_b": True}),
    ):
        with pytest.raises(m.Unsupported, match=why):
            m.forward(a, b, c=c.to(a.dtype), kernel=KERNEL, **how)
    with pytest.raises(m.InvalidArgument):
        m.forward(x, x, c=x[:, :16], trans_b=True, kernel=KERNEL)  # c lies in a


def test_a_plan_of_few_rows_takes_them(m: ModuleType) -> None:
    from rm_abstract import _core, device

    device.load_plugins(gpu=True)
    torch.manual_seed(6)
    there = {"w": torch.randn(3072, 768) / 28, "v": torch.randn(768, 3072) / 55}
    there |= {"b": torch.randn(3072)}
    weights = {name: v.bfloat16() for name, v in there.items()}
    for rows, wanted in ((128, 2), (64, 2), (1024, 0)):
        text = f"""rmir 1
input %0 "x" : bf16[1,{rows},768]
weight %1 "w" : bf16[3072,768]
weight %2 "v" : bf16[768,3072]
weight %3 "b" : bf16[3072]
%4 = gemm(%0, %1, %3, _) {{activation="gelu", trans_b=1}} : bf16[1,{rows},3072]
%5 = gemm(%4, %2, _, %0) {{activation="none", trans_b=1}} : bf16[1,{rows},768]
return %5
"""
        x = torch.randn(1, rows, 768).bfloat16().cuda()
        program = _core.Program(text, {k: v.cuda() for k, v in weights.items()}, ["cuda"])
        got = [program.run([x])[0] for _ in range(4)][-1]
        w, v, b = (weights[name].cuda().double() for name in "wvb")
        h = torch.nn.functional.gelu(x.double() @ w.T + b).bfloat16().double()
        assert_close(got, h @ v.T + x.double(), 2.0**-7, 4.0, f"{rows} rows")
        assert program.report()["kernels"].get(f"cuda/{KERNEL}", 0) == wanted, f"{rows} rows"


def test_joined_weights_are_there_from_the_first_call_on() -> None:
    """On a host they wait for the job that packs weights, which a GPU has no use for."""
    pytest.importorskip("rm_abstract")
    from rm_abstract import _core, device

    device.load_plugins(gpu=True)
    torch.manual_seed(3)
    text = """rmir 1
input %0 "x" : bf16[64,256]
weight %1 "q" : bf16[256,256]
weight %2 "k" : bf16[128,256]
%3 = concat(%1, %2) {axis=0} : bf16[384,256]
%4 = gemm(%0, %3, _, _) {activation="none", trans_b=1} : bf16[64,384]
%5 = slice(%4) {axis=1, start=<0>, step=1, stop=<256>} : bf16[64,256]
%6 = slice(%4) {axis=1, start=<256>, step=1, stop=<384>} : bf16[64,128]
return %5, %6
"""
    weights = {
        n: torch.randn(s, 256, device="cuda").bfloat16() for n, s in (("q", 256), ("k", 128))
    }
    for packing in ("later", "spare"):
        program = _core.Program(text, weights, ["cuda"], packing=packing)
        for _ in range(3):
            x = torch.randn(64, 256, device="cuda").bfloat16()
            for got, name in zip(program.run([x]), "qk", strict=True):
                wanted = x.double() @ weights[name].double().T
                assert_close(got, wanted, tolerance("bfloat16", 256), 16.0, name)
            assert sum(n for k, n in program.report()["kernels"].items() if "gem" in k) == 1


@pytest.mark.parametrize("rows, kernel", [(64, KERNEL), (1, "gemv_waves_sm90")])
def test_a_constant_weight_that_is_copied_first_is_not_read_early(
    m: ModuleType, rows: int, kernel: str
) -> None:
    """The copy is a launch of the same graph: read early, it is that of the replay before."""
    from hostile import Maker
    from plugged import Plugged

    make = Maker(0, Arena(4 << 30))  # every row has a workspace of its own
    x = torch.randn(rows, 768, device="cuda").bfloat16()
    wide = torch.randn(2304, 2 * 768, device="cuda").bfloat16()
    y = torch.zeros(rows, 2304, device="cuda").bfloat16()
    problem = Plugged("gemm").problem(
        make, "a weight with gaps", [x, wide[:, ::2], None, None], [y],
        {"trans_b": 1, "activation": "none"}, list, constant=[1],
    )  # fmt: skip
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        problem.call(kernel=kernel, stream=stream.cuda_stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        problem.call(kernel=kernel, stream=stream.cuda_stream)
    for number in range(50):
        wide.normal_()
        graph.replay()
        wanted = x.double() @ wide[:, ::2].double().T
        assert_close(y, wanted, tolerance("bfloat16", 768, 2), 28.0, f"replay {number}")
