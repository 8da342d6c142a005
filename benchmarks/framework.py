"""The small framework: what one operator costs, and steps of a small MLP, eager and recorded.

    python benchmarks/framework.py [cpu|cuda] [--rounds 7]

Times are the host's with one synchronisation behind many calls, medians of rounds, in µs; all
variants take turns. Beside them PyTorch's own eager `add` and step on the same device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import rm_abstract as rm
from rm_abstract import functional as F
from rm_abstract import nn, optim
from rm_abstract.framework.tensor import executor


def steps(device: str) -> dict[str, Callable[[], Any]]:
    """One training step of 64-128-10 with Adam on 64 rows, each of its own model."""
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))

    def ours(whole: bool) -> Callable[[], Any]:
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = optim.Adam(net.parameters(), lr=1e-3)

        def step(a: Any, b: Any) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            optimizer.step()
            return loss

        run, a, b = rm.record(step) if whole else step, rm.Tensor(x), rm.Tensor(y)
        return lambda: run(a, b)

    layers = (torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model = torch.nn.Sequential(*layers).to(device)
    theirs = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    a, b = x.to(device), y.to(device)

    def torchs() -> None:
        theirs.zero_grad()
        torch.nn.functional.cross_entropy(model(a), b).backward()
        theirs.step()

    return {"step eager": ours(False), "step recorded": ours(True), "step of torch": torchs}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", nargs="?", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    rm.use_backend(given.backend)
    torch.manual_seed(0)
    small = torch.randn(8, 8, device=given.backend)
    by, pair = executor(), (small, small)
    runs: dict[str, Callable[[], Any]] = {
        "op_call add": lambda: by.op_call("add", pair),
        "add of torch": lambda: torch.add(*pair),
        **steps(given.backend),
    }

    def wait() -> None:
        if given.backend != "cpu":
            torch.cuda.synchronize()

    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(20):
            run()
    for _ in range(given.rounds):
        for name, run in runs.items():
            wait()
            start = time.perf_counter()
            for _ in range(200):
                run()
            wait()
            times[name].append((time.perf_counter() - start) / 200 * 1e6)
    for name, found in times.items():
        print(f"{name:16} {statistics.median(found):9.2f} µs")


if __name__ == "__main__":
    main()
