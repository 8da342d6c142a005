"""Backends whose device has memory of its own, on a stand-in for a GPU: what programs read lies on
the device, and what the host writes between two steps arrives there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_cases import Net, make_step

import rm_abstract as rm
from rm_abstract import functional as F
from rm_abstract import nn, optim
from rm_abstract.base.errors import DeviceUnavailableError
from rm_abstract.framework import backends
from rm_abstract.framework.programs import Program
from rm_abstract.framework.tensor import executing


class Elsewhere(backends.CpuBackend):
    """The CPU as a device of its own: tensors that were the host's are copied, and no program may
    read the host's."""

    name = "elsewhere"

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []  # addresses below stay in use
        self.there: set[int] = set()
        self.host: set[int] = set()

    def _know(self, addresses: set[int], array: torch.Tensor) -> None:
        self.kept.append(array)
        addresses.add(array.untyped_storage().data_ptr())

    def holds(self, array: torch.Tensor) -> bool:
        if array.untyped_storage().data_ptr() in self.there:
            return True
        self._know(self.host, array)
        return False

    def place(self, array: torch.Tensor) -> torch.Tensor:
        placed = super().place(array)
        self._know(self.there, placed)
        return placed

    def execute(self, program: Program, arrays: list[Any]) -> list[Any]:
        assert not self.host & {a.untyped_storage().data_ptr() for a in arrays}, program.name
        results = super().execute(program, arrays)
        for array in results:
            if array is not None:
                self._know(self.there, array)
        return results


@pytest.fixture
def device() -> Iterator[Elsewhere]:
    made = Elsewhere()
    with executing(made):
        yield made


@pytest.fixture(autouse=True)
def seeded(seed: int) -> None:
    torch.manual_seed(seed)


def test_tensors_are_made_where_the_backend_computes(device: Elsewhere) -> None:
    x = torch.ones(3)
    there = rm.Tensor(x)
    x.fill_(7.0)
    assert there.torch().tolist() == [1.0] * 3
    shared = rm.Tensor(there.torch())
    there.torch().fill_(2.0)
    assert shared.numpy().tolist() == [2.0] * 3
    assert float((there * 2.0).sum()) == 12.0


@pytest.mark.parametrize("whole", [False, True], ids=["eager", "recorded"])
def test_a_step_trains_as_on_the_cpu(device: Elsewhere, whole: bool) -> None:
    """Rates change and AdamW's corrections with them: numbers that the host writes every step."""
    batches = [[torch.randint(0, 4, (3, 6)) for _ in range(2)] for _ in range(4)]
    here = Net()
    with executing(backends.backend("cpu")):
        other = Net()
        other.load_state_dict(here.state_dict())
    runs = []
    for net, by in ((here, device), (other, backends.backend("cpu"))):
        with executing(by):
            optimizer = optim.AdamW(net.parameters(), lr=1e-2, eps=1e-2)
            step = rm.record(make_step(net, optimizer)) if whole else make_step(net, optimizer)
            losses = []
            for number, (ids, target) in enumerate(batches):
                optimizer.lr = 1e-2 / (1 + number)
                losses.append(step(rm.Tensor(ids), rm.Tensor(target)).item())
            assert optimizer.steps == 4
            runs.append(losses)
    assert runs[0] == runs[1]
    for name, value in other.state_dict().items():
        assert torch.equal(here.state_dict()[name], value), name


@pytest.mark.parametrize("whole", [False, True], ids=["eager", "recorded"])
def test_random_numbers_are_those_of_the_cpu(device: Elsewhere, whole: bool) -> None:
    def step(x: Any) -> Any:
        return F.dropout(F.dropout(x, 0.5), 0.25)

    drawn = []
    for by in (device, backends.backend("cpu")):
        with executing(by):
            run, x = rm.record(step) if whole else step, rm.Tensor(torch.ones(50))
            rm.manual_seed(5)
            drawn.append([run(x).torch() for _ in range(3)])
            rm.manual_seed(5)
            assert torch.equal(run(x).torch(), drawn[-1][0])
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
    assert not torch.equal(drawn[0][0], drawn[0][1])


def test_batch_norm_moves_its_state_there(device: Elsewhere) -> None:
    ours, theirs = nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)
    recorded = rm.record(ours)
    for call in (ours, recorded, recorded):
        x = torch.randn(4, 3, 5, 2) * 3 + 1
        torch.testing.assert_close(call(rm.Tensor(x)).torch(), theirs(x).detach())
        torch.testing.assert_close(ours.running_var.torch(), theirs.running_var)


def test_a_checkpoint_of_the_device_is_the_hosts(device: Elsewhere, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.safetensors"
    net = nn.Linear(3, 2)
    optimizer = optim.Adam(net.parameters(), lr=0.1)
    net(rm.Tensor(torch.ones(1, 3))).sum().backward()
    optimizer.step()
    nn.save(file, model=net, optimizer=optimizer)
    with executing(backends.backend("cpu")):
        again = nn.Linear(3, 2)
        other = optim.Adam(again.parameters(), lr=1.0)
        nn.load(file, model=again, optimizer=other)
    assert (other.lr, other.steps) == (0.1, 1)
    assert torch.equal(again.weight.torch(), net.weight.torch())
    for a, b in zip(other.states, optimizer.states, strict=True):
        assert all(torch.equal(a[n], b[n]) for n in b)


def test_numbers_that_did_not_change_are_not_sent(
    device: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    send = backends.Slots.send
    monkeypatch.setattr(backends.Slots, "send", lambda s, t: sent.append(t) or send(s, t))
    numbers = backends.Numbers(torch.tensor([1.0, 2.0]))
    place = numbers.at(device)
    for value in (2.0, 2.0, 3.0, 3.0):
        numbers.host[1] = value
        numbers.send(device)
        assert numbers.at(device) is place and place.tolist() == [1.0, value]
    assert len(sent) == 2
    assert numbers.at(backends.backend("cpu")) is numbers.host


def test_programs_of_operators_share_their_temporaries(device: Elsewhere) -> None:
    largest = 0
    for rows in range(8, 72, 8):
        x = rm.Tensor(torch.randn(rows, 512), requires_grad=True)
        F.layer_norm(
            x * 2.0, *(rm.Tensor(torch.ones(512), requires_grad=True),) * 2
        ).sum().backward()
        largest = max(largest, rows * 512 * 4)
    assert 0 < device._arenas.free_bytes() <= 4 * largest  # not the sum over all of them


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_without_a_gpu_the_backend_is_refused(name: str) -> None:
    with pytest.raises(DeviceUnavailableError, match="NVIDIA GPU") as caught:
        rm.use_backend(name)
    assert caught.value.code == "RM401"
    assert rm.Tensor([1.0]).torch().device.type == "cpu"  # what was chosen before stays


def test_a_name_of_no_backend_is_refused() -> None:
    for name in ("cuda:", "cuda:x", "cuda:-1", "cpu:0"):
        with pytest.raises(ValueError, match="backend"):
            rm.use_backend(name)
