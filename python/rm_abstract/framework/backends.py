"""Backends as pure executors: a program and arrays in, arrays out. They know no gradients.

``cpu`` runs programs with our own kernels, prepared once a problem; ``torch`` runs the same
programs operator by operator with its own. Arrays are torch tensors on the CPU in both: torch owns
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rm_abstract import _core, device
from rm_abstract.base.config import resolve
from rm_abstract.base.errors import ExecutionError, from_core
from rm_abstract.framework import programs
from rm_abstract.framework.programs import Attrs, Program, Run


class Executor(Protocol):
    """What tensors ask to have something computed: a backend, or the recorder of a step."""

    name: str

    def execute(self, program: Program, arrays: list[Any]) -> list[Any]:
        """The program's results; arrays of its states are updated in place. Raises ExecutionError
        when a kernel refuses its operands; states are then as they were."""
        ...

    def op_call(
        self, name: str, inputs: Sequence[Any], attrs: Attrs = ()
    ) -> tuple[Program, list[Any]]: ...


class Backend:
    """Executes at once. Subclasses say how a program becomes a function of a list of arrays."""

    name = ""

    def _prepare(self, program: Program) -> Run:
        raise NotImplementedError

    def execute(self, program: Program, arrays: list[Any]) -> list[Any]:
        run = program.runs.get(self.name)
        if run is None:
            run = program.runs[self.name] = self._prepare(program)
        try:
            return run(arrays)
        except _core.CoreError as error:
            raise from_core(error, ExecutionError) from None

    def op_call(
        self, name: str, inputs: Sequence[Any], attrs: Attrs = ()
    ) -> tuple[Program, list[Any]]:
        """One operator of docs/operators.md on arrays, numbers or None."""
        program = programs.operation(name, inputs, attrs)
        return program, self.execute(program, [x for x in inputs if x.__class__ is torch.Tensor])


class CpuBackend(Backend):
    """Our compiler and kernels. A kernel checks itself before the process uses it (RM510)."""

    name = "cpu"

    def __init__(self) -> None:
        device.load_plugins()
        self._checks = _core.SelfCheck(resolve({}).text("self_check"))

    def _prepare(self, program: Program) -> Run:
        # Parameters change between two calls: nothing is packed, and precision stays as written.
        text = _core.ir.run_passes(program.text, {"precision": "auto"})
        compiled = _core.Program(text, {}, ["cpu"], packing="never", checks=self._checks)
        run: Run = compiled.run
        if not program.states:
            return run
        inputs = [line for line in program.text.splitlines() if line.startswith("input ")]
        states = [i for i, line in enumerate(inputs) if line.endswith(" donated")]

        def updating(arrays: list[Any]) -> list[Any]:
            results = run(arrays)
            torch.autograd.graph.increment_version([arrays[i] for i in states])
            return results

        return updating


class TorchBackend(Backend):
    """torch's own operators, one by one."""

    name = "torch"

    def _prepare(self, program: Program) -> Run:
        from rm_abstract.worker.ir_to_torch import ir_to_torch

        module = ir_to_torch(program.text, {}, {"assign": lambda o, n: o[0].copy_(o[1])})

        def run(arrays: list[Any]) -> list[Any]:
            with torch.no_grad():
                return list(module.evaluate(arrays, ()))

        return run


_KINDS: dict[str, type[Backend]] = {"cpu": CpuBackend, "torch": TorchBackend}
_made: dict[str, Backend] = {}


def backend(name: str) -> Backend:
    """The backend of this name: "cpu" or "torch". Raises ValueError for another."""
    if name not in _KINDS:
        raise ValueError(f"[backend] expected one of {sorted(_KINDS)}, got {name!r}")
    if name not in _made:
        _made[name] = _KINDS[name]()
    return _made[name]
