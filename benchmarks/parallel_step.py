"""Data parallel training steps: compile_parallel_step beside torch's DistributedDataParallel.

    torchrun --nproc-per-node 2 benchmarks/parallel_step.py [--width 1024] [--layers 4] [--rows 64]

NCCL with a GPU a process where there are as many, else Gloo on the CPU. All variants train copies
of one MLP with Adam (torch's fused on a GPU) on the same batches, in turns; a figure is the median
of the rounds' times of a step on the first process, with one synchronisation behind a round.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rm_abstract as rm


def variants(model: nn.Module, device: str) -> dict[str, Callable[[Any, Any], Any]]:
    def adam(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(m.parameters(), lr=1e-4, fused=device == "cuda")

    ours = copy.deepcopy(model)
    step = rm.compile_parallel_step(
        ours, F.cross_entropy, torch.optim.Adam(ours.parameters(), lr=1e-4)
    )
    found: dict[str, Callable[[Any, Any], Any]] = {"ours": step}
    for name in ("eager", "compiled"):
        held = copy.deepcopy(model)
        optimizer = adam(held)
        wrapped: Any = DistributedDataParallel(held)
        wrapped = torch.compile(wrapped) if name == "compiled" else wrapped

        def torchs(x: Any, y: Any, m: Any = wrapped, o: Any = optimizer) -> Any:
            o.zero_grad()
            loss = F.cross_entropy(m(x), y)
            loss.backward()
            o.step()
            return loss

        found[f"DDP {name}"] = torchs
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= size else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(given.layers):
        layers += [nn.Linear(given.width, given.width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(given.width, 10)).to(device)
    torch.manual_seed(rank)
    x = torch.randn(given.rows, given.width, device=device)
    y = torch.randint(0, 10, (given.rows,), device=device)
    runs = variants(model, device)

    def round_of(run: Callable[[Any, Any], Any], count: int) -> float:
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            run(x, y)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count * 1e6

    for run in runs.values():
        round_of(run, 12)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(given.rounds):
        for name, run in runs.items():
            times[name].append(round_of(run, given.steps))
    if rank == 0:
        whole = runs["ours"].report()["whole"]  # type: ignore[attr-defined]
        print(f"{size} processes, {device}; {whole['compiled']} steps as one program")
        for name, found in times.items():
            print(f"{name:14} {statistics.median(found):10.1f} µs a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
