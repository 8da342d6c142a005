"""Checkpoints of the small framework: whole or not there, loaded all or none."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rm_abstract as rm
from rm_abstract import functional as F
from rm_abstract import nn, optim


def _start() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, optim.AdamW(model.parameters(), lr=0.01)


def _train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for i in steps:
        g = torch.Generator().manual_seed(i)
        x = rm.Tensor(torch.randn(6, 4, generator=g))
        y = rm.Tensor(torch.randint(0, 3, (6,), generator=g))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    model, optimizer = _start()
    _train(model, optimizer, range(5))
    optimizer.lr = 0.003
    file = tmp_path / "checkpoint.safetensors"
    nn.save(file, model=model, optimizer=optimizer)
    wanted = _train(model, optimizer, range(5, 10))
    again, other = _start()
    nn.load(file, model=again, optimizer=other)
    assert other.steps == 5 and other.lr == 0.003
    assert _train(again, other, range(5, 10)) == wanted
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = _start()
    _train(model, optimizer, range(2))
    file = tmp_path / "checkpoint.safetensors"
    wide = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    nn.save(file, model=model, optimizer=optim.SGD(wide.parameters(), lr=0.1))
    before = {n: t.clone() for n, t in (model.state_dict() | optimizer.state_dict()).items()}
    for parts in ({"model": model}, {"model": model, "optimizer": optimizer}):
        with pytest.raises(ValueError, match="load"):
            nn.load(file, **parts)
    bad = optimizer.state_dict()
    bad["3.exp_avg"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"3\.exp_avg"):
        optimizer.load_state_dict(bad)
    for name, value in (model.state_dict() | optimizer.state_dict()).items():
        assert torch.equal(value, before[name])


def test_a_disk_that_refuses_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = _start()
    file = tmp_path / "checkpoint.safetensors"
    nn.save(file, model=model, optimizer=optimizer)
    old = file.read_bytes()
    _train(model, optimizer, range(1))

    def refuse(number: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="no space"):
        nn.save(file, model=model, optimizer=optimizer)
    assert file.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


_WRITER = """
import sys, torch
from rm_abstract import nn
class Held(nn.Module):
    def __init__(self):
        self.parts = [nn.Linear(256, 256) for _ in range(8)]
model = Held()
for i in range(1, 100000):
    for t in model.state_dict().values():
        t.fill_(i)
    nn.save(sys.argv[1], model=model)
    print(i, flush=True)
"""


def test_a_killed_process_loses_no_checkpoint_that_was_reported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    file = tmp_path / "checkpoint.safetensors"
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(file)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for _ in range(20):  # in the middle of the next ones
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        reported = 20 + len(writer.stdout.readlines())
    held = load_file(file)
    numbers = {float(v) for t in held.values() for v in (t.min(), t.max())}
    assert len(held) == 16 and len(numbers) == 1, "a file of two checkpoints"
    assert numbers.pop() >= reported
