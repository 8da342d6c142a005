"""Two processes train one model over Gloo: parameters are those of one process on whole batches."""

from __future__ import annotations

import contextlib
import copy
import datetime
import math
import os
import signal
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
from rm_abstract.training import average, check
from rm_abstract.training.parallel import ParallelStep

_SIZE, _STEPS = 2, 7
average.FIRST_BUCKET_BYTES, average.BUCKET_BYTES = 200, 600  # four of them


class _Model(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16))
        self.heads = nn.ModuleList(nn.Linear(16, 5) for _ in range(heads))

    def forward(self, x: torch.Tensor, way: int = 0) -> torch.Tensor:
        x = self.body(x)
        return self.heads[way](x)


def _start(seed: int, heads: int = 1) -> tuple[_Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = _Model(heads)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randn(8, 6, generator=g), torch.randint(0, 5, (8,), generator=g)


def _join(rank: int, folder: Path, minutes: float = 5) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=_SIZE,
        timeout=datetime.timedelta(minutes=minutes),
    )


def _worker(rank: int, folder: Path, heads: int) -> None:
    """One process: its half of every batch. Writes parameters, losses and counts. Of three heads
    each process uses one, and nobody the third."""
    _join(rank, folder)
    model, optimizer = _start(rank, heads)  # the second begins with the first one's
    step = rm.compile_parallel_step(
        model, F.cross_entropy, optimizer, clip_norm=0.7, options={"fallback": "error"}
    )
    losses = []
    for i in range(_STEPS):
        x, y = (t.chunk(_SIZE)[rank] for t in _batch(i))
        losses.append(float(step((x, rank if heads > 1 else 0), y)))
    norm = float(step.grad_norm)
    torch.save((model.state_dict(), losses, norm, step.report()), folder / f"{rank}.pt")
    dist.destroy_process_group()


def _apart(rank: int, folder: Path) -> None:
    """One process makes some steps in another way than the other: what they send fits together."""
    _join(rank, folder)
    model, optimizer = _start(rank)
    real = check.gradients_differ
    if rank == 0:  # its comparison fails: no program of the whole step there
        check.gradients_differ = lambda *a: (
            "made up" if sys._getframe(1).f_code.co_name == "_compare" else real(*a)
        )
    step = rm.compile_parallel_step(model, F.cross_entropy, optimizer, clip_norm=0.7)
    losses = []
    for i in range(_STEPS):
        x, y = (t.chunk(_SIZE)[rank] for t in _batch(i))
        with rm.disabled() if rank == 1 and i == 3 else contextlib.nullcontext():
            losses.append(float(step(x, y)))
    norm = float(step.grad_norm)
    torch.save((model.state_dict(), losses, norm, step.report()), folder / f"{rank}.pt")
    dist.destroy_process_group()


def _killed(rank: int, folder: Path) -> None:
    """The second process ends while the first waits for its gradients."""
    _join(rank, folder, 0.5)
    model, optimizer = _start(rank)
    step = rm.compile_parallel_step(model, F.cross_entropy, optimizer)
    for i in range(_STEPS):
        x, y = (t.chunk(_SIZE)[rank] for t in _batch(i))
        step(x, y)
    before = copy.deepcopy(model.state_dict())
    if rank == 1:
        with pytest.raises(IndexError):
            step(x, y + 7)  # no such class: nothing was sent, and the step may be made again
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        os._exit(0)
    with pytest.raises(rm.Error, match="gradients of every process"):
        step(x, y)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    torch.save(step.report(), folder / "0.pt")
    os._exit(0)


class _Interrupted:
    """A collective whose first wait ends with Ctrl-C."""

    def __init__(self, work: Any) -> None:
        self._work, self._left = work, 1

    def wait(self) -> None:
        self._work.wait()
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def _interrupted(rank: int, folder: Path) -> None:
    """One process gets Ctrl-C while it waits for the other, in a step of eager's and in one of the
    program's."""
    _join(rank, folder)
    model, optimizer = _start(rank)
    step = rm.compile_parallel_step(model, F.cross_entropy, optimizer)
    plain, seen = dist.all_reduce, []
    for i in range(_STEPS):
        x, y = (t.chunk(_SIZE)[rank] for t in _batch(i))
        if rank == 0 and i in (0, 4):
            dist.all_reduce = lambda *a, **k: _Interrupted(plain(*a, **k))
        try:
            step(x, y)
        except KeyboardInterrupt:
            seen.append(i)
        dist.all_reduce = plain
    torch.save((model.state_dict(), seen, step.report()), folder / f"{rank}.pt")
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


def _run(folder: Path, way: int | str, files: int = _SIZE) -> list[Any]:
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
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(files)]


# By name: what the processes do, and how many of their steps had the averages in their program.
_WAYS: dict[str, tuple[int | str, tuple[int, int]]] = {
    "alike": (1, (_STEPS - 2, _STEPS - 2)),
    "another head each": (3, (0, 0)),
    "one apart": ("apart", (0, _STEPS - 3)),
}


@pytest.mark.parametrize("name", _WAYS)
def test_two_processes_are_one_with_the_whole_batch(tmp_path: Path, name: str) -> None:
    way, whole = _WAYS[name]
    heads = 3 if way == 3 else 1
    (first, losses, norm, report), (second, others, _, other) = _run(tmp_path, way)
    assert (report["whole"]["compiled"], other["whole"]["compiled"]) == whole
    assert report["compiled"] >= _STEPS - 5 and report["compiled"] + report["eager"] == _STEPS
    for key, value in first.items():
        if name == "one apart":  # torch's update and the program's, of the same averages
            torch.testing.assert_close(value, second[key], rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(value, second[key]), key
    model, optimizer = _start(0, heads)
    for i in range(_STEPS):
        x, y = _batch(i)
        optimizer.zero_grad()
        halves = [
            F.cross_entropy(model(h, r if heads > 1 else 0), t)
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


def test_a_process_that_ends_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    (report,) = _run(tmp_path, "killed", 1)
    assert report["whole"]["compiled"] == _STEPS - 2


def test_an_interrupt_while_others_are_waited_for_comes_behind_the_step(tmp_path: Path) -> None:
    (ours, seen, report), (theirs, nothing, _) = _run(tmp_path, "interrupted")
    assert seen == [0, 4] and nothing == []
    assert report["whole"]["compiled"] == _STEPS - 2
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


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
    kinds = {"mixed": _mixed, "apart": _apart, "killed": _killed, "interrupted": _interrupted}
    if sys.argv[3] in kinds:
        kinds[sys.argv[3]](int(sys.argv[1]), Path(sys.argv[2]))
    else:
        _worker(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
