"""``rm.compile_parallel_step`` on GPUs: two processes train one model as one process with the whole
batch does. By NCCL with a GPU each, and by Gloo on one GPU."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
rm = pytest.importorskip("rm_abstract")

import torch.distributed as dist  # noqa: E402 # torch is there from here on
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from rm_abstract.training import average  # noqa: E402

pytestmark = pytest.mark.cuda

_SIZE, _STEPS = 2, 12
average.FIRST_BUCKET_BYTES, average.BUCKET_BYTES = 20_000, 40_000  # several of them


def _start(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    layers = [nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(64, 5)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _batch(i: int) -> tuple[Any, Any]:
    g = torch.Generator().manual_seed(i)
    x, y = torch.randn(16, 32, generator=g), torch.randint(0, 5, (16,), generator=g)
    return x.cuda(), y.cuda()


def _worker(rank: int, folder: Path, backend: str, how: dict[str, Any]) -> None:
    torch.cuda.set_device(rank if backend == "nccl" else 0)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=_SIZE,
        timeout=datetime.timedelta(minutes=2),
    )
    model, optimizer = _start(rank)  # the second begins with the first one's
    step = rm.compile_parallel_step(model, F.cross_entropy, optimizer, **how)
    losses = []
    for i in range(_STEPS):
        x, y = (t.chunk(_SIZE)[rank] for t in _batch(i))
        losses.append(step(x, y))
    state = {name: t.cpu() for name, t in model.state_dict().items()}
    report = step.report()
    torch.save((state, [float(v) for v in losses], report), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_two_processes_are_one_with_the_whole_batch(
    tmp_path: Path, backend: str, clip: float | None
) -> None:
    if backend == "nccl" and torch.cuda.device_count() < _SIZE:
        pytest.skip("one GPU")
    command = [sys.executable, "-W", "ignore", __file__]
    loopback = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen([*command, str(rank), str(tmp_path), backend, str(clip)], env=loopback)
        for rank in range(_SIZE)
    ]
    try:
        assert [w.wait(150) for w in workers] == [0, 0]
    finally:
        for w in workers:
            w.kill()
            w.wait()
    (first, losses, report), (second, others, other) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(_SIZE)
    )
    for each in (report, other):
        assert each["whole"]["compiled"] == _STEPS - 2, each
        kernels = each["whole"]["programs"][0]["kernels"]
        assert kernels["torch/all_reduce_start_torch"] > 1
        assert each["whole"]["programs"][0]["recordings"] >= 1  # in parts around them
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    model, optimizer = _start(0)
    for i in range(_STEPS):
        x, y = _batch(i)
        optimizer.zero_grad()
        halves = [
            F.cross_entropy(model(h), t)
            for h, t in zip(x.chunk(_SIZE), y.chunk(_SIZE), strict=True)
        ]
        (sum(halves) / _SIZE).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        for mine, half in zip((losses[i], others[i]), halves, strict=True):
            assert mine == pytest.approx(float(half.detach()), rel=1e-3), i
    for name, value in model.state_dict().items():
        torch.testing.assert_close(first[name], value.cpu(), rtol=2e-3, atol=1e-4)


if __name__ == "__main__":
    _clip = None if sys.argv[4] == "None" else float(sys.argv[4])
    _worker(
        int(sys.argv[1]),
        Path(sys.argv[2]),
        sys.argv[3],
        {"clip_norm": _clip, "options": {"fallback": "error"}},
    )
