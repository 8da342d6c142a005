"""CUDA operator modules against torch eager, torch.compile and the copy probe, interleaved.

    python benchmarks/cuda_ops.py [--json FILE] [--markdown FILE] [--png FILE]
                                  [--rounds N] [--only GROUP,GROUP]

Every variant runs in a CUDA graph over several sets of buffers, so that no set is in the L2
cache; the variants of a case take turns and the median of the rounds counts. The probe is a
device-to-device copy of 64 MiB measured in the same turns; "of probe" is the case's own bytes
over its time, over the probe's bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import cuda_move_cases
import torch
from cuda_cases import (
    MIB,
    SETS,
    Case,
    Maker,
    compiled,
    graph_of,
    measure,
    module,
    pair,
    plot,
    rows,
    stream,
    table,
)
from cuda_cases import (
    time_graph as time_graph,  # other benchmarks take it from here
)

F = torch.nn.functional


def ewise_cases(dtype: torch.dtype) -> list[Case]:
    m, tag = module("ewise"), str(dtype)[6:]
    x, z, y = (rows(4096, dtype) for _ in range(3))
    bias = torch.randn(4096, device="cuda").to(dtype)
    silu, add, chain = (
        [16, 0, 0, -1, -1],
        [40, 0, 0, 1, -1],
        [40, 0, 0, 1, -1, 14, 0, 3, -1, -1, 42, 0, 4, 2, -1],
    )
    return [
        pair(f"silu {tag}", 128 * MIB,
             lambda k: m.forward(silu, [], [x[k]], y=y[k], stream=stream()),
             F.silu, lambda k: (x[k],)),
        pair(f"add {tag}", 192 * MIB,
             lambda k: m.forward(add, [], [x[k], z[k]], y=y[k], stream=stream()),
             torch.add, lambda k: (x[k], z[k])),
        pair(f"gelu(x + bias) * z {tag}", 192 * MIB,
             lambda k: m.forward(chain, [], [x[k], bias, z[k]], y=y[k], stream=stream()),
             lambda a, b, c: F.gelu(a + b) * c, lambda k: (x[k], bias, z[k])),
    ]  # fmt: skip


def norm_cases(dtype: torch.dtype, n: int) -> list[Case]:
    layer, rms, tag = module("layernorm"), module("rmsnorm"), f"n {n} {str(dtype)[6:]}"
    x, r, y, s = (rows(n, dtype) for _ in range(4))
    w, b = (torch.randn(n, device="cuda").to(dtype) for _ in range(2))
    dw, db = torch.empty_like(w), torch.empty_like(w)
    space = torch.empty(layer.backward_workspace(x[0]), dtype=torch.uint8, device="cuda")

    def residual_rms(a: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = a + c
        return F.rms_norm(h, (n,), w, 1e-5), h

    stats = [torch.native_layer_norm(t, (n,), w, b, 1e-5)[1:] for t in x]
    return [
        pair(f"layernorm {tag}", 128 * MIB,
             lambda k: layer.forward(x[k], w, b, y=y[k], stream=stream()),
             lambda t: F.layer_norm(t, (n,), w, b, 1e-5), lambda k: (x[k],)),
        pair(f"residual + rmsnorm {tag}", 256 * MIB,
             lambda k: rms.forward(x[k], w, None, r[k], y=y[k], sum=s[k], stream=stream()),
             residual_rms, lambda k: (x[k], r[k])),
        pair(f"layernorm backward {tag}", 192 * MIB,
             lambda k: layer.backward(r[k], x[k], w, dx=y[k], dweight=dw, dbias=db,
                                      workspace=space, stream=stream()),
             lambda g, t, mean, rstd: torch.ops.aten.native_layer_norm_backward(
                 g, t, (n,), mean, rstd, w, b, [True, True, True]),
             lambda k: (r[k], x[k], *stats[k])),
    ]  # fmt: skip


def softmax_cases(dtype: torch.dtype, n: int) -> list[Case]:
    m, tag = module("softmax"), f"n {n} {str(dtype)[6:]}"
    x, g, y = (rows(n, dtype) for _ in range(3))
    done = [torch.softmax(t, -1) for t in x]
    return [
        pair(f"softmax {tag}", 128 * MIB, lambda k: m.forward(x[k], y=y[k], stream=stream()),
             lambda t: torch.softmax(t, -1), lambda k: (x[k],)),
        pair(f"softmax backward {tag}", 192 * MIB,
             lambda k: m.backward(g[k], done[k], dx=y[k], stream=stream()),
             lambda d, t: torch._softmax_backward_data(d, t, -1, dtype), lambda k: (g[k], done[k])),
    ]  # fmt: skip


def cross_entropy_case(count: int, vocabulary: int) -> Case:
    m = module("cross_entropy")
    x = torch.randn(count, vocabulary, device="cuda").bfloat16()
    grad = torch.empty_like(x)
    target = torch.randint(0, vocabulary, (count,), device="cuda")
    loss, lse = torch.empty(2, count, device="cuda")
    dloss = torch.full((count,), 1 / count, device="cuda")
    space = torch.empty(m.forward_workspace(x), dtype=torch.uint8, device="cuda")

    def ours(_: int) -> None:
        m.forward(x, target, loss=loss, lse=lse, workspace=space, stream=stream())
        m.backward(dloss, x, target, lse, dlogits=grad, stream=stream())

    leaf = x.clone().requires_grad_()

    def forward_backward(t: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(F.cross_entropy(t, target), t)[0]

    fast = compiled(lambda t: F.cross_entropy(t, target))
    moved = 3 * x.numel() * 2
    return Case(
        f"cross entropy forward + backward {count} x {vocabulary} bfloat16", moved, ours,
        lambda _: forward_backward(leaf), 2,
        lambda _: torch.autograd.grad(fast(leaf), leaf)[0],
    )  # fmt: skip


def tiny_cases() -> list[Case]:
    n, calls = 2048, 64
    x, y = torch.randn(2, 1, n, device="cuda").bfloat16()
    w = torch.ones(n, device="cuda").bfloat16()
    rms, ewise, softmax = module("rmsnorm"), module("ewise"), module("softmax")
    silu = [16, 0, 0, -1, -1]
    return [
        pair("tiny rmsnorm 1 x 2048 bfloat16", 0, lambda k: rms.forward(x, w, y=y, stream=stream()),
             lambda t: F.rms_norm(t, (n,), w, 1e-5), lambda k: (x,), calls),
        pair("tiny silu 2048 bfloat16", 0,
             lambda k: ewise.forward(silu, [], [x], y=y, stream=stream()), F.silu, lambda k: (x,),
             calls),
        pair("tiny softmax 1 x 2048 bfloat16", 0,
             lambda k: softmax.forward(x, y=y, stream=stream()),
             lambda t: torch.softmax(t, -1), lambda k: (x,), calls),
    ]  # fmt: skip


def makers() -> list[Maker]:
    half, single = torch.bfloat16, torch.float32
    out: list[Maker] = [("ewise", lambda d=d: ewise_cases(d)) for d in (half, single)]
    out += [("norm", lambda n=n: norm_cases(half, n)) for n in (768, 2048, 4096, 8192)]
    out += [("norm", lambda: norm_cases(single, 1024))]
    out += [("softmax", lambda n=n: softmax_cases(half, n)) for n in (512, 2048, 8192)]
    out += [("softmax", lambda: softmax_cases(single, 1024))]
    out += [("cross_entropy", lambda: [cross_entropy_case(2048, 128256)]), ("tiny", tiny_cases)]
    return out + cuda_move_cases.makers()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--only", default="", help="groups of cases, by commas: ewise,norm,...")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    a, b = (rows(4096, torch.bfloat16) for _ in range(2))
    probe = graph_of(lambda k: b[k].copy_(a[k]), SETS)
    cases: list[Case] = []
    for group, make in makers():
        if options.only and group not in options.only.split(","):
            continue
        for case in make():
            with torch.set_grad_enabled(case.name.startswith("cross")):
                measure(case, probe, options.rounds)
            print(case.name, {k: round(v, 3) for k, v in case.result.items()}, flush=True)
            cases.append(case)
            case.ours = case.eager = case.compiled = lambda k: None  # frees the buffers
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    bandwidth = statistics.median(2 * 64 * MIB / c.result["probe"] for c in cases) / 1e6
    text = f"{machine}; copy probe {bandwidth:.2f} TB/s\n\n{table(cases)}\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.png:
        plot(cases, f"{machine}; copy probe {bandwidth:.2f} TB/s", options.png)
    if options.json:
        options.json.write_text(json.dumps({c.name: c.result for c in cases}, indent=1))


if __name__ == "__main__":
    main()
