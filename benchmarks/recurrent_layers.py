"""Recurrent layers of torch, compiled and eager in turns.

`python benchmarks/recurrent_layers.py [THREADS]` prints a line a layer and element type: the best
call of each side over interleaved rounds, their ratio, and the largest difference of the outputs.
Weights and inputs are random.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import rm_abstract as rm

ROUNDS, CALLS = 4, 7
LAYERS: list[tuple[str, Callable[[], nn.Module], tuple[int, int, int]]] = [
    (
        "LSTM 128 to 256, 2 layers, bidirectional",
        lambda: nn.LSTM(128, 256, 2, bidirectional=True, batch_first=True),
        (1, 64, 128),
    ),
    ("LSTM 256 to 512", lambda: nn.LSTM(256, 512, batch_first=True), (1, 32, 256)),
    ("LSTM 128 to 128", lambda: nn.LSTM(128, 128, batch_first=True), (8, 50, 128)),
    ("LSTM 128 to 256", lambda: nn.LSTM(128, 256, batch_first=True), (32, 50, 128)),
    ("GRU 128 to 256", lambda: nn.GRU(128, 256, batch_first=True), (1, 64, 128)),
    ("GRU 128 to 256", lambda: nn.GRU(128, 256, batch_first=True), (8, 64, 128)),
    ("RNN 128 to 256", lambda: nn.RNN(128, 256, batch_first=True), (1, 64, 128)),
    ("LSTM 32 to 32", lambda: nn.LSTM(32, 32, batch_first=True), (1, 1, 32)),
]


def best(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of some calls."""
    taken = []
    for _ in range(CALLS):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return min(taken)


def measure(name: str, module: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        with rm.disabled():
            expected = module(x)[0]
        rm.accelerate(module)
        for _ in range(3):  # the first one compiles
            given = module(x)[0]
        eager, ours = [], []
        for _ in range(ROUNDS):
            with rm.disabled():
                eager.append(best(lambda: module(x)))
            ours.append(best(lambda: module(x)))
    if not rm.explain(module).routed:
        raise SystemExit(f"{name}: not served: {rm.explain(module)}")
    off = float((given - expected).abs().max())
    sizes = f"{x.shape[0]} x {x.shape[1]} steps"
    print(
        f"{name}, {sizes}, {str(x.dtype)[6:]}: eager {min(eager) * 1e3:.3f} ms, ours "
        f"{min(ours) * 1e3:.3f} ms, {min(eager) / min(ours):.2f} times, off by {off:.1e}",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    torch.manual_seed(0)
    rm.init("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, build, shape in LAYERS:
            for dtype in (torch.float32, torch.bfloat16):
                measure(name, build().eval().to(dtype), torch.randn(shape).to(dtype))


if __name__ == "__main__":
    main()
