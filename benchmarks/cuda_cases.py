"""Cases of operator modules in CUDA graphs, interleaved: what cuda_ops.py measures with."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

MIB = 1 << 20
SETS = 6


def module(name: str) -> ModuleType:
    try:
        return import_module(f"rm_abstract.ops._ops_{name}")
    except ModuleNotFoundError:
        return import_module(f"_ops_{name}")  # a standalone build on PYTHONPATH


@dataclass
class Case:
    name: str
    bytes: int
    ours: Callable[[int], object]
    eager: Callable[[int], object]
    calls: int = SETS
    compiled: Callable[[int], object] | None = None
    result: dict[str, float] = field(default_factory=dict)


Maker = tuple[str, Callable[[], list[Case]]]  # of a group, for --only


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def graph_of(run: Callable[[int], object], calls: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for k in range(min(3, calls)):
            run(k)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in range(calls):
            run(k)
    return graph


def time_graph(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Microseconds a call."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1000 / calls


def measure(case: Case, probe: torch.cuda.CUDAGraph, rounds: int) -> None:
    variants = {"ours": case.ours, "eager": case.eager}
    variants |= {"compile": case.compiled} if case.compiled else {}
    graphs = {name: graph_of(run, case.calls) for name, run in variants.items()}
    samples: dict[str, list[float]] = {name: [] for name in [*graphs, "probe"]}
    for _ in range(rounds):
        for name, graph in graphs.items():
            # before each: who runs behind another variant finds its data in the L2 cache
            samples["probe"].append(time_graph(probe, SETS))
            samples[name].append(time_graph(graph, case.calls))
    case.result = {name: statistics.median(values) for name, values in samples.items()}
    bandwidth = 2 * 64 * MIB / case.result["probe"]
    case.result["of_probe"] = case.bytes / case.result["ours"] / bandwidth


def compiled(fn: Callable[..., object]) -> Callable[..., object]:
    torch._dynamo.reset()
    return torch.compile(fn, dynamic=False)


def pair(
    name: str, moved: int, ours: Callable[[int], object], fn: Callable[..., object],
    arguments: Callable[[int], tuple[object, ...]], calls: int = SETS,
) -> Case:  # fmt: skip
    fast = compiled(fn)
    return Case(
        name, moved, ours, lambda k: fn(*arguments(k)), calls, lambda k: fast(*arguments(k))
    )


def rows(n: int, dtype: torch.dtype, sets: int = SETS) -> list[torch.Tensor]:
    """Tensors of 64 MiB with last axis n."""
    size = torch.empty(0, dtype=dtype).element_size()
    return [torch.randn(64 * MIB // size // n, n, device="cuda").to(dtype) for _ in range(sets)]


def table(cases: list[Case]) -> str:
    lines = ["| case | µs | of probe | eager / ours | compile / ours |", "|---|---|---|---|---|"]
    for case in cases:
        r = case.result
        share = f"{r['of_probe']:.2f}" if case.bytes else "-"
        versus = [
            f"{r[name] / r['ours']:.2f}" if name in r else "-" for name in ("eager", "compile")
        ]
        lines.append(f"| {case.name} | {r['ours']:.1f} | {share} | {versus[0]} | {versus[1]} |")
    return "\n".join(lines)


def plot(cases: list[Case], title: str, path: Path) -> None:
    """Bars: the share of the copy probe, or for cases that move next to nothing, microseconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    large = [c for c in cases if c.bytes]
    small = [c for c in cases if not c.bytes]
    figure, axes = plt.subplots(
        2, 1, figsize=(10, 2 + 0.22 * len(cases)), constrained_layout=True,
        height_ratios=[max(1, len(large)), max(1, len(small))],
    )  # fmt: skip
    for axis, group, value, label in (
        (axes[0], large, lambda c: c.result["of_probe"], "share of the copy probe's bandwidth"),
        (axes[1], small, lambda c: c.result["ours"], "µs a call in a graph"),
    ):
        names = [c.name for c in group][::-1]
        axis.barh(names, [value(c) for c in group][::-1], color="tab:blue")
        axis.axvline(0.88 if group is large else 2.5, color="tab:red", linewidth=1)
        axis.set_xlabel(label)
        axis.tick_params(axis="y", labelsize=7)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
