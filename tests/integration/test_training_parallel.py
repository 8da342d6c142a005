"""Two processes train one model over Gloo: parameters are those of one process on whole batches."""

from __future__ import annotations

import copy
import datetime
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm
from rm_abstract.base import config
from rm_abstract.training.parallel import ParallelStep

_SIZE, _STEPS = 2, 5


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16))
        self.head, self.other = nn.Linear(16, 5), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, way: int = 0) -> torch.Tensor:
        x = self.body(x)
        return self.other(x) if way else self.head(x)


def _start(seed: int) -> tuple[_Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = _Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randn(8, 6, generator=g), torch.randint(0, 5, (8,), generator=g)


def _join(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=_SIZE,
        timeout=datetime.timedelta(minutes=5),
    )


def _worker(rank: int, folder: Path, way_of_second: int) -> None:
    """One process: its half of every batch. Writes parameters, losses and counts."""
    _join(rank, folder)
    model, optimizer = _start(rank)  # the second begins with the first one's
    step = rm.compile_parallel_step(
        model, F.cross_entropy, optimizer, clip_norm=0.7, options={"fallback": "error"}
    )
    losses = []
    for i in range(_STEPS):
        x, y = (t.chunk(_SIZE)[rank] for t in _batch(i))
        losses.append(float(step((x, way_of_second * rank), y)))
    norm = float(step.grad_norm)
    torch.save((model.state_dict(), losses, norm, step.report()), folder / f"{rank}.pt")
    dist.destroy_process_group()


def _mixed(rank: int, folder: Path) -> None:
    """Half precision: two micro-batches a step in bf16, then fp16 with one infinite batch."""
    _join(rank, folder)
    model, optimizer = _start(rank)
    step = rm.compile_parallel_step(
        model,
        F.cross_entropy,
        optimizer,
        clip_value=0.05,
        precision="bf16",
        accumulate=2,
        options={"fallback": "error"},
    )
    for i in range(2 * _STEPS):
        x, y = (t.chunk(_SIZE)[rank] for t in _batch(i))
        step(x, y)
        assert step.accumulated == (i + 1) % 2
    trained = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = rm.compile_parallel_step(
        model, F.cross_entropy, optimizer, precision="fp16", scaler=scaler, clip_norm=0.5
    )
    seen = []
    for i in range(4):
        x, y = (t.chunk(_SIZE)[rank] for t in _batch(i))
        if i == 2 and rank == 1:
            x = x * math.inf  # in one process alone
        before = copy.deepcopy(model.state_dict())
        step(x, y)
        same = all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        seen.append((same, scaler.get_scale()))
    torch.save((trained, model.state_dict(), seen, step.report()), folder / f"{rank}.pt")
    dist.destroy_process_group()


def _run(folder: Path, way: int | str) -> list[Any]:
    command = [sys.executable, "-W", "ignore", __file__]
    loopback = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen([*command, str(rank), str(folder), str(way)], env=loopback)
        for rank in range(_SIZE)
    ]
    try:
        assert [w.wait(300) for w in workers] == [0, 0]
    finally:
        for w in workers:
            w.kill()
            w.wait()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(_SIZE)]


@pytest.mark.parametrize("way_of_second", [0, 1], ids=["alike", "another head each"])
def test_two_processes_are_one_with_the_whole_batch(tmp_path: Path, way_of_second: int) -> None:
    (first, losses, norm, report), (second, others, _, _) = _run(tmp_path, way_of_second)
    assert report["compiled"] == _STEPS - 1 and report["eager"] == 1
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    model, optimizer = _start(0)
    for i in range(_STEPS):
        x, y = _batch(i)
        optimizer.zero_grad()
        halves = [
            F.cross_entropy(model(h, way_of_second * r), t)
            for r, (h, t) in enumerate(zip(x.chunk(_SIZE), y.chunk(_SIZE), strict=True))
        ]
        (sum(halves) / _SIZE).backward()
        wanted = nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        for mine, half in zip((losses[i], others[i]), halves, strict=True):
            assert mine == pytest.approx(float(half.detach()), rel=1e-4)
    assert norm == pytest.approx(float(wanted), rel=1e-3)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(first[name], value, rtol=1e-3, atol=1e-5)


def test_half_precision_scaling_and_accumulation(tmp_path: Path) -> None:
    (trained, first, seen, report), (others, second, also, _) = _run(tmp_path, "mixed")
    assert all(torch.equal(v, others[k]) for k, v in trained.items())
    assert all(torch.equal(v, second[k]) for k, v in first.items())
    # Both processes skip the step that was infinite in one, and halve their scale.
    assert seen == also == [(False, 1024.0), (False, 1024.0), (True, 512.0), (False, 512.0)]
    assert report["compiled"] > 0
    model, optimizer = _start(0)
    for i in range(_STEPS):
        optimizer.zero_grad()
        for j in (2 * i, 2 * i + 1):
            for x, y in zip(*(t.chunk(_SIZE) for t in _batch(j)), strict=True):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = F.cross_entropy(model(x), y)
                (loss / (2 * _SIZE)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
    start = _start(0)[0].state_dict()
    for name, value in model.state_dict().items():
        moved = float((value - start[name]).norm())
        assert float((trained[name] - value).norm()) <= 0.1 * moved + 1e-6, name


def test_options_that_exclude_each_other_are_refused() -> None:
    model, optimizer = _start(0)
    for wrong in ({"clip_norm": 1.0, "clip_value": 1.0}, {"accumulate": 0}):
        with pytest.raises(ValueError, match="compile_parallel_step"):
            ParallelStep(model, F.cross_entropy, optimizer, config.resolve({}), None, **wrong)


def test_without_a_group_there_is_an_error_that_says_what_to_do() -> None:
    model, optimizer = _start(0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(rm.Error, match="init_process_group"):
        rm.compile_parallel_step(model, F.cross_entropy, optimizer)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


if __name__ == "__main__":
    if sys.argv[3] == "mixed":
        _mixed(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        _worker(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
