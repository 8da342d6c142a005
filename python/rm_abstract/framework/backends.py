"""Backends as pure executors: a program and arrays in, arrays out. They know no gradients.

``cpu`` and ``cuda`` run programs with our own kernels, prepared once a problem; ``torch`` runs the
same programs operator by operator with its own. Arrays are torch tensors on the backend's device:
torch owns memory. Work of a GPU is launched on torch's current stream and nothing waits for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rm_abstract import _core, device
from rm_abstract.base.config import resolve
from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import DeviceUnavailableError, ExecutionError, from_core
from rm_abstract.framework import programs
from rm_abstract.framework.programs import Attrs, Program, Run
from rm_abstract.training.place import Place, Slots


class Executor(Protocol):
    """What tensors ask to have something computed: a backend, or the recorder of a step."""

    name: str

    @property
    def backend(self) -> Backend:
        """Who computes in the end, and where arrays lie."""
        ...

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
    device = torch.device("cpu")

    @property
    def backend(self) -> Backend:
        return self

    def holds(self, array: torch.Tensor) -> bool:
        """Whether programs can read the array where it lies."""
        return array.device == self.device

    def place(self, array: torch.Tensor) -> torch.Tensor:
        """The array itself, or its copy on the backend's device."""
        return array if self.holds(array) else array.to(self.device, copy=True)

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
        self._checks = _core.SelfCheck(resolve({}).text("self_check"))
        self._arenas = _core.Arenas()  # one: an eager script makes hundreds of programs
        self._load()

    def _load(self) -> None:
        device.load_plugins()

    def _prepare(self, program: Program) -> Run:
        # Parameters change between two calls: nothing is packed, and precision stays as written.
        text = _core.ir.run_passes(program.text, {"precision": "auto"})
        compiled = _core.Program(
            text,
            {},
            [self.device.type],  # our backends have torch's names of devices
            packing="never",
            checks=self._checks,
            device=self.device.index or 0,
            recorded=program.whole,  # as a CUDA graph
            arenas=self._arenas,
        )
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


class CudaBackend(CpuBackend):
    """The same on an NVIDIA GPU: "cuda" is torch's current one, "cuda:1" the second. Results come
    from torch's allocator. An index outside its table is no error there (docs/gpu.md)."""

    def __init__(self, name: str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise DeviceUnavailableError(
                "[backend] expected an NVIDIA GPU that torch can use, got none; try 'cpu'",
                code="RM401",
            )
        where = torch.device(name)
        number = torch.cuda.current_device() if where.index is None else where.index
        if number >= torch.cuda.device_count():
            raise DeviceUnavailableError(
                f"[backend] expected one of {torch.cuda.device_count()} GPUs, got {name!r}"
            )
        self.device = torch.device("cuda", number)
        self.name = str(self.device)
        super().__init__()

    def _load(self) -> None:
        try:
            Place(self.device).backends()
        except Decline as why:
            raise DeviceUnavailableError(f"[backend] {why.detail}", code=why.code) from None


class TorchBackend(Backend):
    """torch's own operators, one by one."""

    name = "torch"

    def _prepare(self, program: Program) -> Run:
        from rm_abstract.worker.ir_to_torch import ir_to_torch

        module = ir_to_torch(program.text, {}, {"assign": _assigned})

        def run(arrays: list[Any]) -> list[Any]:
            with torch.no_grad():
                return _written(list(module.evaluate(arrays, ())), arrays)

        return run


def _assigned(operands: Any, node: Any) -> torch.Tensor:
    """What an array will hold: written behind the program, for views of what it holds now."""
    old, new = operands
    value: Any = new.view_as(new)  # an object of its own
    value.assigned_to = getattr(old, "assigned_to", old)
    return value  # type: ignore[no-any-return]


def _written(results: list[Any], arrays: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results, after what was assigned is written: arrays where it was, and otherwise each in
    memory of its own, which its holder may write."""
    held = {a.untyped_storage().data_ptr() for a in arrays}
    assigned = [r for r in results if hasattr(r, "assigned_to")]
    for i, result in enumerate(results):
        memory = result.untyped_storage().data_ptr()
        if memory in held and not hasattr(result, "assigned_to"):
            results[i] = result.clone(memory_format=torch.contiguous_format)
        held.add(memory)
    values = [r.clone() for r in assigned] if len(assigned) > 1 else assigned
    for result, value in zip(assigned, values, strict=True):
        result.assigned_to.copy_(value)
    return [getattr(r, "assigned_to", r) for r in results]


class Numbers:
    """A small tensor that the host writes and programs read, at one place a backend.

    ``host``: what is written. `send` copies it to where the programs of a backend read it, in the
    order of the work: programs that were launched before read what it held then.
    """

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host
        self._sent: dict[str, tuple[Slots, torch.Tensor]] = {}  # and what it holds there

    def at(self, by: Backend) -> torch.Tensor:
        """The place."""
        if by.holds(self.host):
            return self.host
        if by.name not in self._sent:
            slots, held = Slots(self.host, by.device), self.host.clone()
            slots.send(held)
            self._sent[by.name] = slots, held
        return self._sent[by.name][0].there

    def send(self, by: Backend) -> None:
        there = self.at(by)
        if there is self.host:
            return
        slots, held = self._sent[by.name]
        if not torch.equal(held, self.host):
            slots.send(held.copy_(self.host))


_KINDS: dict[str, type[Backend]] = {"cpu": CpuBackend, "torch": TorchBackend}
_made: dict[str, Backend] = {}


def backend(name: str) -> Backend:
    """The backend of this name: "cpu", "torch", "cuda" or "cuda:1". Raises ValueError for another,
    DeviceUnavailableError where there is no such GPU."""
    if re.fullmatch(r"cuda(:\d+)?", name):
        made = CudaBackend(name)
        return _made.setdefault(made.name, made)
    if name not in _KINDS:
        raise ValueError(f"[backend] expected one of {['cuda', *sorted(_KINDS)]}, got {name!r}")
    if name not in _made:
        _made[name] = _KINDS[name]()
    return _made[name]
