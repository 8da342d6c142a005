"""Convolutions of ResNet-50 and a depthwise one against torch (cuDNN), channels last, bfloat16.

    python benchmarks/cuda_conv.py [--markdown FILE] [--rounds N] [--batches 1,32]

Every variant runs in a CUDA graph over several sets of buffers; variants take turns, the median of
the rounds counts. "fused": convolution, bias and relu; ours in one launch, torch's as it runs them.
cuDNN picks its algorithm by timing (cudnn.benchmark).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cuda_cases import graph_of, module, stream, time_graph

F = torch.nn.functional
# channels, size, output channels, taps, stride, groups
LAYERS = (
    (3, 224, 64, 7, 2, 1),
    (64, 56, 64, 1, 1, 1),
    (64, 56, 64, 3, 1, 1),
    (64, 56, 256, 1, 1, 1),
    (256, 56, 64, 1, 1, 1),
    (256, 56, 128, 1, 1, 1),
    (128, 56, 128, 3, 2, 1),
    (256, 56, 512, 1, 2, 1),
    (128, 28, 128, 3, 1, 1),
    (512, 28, 128, 1, 1, 1),
    (256, 14, 256, 3, 1, 1),
    (1024, 14, 256, 1, 1, 1),
    (256, 14, 1024, 1, 1, 1),
    (512, 7, 512, 3, 1, 1),
    (2048, 7, 512, 1, 1, 1),
    (512, 7, 2048, 1, 1, 1),
    (256, 28, 256, 3, 1, 256),
)


def rounds_of(
    variants: dict[str, Callable[[int], object]], rounds: int, sets: int
) -> dict[str, float]:
    graphs = {name: graph_of(run, sets) for name, run in variants.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            samples[name].append(time_graph(graph, sets))
    return {name: statistics.median(values) for name, values in samples.items()}


def layer(n: int, shape: tuple[int, ...], rounds: int) -> str:
    c, size, o, k, s, groups = shape
    m, sets, last, half = module("conv2d"), 8, torch.channels_last, torch.bfloat16
    pad = k // 2
    options: dict[str, Any] = {"stride": (s, s), "padding": (pad, pad), "groups": groups}

    def image(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, device="cuda").to(half).to(memory_format=last)

    x = [image(n, c, size, size) for _ in range(sets)]
    w = (torch.randn(o, c // groups, k, k, device="cuda") / (c * k * k) ** 0.5).to(half)
    w = w.to(memory_format=last)
    b = torch.randn(o, device="cuda").to(half)
    y = [F.conv2d(t, w, b, s, pad, 1, groups) for t in x]
    dy = [torch.randn_like(t) for t in y]
    dx, dw, db = [torch.empty_like(t) for t in x], torch.empty_like(w), torch.empty_like(b)
    room = torch.empty(m.workspace(x[0], w, y=y[0], **options), dtype=torch.uint8, device="cuda")
    back = torch.empty(
        m.backward_workspace(dy[0], x[0], w, **options), dtype=torch.uint8, device="cuda"
    )

    def theirs(i: int, mask: list[bool]) -> object:
        return torch.ops.aten.convolution_backward(
            dy[i], x[i], w, [o], [s, s], [pad, pad], [1, 1], False, [0, 0], groups, mask
        )

    def ours(i: int, **gradients: torch.Tensor) -> None:
        m.backward(dy[i], x[i], w, workspace=back, stream=stream(), **gradients, **options)

    r = rounds_of({
        "ours": lambda i: m.forward(x[i], w, y=y[i], workspace=room, stream=stream(), **options),
        "fused": lambda i: m.forward(x[i], w, b, y=y[i], workspace=room, stream=stream(),
                                     activation="relu", **options),
        "torch": lambda i: F.conv2d(x[i], w, None, s, pad, 1, groups),
        "torch_fused": lambda i: F.relu_(F.conv2d(x[i], w, b, s, pad, 1, groups)),
        "dx": lambda i: ours(i, dx=dx[i]), "torch_dx": lambda i: theirs(i, [True, False, False]),
        "dw": lambda i: ours(i, dw=dw), "torch_dw": lambda i: theirs(i, [False, True, False]),
        "db": lambda i: ours(i, dbias=db), "torch_db": lambda i: theirs(i, [False, False, True]),
    }, rounds, sets)  # fmt: skip
    tera = 2 * y[0].numel() * c // groups * k * k / 1e6 / r["ours"]
    name = f"{c} x {size}² → {o}, {k} x {k}" + (f" / {s}" if s > 1 else "")
    name += f", {groups} groups" if groups > 1 else ""
    parts = [f"{r[v]:.1f} ({r['torch_' + v] / r[v]:.2f})" for v in ("fused", "dx", "dw", "db")]
    return (f"| {n} | {name} | {r['ours']:.1f} ({r['torch'] / r['ours']:.2f}) | {tera:.0f} | "
            + " | ".join(parts) + " |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", default="1,32")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    text = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN "
        f"{torch.backends.cudnn.version()}; µs (torch / ours: above 1, ours is faster)\n\n"
        "| batch | layer | ours | TFLOP/s | bias + relu | dx | dw | dbias |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    print(text, end="", flush=True)
    for n in map(int, options.batches.split(",")):
        for shape in LAYERS:
            row = layer(n, shape, options.rounds) + "\n"
            text += row
            print(row, end="", flush=True)
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
