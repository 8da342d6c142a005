"""gemv, gemm and attention modules on CUDA against torch, plain cuBLASLt and the probes.

    python benchmarks/cuda_matmul.py [--only gemv,gemm,...] [--json FILE] [--rounds N]

gemv: weights rotate so that none is in the L2 cache, launches overlap in CUDA graphs of at least 64
launches; "of read" is the weights' own bytes over the time, over the bandwidth of the bulk-copy
read probe, which takes its turn in every round (for milliseconds after much work the card is
slower). gemm: operands rotate, candidates take turns; "of plain" compares with the fastest plain
cuBLASLt product.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from cuda_ops import graph_of, module, stream, time_graph

F = torch.nn.functional
BF16 = torch.bfloat16
Run = Callable[[int], object]


def interleaved(
    variants: dict[str, Run],
    calls: int,
    rounds: int,
    extra: dict[str, tuple[torch.cuda.CUDAGraph, int]] | None = None,
) -> dict[str, float]:
    """Median microseconds a call of each variant, in CUDA graphs that take turns, in an order that
    changes: who comes after a variant of the same code finds it in the cache. extra: graphs that
    are there already and their calls."""
    graphs = {name: (graph_of(run, calls), calls) for name, run in variants.items()}
    graphs |= extra or {}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    order, rng = list(graphs), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            samples[name].append(time_graph(*graphs[name]))
    return {name: statistics.median(values) for name, values in samples.items()}


class Gemv:
    """Cases against the read probe."""

    def __init__(self, rounds: int) -> None:
        self.m, self.rounds = module("gemv"), rounds
        self.probe_data = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
        self.probe_graph = graph_of(
            lambda k: self.m.read_probe(self.probe_data, stream=stream()), 2
        )

    def probe(self, size: int = 1 << 30) -> float:
        """Bytes a microsecond, read `size` at a time."""
        graph, calls = self.probe_graph, 2
        if size < 1 << 30:
            calls = min(64, (1 << 30) // size)
            parts = self.probe_data.split(size)[:calls]
            graph = graph_of(lambda k: self.m.read_probe(parts[k], stream=stream()), calls)
        times = [time_graph(graph, calls) for _ in range(self.rounds)]
        return size / statistics.median(times)

    def against_probe(self, variants: dict[str, Run], calls: int, size: float) -> dict[str, float]:
        """size: bytes of weights that a call reads."""
        graphs = {"probe": (self.probe_graph, 2)}
        result = interleaved(variants, calls, self.rounds, graphs)
        bandwidth = (1 << 30) / result.pop("probe")
        return result | {"of_read": size / result["ours"] / bandwidth}

    def one(self, n: int, k: int, rows: int = 1, bits: int = 16, dtype: torch.dtype = BF16) -> dict:
        width = {16: k * 2, 8: k, 4: k // 2}[bits] if dtype != torch.float32 else k * 4
        size = n * width
        sets = max(2, min(64, -(-(1 << 29) // size)))
        x = torch.randn(rows, k, device="cuda").to(dtype)
        y = torch.empty(rows, n, device="cuda", dtype=dtype)
        scales = None
        if bits == 16:
            w = [torch.randn(n, k, device="cuda").to(dtype) for _ in range(sets)]
        else:
            kind = torch.int8 if bits == 8 else torch.uint8
            w = [torch.randint(0, 127, (n, width), device="cuda").to(kind) for _ in range(sets)]
            scales = [torch.rand(k // 128, n, device="cuda").to(dtype) for _ in range(sets)]
            size += k // 128 * n * 2

        def ours(i: int) -> None:
            s = None if scales is None else scales[i % sets]
            self.m.forward(
                x, w[i % sets], s, y=y, overlap=True, stable_weights=True, stream=stream()
            )

        variants: dict[str, Run] = {"ours": ours}
        if rows == 1 and bits == 16:
            variants["tiles"] = lambda i: self.m.forward(
                x,
                w[i % sets],
                y=y,
                overlap=True,
                stable_weights=True,
                stream=stream(),
                kernel="gemv_bulk_sm90",
            )
        if bits == 16:
            variants["F.linear"] = lambda i: F.linear(x, w[i % sets])
        return self.against_probe(variants, sets * -(-64 // sets), size)

    def chain(self, hidden: int, inter: int, kv: int, layers: int, vocab: int) -> dict:
        """Every linear of one token, one launch each."""
        shapes = [(hidden + 2 * kv, hidden), (hidden, hidden), (2 * inter, hidden), (hidden, inter)]
        all_shapes = shapes * layers + [(vocab, hidden)]
        w = [torch.randn(s, device="cuda", dtype=BF16) for s in all_shapes]
        x = {k: torch.randn(1, k, device="cuda", dtype=BF16) for _, k in shapes}
        y = {n: torch.empty(1, n, device="cuda", dtype=BF16) for n, _ in all_shapes}

        def run(i: int) -> None:
            n, k = all_shapes[i]
            self.m.forward(x[k], w[i], y=y[n], overlap=True, stable_weights=True, stream=stream())

        calls = len(all_shapes)
        size = sum(t.numel() * 2 for t in w) / calls
        result = self.against_probe({"ours": run}, calls, size)
        return result | {"ours": result["ours"] * calls}

    def cases(self) -> dict[str, dict]:
        out: dict[str, dict] = {"read probe TB/s": {"value": self.probe() / 1e6}}
        for n, k in ((2048, 2048), (8192, 2048), (2048, 8192), (4096, 14336), (128256, 2048)):
            out[f"gemv bf16 {n} x {k}"] = self.one(n, k)
        for rows in (2, 4, 8):
            for n, k in ((8192, 2048), (4096, 14336)):
                out[f"gemv bf16 M {rows} {n} x {k}"] = self.one(n, k, rows)
        for bits in (8, 4):
            for n, k in ((8192, 8192), (4096, 14336), (28672, 4096), (128256, 2048)):
                out[f"gemv int{bits} {n} x {k}"] = self.one(n, k, bits=bits)
        out["gemv fp32 4096 x 4096"] = self.one(4096, 4096, dtype=torch.float32)
        out["gemv fp32 50257 x 768"] = self.one(50257, 768, dtype=torch.float32)
        out["linears of a token, 1B"] = self.chain(2048, 8192, 512, 16, 128256)
        out["linears of a token, 8B"] = self.chain(4096, 14336, 1024, 32, 128256)
        return out


class Gemm:
    def __init__(self, rounds: int) -> None:
        self.m, self.rounds = module("gemm"), rounds
        self.space = torch.empty(self.m.workspace(), dtype=torch.uint8, device="cuda")

    def one(self, m: int, n: int, k: int, activation: str, dtype: torch.dtype = BF16) -> dict:
        sets = 4
        a = [torch.randn(m, k, device="cuda").to(dtype) for _ in range(sets)]
        w = [torch.randn(n, k, device="cuda").to(dtype) for _ in range(sets)]
        bias = torch.randn(n, device="cuda").to(dtype)
        c = torch.empty(m, n, device="cuda", dtype=dtype)
        names = [name for name, _ in self.m.kernels()]
        options = {"trans_b": True, "activation": activation, "workspace": self.space}

        def call(i: int, kernel: str = "", plain: bool = False) -> None:
            extra = {**options, "activation": "none"} if plain else options
            self.m.forward(a[i], w[i], None if plain else bias, c=c, kernel=kernel, tune=True,
                           stream=stream(), **extra)  # fmt: skip

        act = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
               "none": lambda x: x, "silu": F.silu, "relu": F.relu}[activation]  # fmt: skip
        variants: dict[str, Run] = {
            "ours": call,
            "plain": lambda i: call(i, "gemm_cublaslt_library", True),
            "torch": lambda i: act(F.linear(a[i], w[i], bias)),
        }
        for name in names:
            if name.endswith("any") and m * n * k > 1 << 30:
                continue
            try:
                call(0, name)
            except self.m.Unsupported:
                continue
            variants[name] = lambda i, name=name: call(i, name)
        result: dict = interleaved(variants, sets, self.rounds)
        tera = 2.0 * m * n * k / result["ours"] / 1e6
        return result | {"of_plain": result["ours"] / result["plain"], "tflops": tera}

    def backward(self, m: int, n: int, k: int) -> dict:
        a, dc = (torch.randn(m, d, device="cuda", dtype=BF16) for d in (k, n))
        w, bias = (
            torch.randn(n, k, device="cuda", dtype=BF16),
            torch.randn(n, device="cuda").bfloat16(),
        )
        aux = F.linear(a, w, bias)
        da, dw, db = torch.empty_like(a), torch.empty_like(w), torch.empty_like(bias)
        space = torch.empty(
            self.m.backward_workspace(dc, a, w, has_bias=True, activation="gelu"),
            dtype=torch.uint8, device="cuda")  # fmt: skip

        def ours(_: int) -> None:
            self.m.backward(dc, a, w, aux, da=da, db=dw, dbias=db, trans_b=True, activation="gelu",
                            workspace=space, tune=True, stream=stream())  # fmt: skip

        def theirs(_: int) -> object:
            dt = torch.ops.aten.gelu_backward(dc, aux)
            return dt.sum(0), dt @ w, dt.T @ a

        result = interleaved({"ours": ours, "torch": theirs}, 4, self.rounds)
        return result | {"torch_over_ours": result["torch"] / result["ours"]}

    def cases(self) -> dict[str, dict]:
        out: dict[str, dict] = {"cuBLASLt": {"version": self.m.library()[0]}}
        for size in (2048, 4096, 8192):
            for activation in ("none", "gelu_tanh", "gelu"):
                out[f"gemm bf16 {size} cubed, bias + {activation}"] = self.one(
                    size, size, size, activation
                )
        for m, n, k in ((128, 3072, 768), (128, 768, 3072), (512, 4096, 4096), (32, 4096, 4096)):
            out[f"gemm bf16 {m} x {n} x {k}, bias + gelu"] = self.one(m, n, k, "gelu")
        for m, n, k in ((128, 3072, 768), (512, 768, 3072), (2048, 3072, 768), (2048, 4096, 4096)):
            out[f"gemm backward bf16 {m} x {n} x {k}, gelu"] = self.backward(m, n, k)
        return out


class GemmSweep:
    """Random shapes, epilogues and transpositions: the measured choice against the best of the
    library's fused epilogue and its product with a pass; those beyond 1.02 are measured again."""

    def __init__(self, rounds: int, count: int = 200) -> None:
        self.m, self.rounds, self.count = module("gemm"), rounds, count
        self.space = torch.empty(self.m.workspace(), dtype=torch.uint8, device="cuda")

    def problem(self, rng: random.Random) -> dict[str, Run]:
        def axis(longest: int) -> int:
            return max(8, int(2 ** rng.uniform(5, math.log2(longest))) // 8 * 8)

        m, n, k = axis(8192), axis(8192), axis(8192)
        ta, tb = rng.random() < 0.25, rng.random() < 0.6
        activation = rng.choice(["none", "relu", "gelu", "gelu_tanh", "silu"])
        dtype = rng.choice([BF16, torch.float16])
        sets = max(2, min(8, (1 << 28) // (2 * (m * k + n * k))))
        a = [torch.randn((k, m) if ta else (m, k), device="cuda").to(dtype) for _ in range(sets)]
        b = [torch.randn((n, k) if tb else (k, n), device="cuda").to(dtype) for _ in range(sets)]
        bias = torch.randn(n, device="cuda").to(dtype) if rng.random() < 0.8 else None
        c = torch.empty(m, n, device="cuda", dtype=dtype)
        kind = "none" if bias is None else "column"
        self.what = f"{m} x {n} x {k}, {'t' if ta else 'n'}{'t' if tb else 'n'}, {activation}"

        def call(kernel: str) -> Run:
            return lambda i: self.m.forward(
                a[i % sets], b[i % sets], bias, c=c, trans_a=ta, trans_b=tb, bias_kind=kind,
                activation=activation, workspace=self.space, tune=True, stream=stream(),
                kernel=kernel)  # fmt: skip

        out = {"ours": call("")}
        for name in ("gemm_cublaslt_library", "gemm_cublaslt_ewise"):
            try:
                call(name)(0)
            except self.m.Unsupported:
                continue
            out[name] = call(name)
        return out

    def cases(self) -> dict[str, dict]:
        rng, ratios, again = random.Random(7), [], []
        for _ in range(self.count):
            variants = self.problem(rng)
            ratio = self.ratio(variants, self.rounds)
            ratios.append(ratio)
            if ratio > 1.02:
                again.append(self.ratio(variants, 3 * self.rounds))
                print(f"  {self.what}: {ratio:.3f}, again {again[-1]:.3f}", flush=True)
        within = sum(r <= 1.02 for r in ratios) / len(ratios)
        return {
            "gemm sweep": {
                "shapes": len(ratios), "within_1.02": within, "median": statistics.median(ratios),
                "best": min(ratios), "worst": max(ratios), "worst_again": max(again, default=0.0),
            }
        }  # fmt: skip

    @staticmethod
    def ratio(variants: dict[str, Run], rounds: int) -> float:
        us = interleaved(variants, 8, rounds)
        return us["ours"] / min(v for name, v in us.items() if name != "ours")


class Sdpa:
    def __init__(self, rounds: int) -> None:
        self.m, self.rounds = module("sdpa"), rounds
        self.gemv = Gemv(rounds)

    def one(
        self, batch: int, heads: int, groups: int, rows: int, keys: int, dim: int, causal: bool,
        dtype: torch.dtype = BF16,
    ) -> dict[str, float]:  # fmt: skip
        size = 2 * batch * groups * keys * dim * dtype.itemsize
        sets = max(2, min(64, -(-(1 << 29) // size)))

        def make(h: int, n: int) -> list[torch.Tensor]:
            return [torch.randn(batch, h, n, dim, device="cuda", dtype=dtype) for _ in range(sets)]

        q, k, v = make(heads, rows), make(groups, keys), make(groups, keys)
        o = torch.empty_like(q[0])
        space = torch.empty(self.m.workspace(q[0], k[0]), dtype=torch.uint8, device="cuda")

        def ours(i: int, overlap: bool = True) -> None:
            self.m.forward(q[i], k[i], v[i], o=o, causal=causal, causal_offset=keys - rows,
                           overlap=overlap, workspace=space, stream=stream())  # fmt: skip

        result: dict[str, float] = interleaved(
            {
                "ours": ours,
                "alone": lambda i: ours(i, False),
                "torch": lambda i: F.scaled_dot_product_attention(
                    q[i], k[i], v[i], is_causal=causal and rows > 1, enable_gqa=heads != groups
                ),
            },
            sets,
            self.rounds,
        )
        flops = 4 * batch * heads * rows * keys * dim * (0.5 if causal and rows > 1 else 1)
        result["tflops"] = flops / result["ours"] / 1e6
        result["of_read"] = size / result["ours"] / self.gemv.probe()
        return result | {"of_read_of_same_size": size / result["ours"] / self.gemv.probe(size)}

    def backward(
        self, batch: int, heads: int, rows: int, dim: int, causal: bool, dtype: torch.dtype = BF16
    ) -> dict:
        shape = (batch, heads, rows, dim)
        q, k, v, d_o = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4))
        o, lse = torch.empty_like(q), torch.empty(shape[:3], device="cuda")
        self.m.forward(q, k, v, o=o, lse=lse, causal=causal, stream=stream())
        dq, dk, dv = (torch.empty_like(q) for _ in range(3))
        space = torch.empty(self.m.backward_workspace(q, k), dtype=torch.uint8, device="cuda")

        def ours(_: int) -> None:
            self.m.backward(d_o, q, k, v, o, lse, dq=dq, dk=dk, dv=dv, causal=causal,
                            workspace=space, stream=stream())  # fmt: skip

        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            done = F.scaled_dot_product_attention(*leaves, is_causal=causal)

        def eager(run: Run) -> float:
            """Without a graph: autograd waits for other streams."""
            run(0)
            times = []
            for _ in range(self.rounds):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run(0)
                stop.record()
                stop.synchronize()
                times.append(start.elapsed_time(stop) * 1000)
            return statistics.median(times)

        result = {
            "ours": eager(ours),
            "torch": eager(lambda _: torch.autograd.grad(done, leaves, d_o, retain_graph=True)),
        }
        flops = 10 * batch * heads * rows * rows * dim * (0.5 if causal else 1)
        return result | {"tflops": flops / result["ours"] / 1e6}

    def cases(self) -> dict[str, dict]:
        out: dict[str, dict] = {}
        for batch in (1, 2, 4, 8, 16):
            for heads, dim in ((32, 64), (32, 128)):
                out[f"decode {batch} x {heads} of 8, 4096 keys, D {dim}"] = self.one(
                    batch, heads, 8, 1, 4096, dim, False
                )
        for dim in (64, 128):
            for causal in (False, True):
                out[f"prefill 4 x 16, 2048, D {dim}, causal {causal}"] = self.one(
                    4, 16, 16, 2048, 2048, dim, causal
                )
                out[f"backward 4 x 16, 2048, D {dim}, causal {causal}"] = self.backward(
                    4, 16, 2048, dim, causal
                )
                fp32 = f"fp32 4 x 16, 1024, D {dim}, causal {causal}"
                out[f"prefill {fp32}"] = self.one(4, 16, 16, 1024, 1024, dim, causal, torch.float32)
                out[f"backward {fp32}"] = self.backward(4, 16, 1024, dim, causal, torch.float32)
            out[f"decode fp32 1 x 32 of 8, 4096 keys, D {dim}"] = self.one(
                1, 32, 8, 1, 4096, dim, False, torch.float32
            )
        out["decode fp32 4 x 16 of 16, 4096 keys, D 64"] = self.one(
            4, 16, 16, 1, 4096, 64, False, torch.float32
        )
        return out


GROUPS: dict[str, Callable[[int], dict[str, dict]]] = {
    "gemv": lambda rounds: Gemv(rounds).cases(),
    "gemm": lambda rounds: Gemm(rounds).cases(),
    "gemm_sweep": lambda rounds: GemmSweep(rounds).cases(),
    "sdpa": lambda rounds: Sdpa(rounds).cases(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(GROUPS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    results: dict[str, dict] = {}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for group in options.only.split(","):
        with torch.no_grad():
            cases = GROUPS[group](options.rounds)
        for name, values in cases.items():
            print(name, {k: round(v, 3) for k, v in values.items()}, flush=True)
        results |= cases
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
