"""Tensors that stay on a device between the runs of its programs, for a worker class in Python.

The vendor's class makes one, reads a window of it and writes one (`plugin.State`); here are the
copies the frame asks for, in those terms. A window is given as one slice (start, stop) per axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rm_abstract.worker.ports import Port
from rm_abstract.worker.tensors import SIZES, Tensor

Region = tuple[slice, ...]


class TorchState:
    """A state that is a torch tensor, ``tensor``, on a device of torch's."""

    def __init__(self, port: Port, device: str = "cpu") -> None:
        self.tensor = port.example().to(device)

    def read(self, region: Region, into: Tensor) -> None:
        into.write(self.tensor[region].cpu())

    def write(self, region: Region, value: Tensor) -> None:
        self.tensor[region] = value.torch().to(self.tensor.device)

    def copy(self, region: Region, source: TorchState, source_region: Region) -> None:
        self.tensor[region] = source.tensor[source_region]


class _Host:
    """Shared memory of the user's process in the same terms."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def read(self, region: Region, into: Tensor) -> None:
        into.numpy()[...] = self._tensor.numpy()[region]

    def write(self, region: Region, value: Tensor) -> None:
        self._tensor.numpy()[region] = value.numpy()


@dataclass(frozen=True)
class _Side:
    port: Port
    state: Any


@dataclass(frozen=True)
class StateSet:
    """States by the names the core knows them by, in their order."""

    states: Mapping[str, _Side]

    @staticmethod
    def made(ports: Sequence[Port], make: Callable[[Port], Any]) -> StateSet:
        return StateSet({port.name: _Side(port, make(port)) for port in ports})

    def of(self, wanted: Sequence[Port]) -> list[Any]:
        """The vendor's states for these, in their order. Raises ValueError for others."""
        found = []
        for port in wanted:
            side = self.states.get(port.name)
            if side is None or (side.port.dtype, side.port.shape) != (port.dtype, port.shape):
                raise ValueError(f"[states] expected the states it was loaded for, got no {port}")
            found.append(side.state)
        return found


@dataclass(frozen=True)
class Copy:
    """Which part of every tensor: `StatesRegion` of src/worker/protocol.hpp."""

    axis: int
    from_start: int
    to_start: int
    count: int
    rows: Sequence[int]


def copy_states(
    source: StateSet | None, target: StateSet | None, what: Copy, host: Sequence[Tensor]
) -> None:
    """Copies a part of every tensor; ``host`` stands for the side that is None. Raises ValueError
    for tensors that do not fit each other."""
    shared = [_Side(Port(one.name, one.dtype, one.shape), _Host(one)) for one in host]
    sources = shared if source is None else list(source.states.values())
    targets = shared if target is None else list(target.states.values())
    if len(sources) != len(targets):
        raise ValueError("[states] expected as many tensors on both sides")
    for one, other in zip(sources, targets, strict=True):
        _check_alike(one.port, other.port, what.axis)
        if any(row >= one.port.shape[0] for row in what.rows):
            raise ValueError("[states] expected rows the source has")
        if not what.rows:
            _copy(one, other, what, 0, 0, one.port.shape[0])
        for to_row, row in enumerate(what.rows):
            _copy(one, other, what, row, to_row, 1)


def _check_alike(one: Port, other: Port, axis: int) -> None:
    alike = one.dtype == other.dtype and len(one.shape) == len(other.shape) > axis
    sizes = enumerate(zip(one.shape, other.shape, strict=False))
    if not alike or any(a != b for i, (a, b) in sizes if i not in (0, axis)):
        raise ValueError(f"[states] expected tensors that fit, got {one} and {other}")


def _copy(one: _Side, other: _Side, what: Copy, from_row: int, to_row: int, rows: int) -> None:
    theirs = [slice(0, size) for size in one.port.shape]
    mine = [slice(0, size) for size in other.port.shape]

    def narrow(axis: int, start: int, at: int, count: int) -> None:
        fits = min(count, one.port.shape[axis] - start, other.port.shape[axis] - at)
        theirs[axis], mine[axis] = slice(start, start + fits), slice(at, at + fits)

    narrow(0, from_row, to_row, rows)
    if what.axis > 0:
        narrow(what.axis, what.from_start, what.to_start, what.count)
    shape = tuple(part.stop - part.start for part in mine)
    if any(size <= 0 for size in shape):
        return
    device_copy = getattr(other.state, "copy", None)
    if device_copy is not None and type(one.state) is type(other.state):
        device_copy(tuple(mine), one.state, tuple(theirs))
        return
    size = SIZES[one.port.dtype]
    for length in shape:
        size *= length
    between = Tensor(one.port.name, one.port.dtype, shape, memoryview(bytearray(size)))
    one.state.read(tuple(theirs), between)
    other.state.write(tuple(mine), between)
