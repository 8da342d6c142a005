"""Training steps: compile_step against the best that torch itself offers.

    python benchmarks/train_step.py [--threads 4] [--rounds 15] [--only mlp] [--clock cpu]
    python benchmarks/train_step.py --device gpu [--only mlp]

For each workload all variants train copies of one model on the same batches. First their losses
are compared (the first 100 steps of compile_step against eager), then steps are timed in turns, so
that what else the machine does meets all alike. With --clock cpu the processor time of the process
counts, all threads together: with --threads 1, on a machine that others use, it says more than the
wall's. A figure is the median of the rounds' medians in µs a step; the ratio is to the fastest of
torch's variants in the same run.

With --device gpu everything lies on the first NVIDIA GPU, one batch is timed again and again, and a
figure is the time of a round's steps with one synchronisation behind them, divided by their number.
Torch's variants are then also the whole step as a CUDA graph made by hand, of the eager and of the
compiled model. Memory: what torch's
allocator holds in a step of eager's beside parameters and states, and the arena of the program.

With --memory the GPT is trained without a memory budget, at half of the bytes that eager keeps for
its backward, and at nine twentieths; times alternate in the same way.

With --gpt2 GPT-2 of 124 M parameters (no dropout) trains on 8 rows of 512 tokens in bfloat16 mixed
precision, on the GPU, beside torch's autocast with a fused Adam, eager and compiled; memory is
what a step holds together with parameters and states.

With --vocabulary an embedding of 32,000 words and a head train on 1,024 rows, with logits made as a
whole and by pieces of their rows, beside eager; times alternate in the same way.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm
from rm_abstract.training import program

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.first(x)).split(width, dim=2)
        q, k, v = (p.view(rows, length, self.heads, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self, tokens: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Workload:
    name: str
    model: nn.Module
    batches: list[Batch]
    loss: Loss
    target: float  # against the fastest of torch's variants
    steps: int  # timed in one round

    @property
    def on_gpu(self) -> bool:
        return self.batches[0][0].is_cuda


def mlp(rows: int, target: float) -> Workload:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    batches = [(torch.randn(rows, 256), torch.randint(0, 10, (rows,))) for _ in range(10)]
    return Workload(f"MLP 3x256, batch {rows}", model, batches, F.cross_entropy, target, 100)


def word_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt() -> Workload:
    model = Gpt(tokens=96, width=256, layers=4, heads=8, length=128)
    data = [torch.randint(0, 96, (8, 129)) for _ in range(4)]
    batches = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in data]
    return Workload("GPT 4 layers, d 256, 8x128", model, batches, word_loss, 1.3, 3)


def moved(work: Workload) -> Workload:
    """On the GPU."""
    batches = [(x.cuda(), y.cuda()) for x, y in work.batches]
    return replace(work, model=work.model.cuda(), batches=batches)


def torch_step(work: Workload, how: str) -> Step:
    model = copy.deepcopy(work.model)
    options = {"fused": True} if how == "fused" else {"foreach": True} if how == "foreach" else {}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **options)  # type: ignore[arg-type]
    run = torch.compile(model) if how.startswith("compile") else model
    update = torch.compile(optimizer.step) if how == "compile all" else optimizer.step

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = work.loss(run(x), y)
        loss.backward()
        update()
        return loss.detach()

    return step


def graph_step(work: Workload, compiled: bool) -> Step:
    """The whole step of one batch, recorded as PyTorch's documentation does it."""
    model = copy.deepcopy(work.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True)
    run = torch.compile(model) if compiled else model
    x, y = work.batches[0]

    def once() -> torch.Tensor:
        optimizer.zero_grad()
        loss = work.loss(run(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = once()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        graph.replay()
        return loss

    return step


def worst_difference(work: Workload, ours: Step, steps: int = 100) -> float:
    eager, worst = torch_step(work, "eager"), 0.0
    for i in range(steps):
        batch = work.batches[i % len(work.batches)]
        wanted, got = float(eager(*batch)), float(ours(*batch))
        worst = max(worst, abs(got - wanted) / abs(wanted))
    return worst


def timed(step: Step, work: Workload, clock: Callable[[], float]) -> float:
    """Median microseconds of one round; on a GPU the mean over at least a tenth of a second: a loop
    that trains is long, and the first steps behind another variant's find cold caches."""
    if work.on_gpu:
        torch.cuda.synchronize()
        start, steps = clock(), 0
        while steps == 0 or clock() - start < 0.1:
            for _ in range(work.steps):
                step(*work.batches[0])
            torch.cuda.synchronize()
            steps += work.steps
        return (clock() - start) / steps * 1e6
    took = []
    for i in range(work.steps):
        batch = work.batches[i % len(work.batches)]
        start = clock()
        step(*batch)
        took.append(clock() - start)
    return statistics.median(took) * 1e6


PEERS = ("eager", "foreach", "fused", "compile", "compile all")


def measure(work: Workload, rounds: int, clock: Callable[[], float]) -> str:
    model = copy.deepcopy(work.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ours = rm.compile_step(model, work.loss, optimizer, options={"fallback": "error"})
    worst = worst_difference(work, ours)
    variants: dict[str, Step] = {}
    for name in PEERS:
        variants[name] = torch_step(work, name)
    if work.on_gpu:
        variants["graph"] = graph_step(work, False)
        variants["graph of compiled"] = graph_step(work, True)
    variants["compile_step"] = ours
    for step in variants.values():
        for batch in (work.batches * 3)[:6]:
            step(*batch)
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, step in variants.items():
            found[name].append(timed(step, work, clock))
    medians = {name: statistics.median(times) for name, times in found.items()}
    mine = medians.pop("compile_step")
    best = min(medians, key=medians.__getitem__)
    cells = " | ".join(f"{v:.0f}" for v in medians.values())
    ratio = medians[best] / mine
    row = [
        work.name,
        cells,
        f"{mine:.0f}",
        f"{ratio:.2f} ({best})",
        str(work.target),
        f"{worst:.0e}",
    ]
    text = f"| {' | '.join(row)} |"
    if work.on_gpu:
        report = ours.report()["programs"][0]
        text += f"\n\n{eager_peak(work) / 1e6:.1f} MB eager's peak, "
        text += f"{report['arena_bytes'] / 1e6:.1f} MB the arena; steps of the plan: "
        text += ", ".join(f"{n} {name}" for name, n in sorted(report["kernels"].items())) + "\n"
    return text


def eager_peak(work: Workload) -> int:
    """Bytes that torch's allocator holds at most in a step, beside parameters and states."""
    step = torch_step(work, "fused")
    for _ in range(2):
        step(*work.batches[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(*work.batches[0])
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kept_by_eager(work: Workload) -> int:
    """Bytes of the tensors that autograd saves, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in work.model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t  # held: its address is not used again
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        x, y = work.batches[0]
        work.loss(work.model(x), y)
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def measure_memory(work: Workload, rounds: int, clock: Callable[[], float]) -> None:
    kept = kept_by_eager(work)
    print(f"{work.name}: eager keeps {kept / 1e6:.1f} MB for its backward\n")
    steps = {}
    for budget in (None, kept // 2, kept * 9 // 20):
        model = copy.deepcopy(work.model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        steps[budget] = rm.compile_step(
            model, work.loss, optimizer, memory_budget=budget, options={"fallback": "error"}
        )
    found: dict[int | None, list[float]] = {budget: [] for budget in steps}
    for _ in range(rounds + 1):
        for budget, step in steps.items():
            found[budget].append(timed(step, work, clock))
    print(
        "| budget MB | arena MB | of its lower bound | µs a step | of the first | computed twice |"
    )
    print("|---|---|---|---|---|---|")
    first = statistics.median(found[None][1:])
    for budget, step in steps.items():
        row = step.memory_report()[0]
        twice = ", ".join(f"{r['values']} {r['operator']} {r['type']}" for r in row["recomputed"])
        mine = statistics.median(found[budget][1:])
        print(
            f"| {'none' if budget is None else f'{budget / 1e6:.1f}'} | {row['arena'] / 1e6:.1f} | "
            f"{row['arena'] / row['lower_bound']:.4f} | {mine:.0f} | {mine / first:.2f} | {twice} |"
        )


class Words(nn.Module):
    def __init__(self, words: int = 32_000, width: int = 256) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(ids))).flatten(0, 1)


def measure_vocabulary(rounds: int, clock: Callable[[], float]) -> None:
    batches = [(torch.randint(0, 32_000, (8, 128)), torch.randint(0, 32_000, (1024,)))]
    work = Workload("words", Words(), batches, F.cross_entropy, 1.0, 1)
    steps: dict[str, Step] = {}
    for name, least in (("whole", 1 << 60), ("pieces", program.SPLIT_BYTES)):
        program.SPLIT_BYTES = least
        model = copy.deepcopy(work.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps[name] = rm.compile_step(model, work.loss, optimizer, options={"fallback": "error"})
        for _ in range(2):  # its program is made
            steps[name](*batches[0])
    model = copy.deepcopy(work.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def eager(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = work.loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    steps["eager"] = eager
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            found[name].append(timed(step, work, clock))
    print("| logits | arena MB | µs a step |")
    print("|---|---|---|")
    for name, times in found.items():
        arena = ""
        if name != "eager":
            arena = f"{steps[name].memory_report()[0]['arena'] / 1e6:.1f}"  # type: ignore[attr-defined]
        print(f"| {name} | {arena} | {statistics.median(times):.0f} |")


def measure_gpt2(rounds: int, rows: int = 8, length: int = 512) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    first = GPT2LMHeadModel(config).train().cuda()
    ids = torch.randint(0, config.vocab_size, (rows, length), device="cuda")

    def of_torch(compiled: bool) -> Callable[[], torch.Tensor]:
        model = copy.deepcopy(first)
        run = torch.compile(model) if compiled else model
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss: torch.Tensor = run(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def of_ours() -> tuple[Callable[[], torch.Tensor], Callable[[], dict[str, Any]]]:
        model = copy.deepcopy(first)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        run = rm.compile_step(
            model, None, optimizer, precision="bf16", options={"fallback": "error"}
        )
        return lambda: run({"input_ids": ids, "labels": ids}), run.report

    ours, report = of_ours()
    variants = {"eager": of_torch(False), "compile": of_torch(True), "compile_step": ours}
    losses = {name: [float(step()) for _ in range(6)] for name, step in variants.items()}
    for name, found in losses.items():
        print(f"{name:14} first losses {' '.join(f'{v:.4f}' for v in found)}")
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, step in variants.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(5):
                step()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) / 5 * 1e3)
    for name, found in times.items():
        middle = statistics.median(found)
        print(f"{name:14} {middle:8.2f} ms a step ({min(found):.2f} to {max(found):.2f})")
    held = sum(p.numel() for p in first.parameters()) * 4 * 3  # parameters and two moments
    program = report()["programs"][0]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    variants["eager"]()
    torch.cuda.synchronize()
    eager = torch.cuda.max_memory_allocated() - before
    print(
        f"parameters and states {held / 1e6:.0f} MB; beside them eager {eager / 1e6:.0f} MB, "
        f"ours {program['arena_bytes'] / 1e6:.0f} MB (lower bound "
        f"{program['arena_lower_bound_bytes'] / 1e6:.0f}), together "
        f"{(held + program['arena_bytes']) / (held + eager):.2f} of eager's"
    )
    print(", ".join(f"{n} {name}" for name, n in sorted(program["kernels"].items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--gpt2", action="store_true")
    parser.add_argument("--vocabulary", action="store_true")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    given = parser.parse_args()
    clock = time.perf_counter if given.clock == "wall" else time.process_time
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    if given.memory:
        return measure_memory(gpt(), given.rounds, clock)
    if given.gpt2:
        return measure_gpt2(given.rounds)
    if given.vocabulary:
        return measure_vocabulary(given.rounds, clock)
    gpu = given.device == "gpu"
    names = [*PEERS, *(("graph", "graph of compiled") if gpu else ()), "compile_step"]
    columns = ["workload", *names, "ratio to the best", "goal", "worst loss difference"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    makers: list[Callable[[], Workload]] = [lambda: mlp(8, 3.0), lambda: mlp(64, 1.7)]
    for make in [*makers, gpt]:
        work = moved(make()) if gpu else make()
        if given.only.lower() in work.name.lower():
            print(measure(work, given.rounds, clock), flush=True)


if __name__ == "__main__":
    main()
