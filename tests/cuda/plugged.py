"""Kernel rows of the plugin as hostile problems call them: through the C line, as plans do, on
operands, results and workspaces that lie in an arena.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hostile import Maker, Problem, Result

from rm_abstract.testing.abi import Launch, Str, ptr
from rm_abstract.testing.host import Operand, Plugin, PluginFailure, make_problem
from rm_abstract.testing.plugins import built_plugin

_CODES = {torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64),
          torch.uint8: (1, 8), torch.float16: (2, 16), torch.float32: (2, 32),
          torch.float64: (2, 64), torch.bfloat16: (4, 16), torch.bool: (6, 8)}  # fmt: skip


class Unsupported(Exception):
    """No row takes the problem."""


class InvalidArgument(Exception):
    """Only so that both kinds of problems are run by the same code: never raised."""


class Plugged:
    """The plugin's rows of one operator; as much of a module as the harness looks at."""

    Unsupported, InvalidArgument = Unsupported, InvalidArgument
    _plugin: Plugin | None = None

    def __init__(self, op: str) -> None:
        if Plugged._plugin is None:
            # The core may have loaded the file, too, and a library has one host.
            Plugged._plugin = Plugin(built_plugin("cuda"), private=True)
            Plugged._plugin.initialize()
        self.plugin, self.op = Plugged._plugin, op
        self.device = self.plugin.open_device(0)
        self.info = self.plugin.device_info(self.device)
        self.rows = [row for row in self.plugin.rows() if row.op.text() == op]
        self._states: list[tuple[Any, Any]] = []
        self._streams: dict[int, int] = {}

    def stream(self, native: int) -> int:
        if native not in self._streams:
            out = ptr()
            self.plugin.host.check(self.plugin.api.stream_wrap(self.device, native, c.byref(out)))
            self._streams[native] = out.value or 0
        return self._streams[native]

    def prepared(self, row: Any, problem: Any) -> Any:
        state = ptr()
        self.plugin.host.check(
            row.prepare(c.byref(problem), c.addressof(self.info), 0, c.byref(state))
        )
        self._states.append((row, state))
        return state

    def release(self) -> None:
        """What the last problem prepared."""
        torch.cuda.synchronize()
        for row, state in self._states:
            row.release(state)
        self._states = []

    def problem(
        self, make: Maker, what: str, inputs: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor | None], attrs: dict[str, Any],
        results: Callable[[], list[Result]], *, constant: Sequence[int] = (), repeats: bool = True,
    ) -> Problem:  # fmt: skip
        """Every row that takes it is prepared here, with a workspace of its own in the arena.

        `constant`: operands that are weights. Raises Unsupported where no row takes it.
        """
        self.release()
        sides = ([_operand(t) for t in side] for side in (inputs, outputs))
        c_problem = make_problem(self.op, *sides, attrs)
        c_problem.constant_inputs = sum(1 << i for i in constant)
        ready: dict[str, tuple[Any, Any, int]] = {}
        costs, reasons, why = {}, [], Str()
        at_info = c.addressof(self.info)
        for row in self.rows:
            name = row.name.text()
            if not row.supports(c.byref(c_problem), at_info, c.byref(why)):
                reasons.append(f"{name}: {why.text()}")
                continue
            state = self.prepared(row, c_problem)
            size = row.workspace(state) if row.workspace else 0
            space = make.workspace(size) if size else None
            ready[name] = (row, state, 0 if space is None else space.data_ptr())
            costs[name] = row.cost_ns(c.byref(c_problem), at_info, 0)
        if not ready:
            raise Unsupported(f"{what}: {'; '.join(reasons)}")
        chosen = min(costs, key=lambda name: costs[name])

        def addresses(side: Sequence[torch.Tensor | None]) -> Any:
            return (ptr * max(1, len(side)))(*(None if t is None else t.data_ptr() for t in side))

        def call(*, kernel: str, stream: int) -> None:
            row, state, space = ready[kernel or chosen]
            launch = Launch(c.sizeof(Launch), state, addresses(inputs), addresses(outputs),
                            space or None, self.stream(stream))  # fmt: skip
            try:
                self.plugin.host.check(row.launch(c.byref(launch)))
            except PluginFailure as error:
                raise AssertionError(f"{what}, {kernel or chosen}: {error}") from error

        return Problem(f"{self.op} {what}", call, list(ready), results, make.tensors, repeats)


def _operand(t: torch.Tensor | None) -> Operand | None:
    if t is None:
        return None
    # a kernel is chosen before its operands have addresses
    return Operand(0, tuple(t.shape), tuple(t.stride()), *_CODES[t.dtype], device=(2, 0))
