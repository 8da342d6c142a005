"""The parts of a program on a whole-program device: which nodes go where, and what runs a part.

Inputs and outputs of device parts lie in memory shared with the worker; the others are run by our
own compiler in this process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rm_abstract import _core
from rm_abstract.base.errors import CompileError
from rm_abstract.worker import ir_text
from rm_abstract.worker.shared_tensors import tensors_in

if TYPE_CHECKING:
    from rm_abstract.engines.device_compiler import DeviceCompiler

MIN_PART_NODES = 4  # a smaller part costs more to hand over than to compute
HOST_BACKENDS = ("cpu", "torch")
_STALE = ("RM403", "RM602")  # an artefact of other software, or a damaged one: compiled again


@dataclass
class Support:
    """Where every node of a program runs, and why not on the device."""

    parts: list[dict[str, Any]]
    outputs: list[tuple[int, int]]
    nodes: int
    device_nodes: int
    states: set[int]  # inputs of the program that stay on the device
    kept: dict[str, int] = field(default_factory=dict)  # "op: reason" -> nodes


def support_of(backend: str, device: int, text: str) -> Support:
    """Asks the device about every node of a static program and splits it. Raises CoreError."""
    nodes = ir_text.parse(text).nodes
    answers = _core.backend.query_support(backend, device, text, len(nodes))
    split = _core.ir.partition(text, [ok for ok, _ in answers], MIN_PART_NODES)
    kept: Counter[str] = Counter()
    for node, (ok, why), small in zip(nodes, answers, split["too_small"], strict=True):
        if not ok:
            kept[f"{node.op}: {why}"] += 1
        elif small:
            kept[f"{node.op}: in a part of fewer than {MIN_PART_NODES} nodes"] += 1
    on_device = sum(len(part["nodes"]) for part in split["parts"] if part["on_device"])
    states = {number for part in split["parts"] for number in part["states"]}
    return Support(split["parts"], split["outputs"], len(nodes), on_device, states, dict(kept))


def refuse_checks(device: str, text: str) -> None:
    """Raises CompileError (RM212) for a program that has to refuse some values: a device's own
    compiler has no such operator, and states on the device may be written by then."""
    if any(node.op == "check" for node in ir_text.parse(text).nodes):
        raise CompileError(
            f"[{device}] expected a forward without checks of values, got one; try the CPU",
            code="RM212",
        )


class HostPart:
    """A part our own compiler runs in this process."""

    def __init__(self, part: dict[str, Any], weights: dict[str, torch.Tensor], checks: Any) -> None:
        text = part["text"]
        names = ir_text.parse(text).weights.values()
        rows = {row["name"] for row in _core.backend.backends() if row["available"]}
        backends = [name for name in HOST_BACKENDS if name in rows]
        self._names = list(names)
        optimised = _core.ir.run_passes(text, {"precision": "auto"})
        self._program = _core.Program(optimised, self._mine(weights), backends, checks=checks)
        self.wiring = part["inputs"]

    def _mine(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: weights[name] for name in self._names}

    def update_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self._program.update_weights(self._mine(weights))

    def run(self, gather: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
        return list(self._program.run([gather(port) for port in self.wiring]))


class DevicePart:
    """A part compiled by the device's compiler; loaded anew in every worker."""

    def __init__(self, compiler: DeviceCompiler, row: dict[str, Any], names: Any) -> None:
        """``names[i]`` is what input i of the program is called among the states."""
        self._compiler = compiler
        self.text = row["text"]
        program = ir_text.parse(self.text)
        types = [(t.dtype, list(t.shape)) for t in program.input_types]
        stays = [value in program.donated for value in program.inputs]
        self.wiring = [p for p, s in zip(row["inputs"], stays, strict=True) if not s]
        self._inputs = [t for t, s in zip(types, stays, strict=True) if not s]
        states = [t for t, s in zip(types, stays, strict=True) if s]
        self._states = [(names[i], *t) for i, t in zip(row["states"], states, strict=True)]
        outputs = [(t.dtype, list(t.shape)) for t in program.output_types]
        self._outputs = outputs[: len(outputs) - len(states)]
        self.nodes = len(program.nodes)
        self.key = ""
        self.digest = ""  # of the artefact's bytes
        self.source = ""
        self._loaded: Any = None
        self._worker: Any = None
        self._in: list[torch.Tensor] = []
        self._out: list[torch.Tensor] = []

    def prepare(self, weights: dict[str, torch.Tensor]) -> None:
        """Compiles or finds the artefact. Raises CoreError, Error, KeyboardInterrupt."""
        found = self._compiler.artefact(self.text, weights)
        self._entry, self.key, self.source = found
        self.digest = bytes(_core.cache.digest(self._entry.section("artefact"))).hex()

    def ensure_loaded(self, weights: dict[str, torch.Tensor]) -> None:
        """Loads it into the live worker. A stale or damaged artefact is made again, once."""
        worker = self._compiler.pool.worker("execute")
        if self._loaded is not None and self._worker is worker:
            return
        try:
            self._load(worker, weights)
        except _core.CoreError as error:
            if error.reason not in _STALE:
                raise
            self._compiler.reject(self._entry, str(error))
            self.prepare(weights)
            self._load(worker, weights)

    def _load(self, worker: Any, weights: dict[str, torch.Tensor]) -> None:
        block = self._compiler.shared(weights)
        artefact = self._entry.section("artefact")
        self._loaded = None
        loaded = worker.load(
            self._compiler.index, artefact, block, self._inputs, self._outputs,
            self._compiler.load_timeout_s, self._states, self._compiler.stall_s,
        )  # fmt: skip
        mapping = loaded.memory
        self._in = tensors_in(mapping, loaded.inputs, [d for d, _ in self._inputs])
        self._out = tensors_in(mapping, loaded.outputs, [d for d, _ in self._outputs])
        self._loaded, self._worker = loaded, worker

    def unload(self) -> None:
        self._in, self._out, self._loaded, self._worker = [], [], None, None

    def run(self, fill: Callable[[Any, torch.Tensor], None], states: Any) -> list[torch.Tensor]:
        """The outputs lie in shared memory until the next run; states are updated in place."""
        traffic = self._compiler.traffic
        for port, slot in zip(self.wiring, self._in, strict=True):
            fill(port, slot)
            traffic.inputs += slot.nbytes
        self._loaded.execute(self._compiler.execute_timeout_s, states if self._states else None)
        traffic.outputs += sum(slot.nbytes for slot in self._out)
        return self._out
