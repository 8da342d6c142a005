"""Every row of every module on random hostile problems, in guard bytes, on streams, in graphs.

Values against float64 and every byte that is no result against what it was. RM_HEAVY=1 runs ten
times as many problems; RM_SEED repeats a run, and each problem's number is in a failure's message.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType

import hostile_experts
import hostile_plans
import hostile_products
import hostile_rows
import pytest
import torch
from arena import Arena
from hostile import Maker, Problem
from plugged import Plugged, Unsupported

pytestmark = pytest.mark.cuda
TIMES = 10 if os.environ.get("RM_HEAVY") == "1" else 1
KINDS = {
    **{name: (getattr(hostile_rows, name), 60) for name in
       ("softmax", "layernorm", "rmsnorm", "cross_entropy", "copy", "rope", "kv_append",
        "embedding", "reduction", "ewise", "sampling", "optim")},
    **{name: (getattr(hostile_products, name), 80) for name in ("gemm", "gemv", "sdpa", "conv2d")},
}  # fmt: skip
# what only plans ask for, by the operators of docs/operators.md: no row has to take all of it
PLANNED = {
    "gemm": hostile_plans.small_gemm, "gemm_ewise": hostile_plans.gemm_ewise,
    "slopes": hostile_plans.slopes, "small_steps": hostile_plans.small_steps,
    "uniform": hostile_plans.uniform, "scatter": hostile_plans.scatter,
    "adams": hostile_plans.adams, "linears": hostile_plans.linears,
    "quant_linears": hostile_plans.quant_linears, "append_sdpa": hostile_plans.append_sdpa,
    "sort": hostile_experts.sort, "grouped_gemm": hostile_experts.grouped_gemm,
}  # fmt: skip


def run_here(p: Problem, kernel: str) -> None:
    p.call(kernel=kernel, stream=torch.cuda.current_stream().cuda_stream)


def run_on_another_stream(p: Problem, kernel: str) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    p.call(kernel=kernel, stream=side.cuda_stream)
    torch.cuda.current_stream().wait_stream(side)


def run_in_a_graph(p: Problem, kernel: str, arena: Arena) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        p.call(kernel=kernel, stream=torch.cuda.current_stream().cuda_stream)
    for _ in range(2):  # the second replay finds its own results
        arena.poison()
        graph.replay()


def run(p: Problem, kernel: str, way: str, arena: Arena) -> None:
    if way == "graph":
        run_in_a_graph(p, kernel, arena)
    elif way == "stream":
        run_on_another_stream(p, kernel)
    else:
        run_here(p, kernel)


def run_rows(
    m: ModuleType | Plugged, p: Problem, make: Maker, how: str, ran: dict[str, int]
) -> None:
    """By every row, into spoilt results; what overwrites its operands once. The last row takes
    every problem."""
    for kernel in ("", *p.rows) if p.repeats else (make.one_of("", *p.rows),):
        way = make.one_of("here", "here", "stream", "graph") if p.repeats else "here"
        here = f"{p.what}, {how}, {kernel or 'chosen'}, {way}"
        if p.repeats:
            make.arena.poison()
        try:
            run(p, kernel, way, make.arena)
        except m.Unsupported as error:
            assert kernel and kernel != p.rows[-1], f"{here}: {error}"
            continue
        except m.InvalidArgument as error:
            raise AssertionError(f"{here}: {error}") from error
        torch.cuda.synchronize()
        wrong = [make.arena.where(at, p.tensors) for at in make.arena.changed()]
        assert wrong == [], f"{here} wrote to {wrong}"
        p.check(f"{how}, {kernel or 'chosen'}, {way}")
        ran[kernel] = ran.get(kernel, 0) + 1


@pytest.mark.parametrize("name", KINDS)
def test_random_problems_are_right_and_write_nothing_else(
    module: Callable[[str], ModuleType], name: str, seed: int
) -> None:
    m, (generate, count), arena = module(name), KINDS[name], Arena()
    ran: dict[str, int] = {}
    for number in range(count * TIMES):
        arena.clear()
        make = Maker(seed * 1000 + number, arena)
        p = generate(make, m)
        arena.freeze()
        run_rows(m, p, make, f"problem {number} of seed {seed}", ran)
    assert ran.get("", 0) >= count * TIMES // 10  # of some operators a third
    assert len(ran) >= 2, "no row but the chosen one ran"
    print(name, ran)


@pytest.mark.parametrize("op", PLANNED)
def test_rows_that_plans_ask_for_are_right_and_write_nothing_else(op: str, seed: int) -> None:
    m, arena, count = Plugged(op), Arena(256 << 20), 60 * TIMES
    ran: dict[str, int] = {}
    refused: list[str] = []
    for number in range(count):
        arena.clear()
        make = Maker(seed * 1000 + number, arena)
        try:
            p = PLANNED[op](make, m)
        except Unsupported as error:
            refused.append(str(error))
            continue
        arena.freeze()
        run_rows(m, p, make, f"problem {number} of seed {seed}", ran)
    m.release()
    assert sum(ran.values()) >= count // 3, refused[:3]
    print(op, ran, "refused", len(refused), refused[:1])


@pytest.mark.parametrize("name", ["gemv", "sdpa"])
def test_overlapping_launches_read_what_the_launch_two_before_wrote(
    module: Callable[[str], ModuleType], name: str
) -> None:
    """A writer, a launch that overlaps it, and the operator with overlap=True behind both."""
    m, ewise = module(name), module("ewise")
    stream, old = torch.cuda.Stream(), 0
    copy_code = [1, 0, 0, -1, -1]
    with torch.cuda.stream(stream):
        handle = stream.cuda_stream
        big = torch.zeros(32 << 20, device="cuda")
        small, other = torch.zeros(2, 2048, device="cuda")
        if name == "gemv":
            target = torch.zeros(2048, 2048, device="cuda").bfloat16()
            x, y = (
                torch.ones(1, 2048, device="cuda").bfloat16(),
                torch.empty(1, 2048, device="cuda").bfloat16(),
            )
        else:
            target = torch.zeros(1, 8, 512, 128, device="cuda").bfloat16()
            x, y = (
                torch.ones(1, 8, 1, 128, device="cuda").bfloat16(),
                torch.empty(1, 8, 1, 128, device="cuda").bfloat16(),
            )
        for step in range(1, 201):
            value = step % 100 + 1
            source = torch.full_like(target, value)
            ewise.forward(copy_code, [], [big], y=big, stream=handle)  # keeps the writer waiting
            ewise.forward(copy_code, [], [source], y=target, stream=handle)
            ewise.forward(copy_code, [], [small], y=other, stream=handle)
            if name == "gemv":
                m.forward(x, target, y=y, overlap=True, stream=handle)
                wanted = float(torch.tensor(2048.0 * value).bfloat16())
            else:
                space = torch.empty(m.workspace(x, target), dtype=torch.uint8, device="cuda")
                m.forward(x, target, target, o=y, overlap=True,
                          workspace=space, stream=handle)  # fmt: skip
                wanted = float(value)
            old += int(not bool((y.float() == wanted).all()))
    assert old == 0, f"{old} of 200 steps read old data"
