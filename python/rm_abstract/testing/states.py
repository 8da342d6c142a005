"""Do the tensors a device keeps between runs behave as the core uses them?

One worker, one program that updates a state in place, and torch doing the same beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.worker.pool import WorkerPool
from rm_abstract.worker.shared_tensors import tensors_in

ROWS, HEADS, ROOM, SIZE, NEW = 2, 2, 8, 3, 2
_DIMS = [ROWS, HEADS, ROOM, SIZE]
PROGRAM = f"""rmir 1
input %0 "held" : f32[{ROWS},{HEADS},{ROOM},{SIZE}] donated
input %1 "at" : i64[{NEW}]
input %2 "new" : f32[{ROWS},{HEADS},{NEW},{SIZE}]
%3 = index_copy(%0, %1, %2) {{axis=2}} : f32[{ROWS},{HEADS},{ROOM},{SIZE}]
%4 = add(%3, %3) : f32[{ROWS},{HEADS},{ROOM},{SIZE}]
return %4, %3
"""
_POSITIONS = 2  # the axis
_LIMIT_S = 600.0


class _Program:
    """The program, loaded, with the state of a run given by its caller."""

    def __init__(self, pool: WorkerPool) -> None:
        artefact = pool.worker("compile").compile(
            0, PROGRAM.encode(), [], None, lambda fraction, stage: None, _LIMIT_S
        )
        self.worker = pool.worker("execute")
        given = [("i64", [NEW]), ("f32", [ROWS, HEADS, NEW, SIZE])]
        self._loaded = self.worker.load(
            0, artefact, None, given, [("f32", _DIMS)], _LIMIT_S, [("0", "f32", _DIMS)]
        )
        memory = self._loaded.memory
        self._at, self._new = tensors_in(memory, self._loaded.inputs, ["i64", "f32"])
        (self._out,) = tensors_in(memory, self._loaded.outputs, ["f32"])

    def run(self, states: Any, at: list[int], new: torch.Tensor) -> torch.Tensor:
        self._at.copy_(torch.tensor(at))
        self._new.copy_(new)
        self._out.fill_(float("nan"))
        self._loaded.execute(_LIMIT_S, states)
        return self._out.clone()


def _made(worker: Any, room: int = ROOM) -> Any:
    return worker.make_states(0, [("0", "f32", [ROWS, HEADS, room, SIZE])], _LIMIT_S)


def _content(states: Any, room: int = ROOM) -> torch.Tensor:
    block = _core.worker.Weights([("0", "f32", [ROWS, HEADS, room, SIZE])])
    (slot,) = tensors_in(block.memory, block.places, ["f32"])
    slot.fill_(float("nan"))
    states.read(block, axis=_POSITIONS, timeout_s=_LIMIT_S)
    return slot.clone()


def check(pool: WorkerPool, compare: Callable[[list[torch.Tensor], Any], None]) -> None:
    """Raises AssertionError for what is not as the guide says; ``compare(outputs, expected)``
    does for numbers."""
    draws = torch.Generator().manual_seed(3)
    program = _Program(pool)
    held, other = _made(program.worker), _made(program.worker)
    compare([_content(held)], [torch.zeros(_DIMS)])  # new states are zeros
    want = torch.zeros(_DIMS)
    for at in ([0, 1], [3, 2], [7, 0]):
        new = torch.randn([ROWS, HEADS, NEW, SIZE], generator=draws)
        want[:, :, at] = new
        compare([program.run(held, at, new)], [want * 2])
    compare([_content(held), _content(other)], [want, torch.zeros(_DIMS)])  # sets are separate

    larger = _made(program.worker, 2 * ROOM)  # how a cache grows
    larger.copy_from(held, axis=_POSITIONS, timeout_s=_LIMIT_S)
    grown = torch.zeros([ROWS, HEADS, 2 * ROOM, SIZE])
    grown[:, :, :ROOM] = want
    compare([_content(larger, 2 * ROOM)], [grown])

    other.copy_from(  # how a gap of padding is closed
        held, axis=_POSITIONS, from_start=2, to_start=1, count=3, timeout_s=_LIMIT_S
    )
    moved = torch.zeros(_DIMS)
    moved[:, :, 1:4] = want[:, :, 2:5]
    compare([_content(other)], [moved])

    other.copy_from(held, axis=_POSITIONS, rows=[1, 1], timeout_s=_LIMIT_S)  # what beams do
    compare([_content(other)], [want[[1, 1]]])

    block = _core.worker.Weights([("0", "f32", _DIMS)])
    (slot,) = tensors_in(block.memory, block.places, ["f32"])
    slot.copy_(torch.randn(_DIMS, generator=draws))
    other.write(block, axis=_POSITIONS, timeout_s=_LIMIT_S)
    new = torch.randn([ROWS, HEADS, NEW, SIZE], generator=draws)
    want = slot.clone()
    want[:, :, [5, 6]] = new
    compare([program.run(other, [5, 6], new)], [want * 2])
