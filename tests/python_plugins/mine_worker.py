"""The worker's side of rm_backend_mine.py: what a vendor's SDK would do, done by torch. MINE_FAULT
makes it misbehave."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from rm_abstract.plugin import Failure
from rm_abstract.worker.ports import Port
from rm_abstract.worker.python_backend import Program
from rm_abstract.worker.python_states import TorchState
from rm_abstract.worker.shared_weights import Held, SharedWeights
from rm_abstract.worker.tensors import Tensor


def crash() -> None:
    print("mine: simulated crash", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGSEGV)


def fault(name: str) -> bool:
    return os.environ.get("MINE_FAULT") == name


def upload(tensor: Tensor) -> torch.Tensor:
    """To the device. MINE_UPLOADS=file: a line for each."""
    if path := os.environ.get("MINE_UPLOADS"):
        with open(path, "a") as file:
            print(os.getpid(), tensor.digest.hex(), tensor.shape, file=file)
    return tensor.torch().clone()


class Loaded:
    def __init__(self, module: torch.nn.Module, weights: Mapping[str, Held[torch.Tensor]]) -> None:
        self._module, self._weights = module, weights

    def execute(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], states: Sequence[TorchState] = ()
    ) -> None:
        if fault("run_crash"):
            crash()
        if fault("run_hang"):
            time.sleep(3600)
        if fault("run_error"):
            raise RuntimeError("the device said E77")
        if fault("device_lost"):
            raise Failure("[mine] expected the device, got nothing", "RM407")
        with torch.inference_mode():
            held = [state.tensor for state in states]
            results = self._module(*[tensor.torch() for tensor in inputs], *held)
        for result, output in zip(results, outputs, strict=False):
            wrong = fault("wrong_numbers") and result.is_floating_point()
            output.write(result * 1.05 if wrong else result)
        for state, content in zip(states, results[len(outputs) :], strict=True):
            state.tensor.copy_(content)


class TorchWorker:
    def __init__(self, device: int) -> None:
        print(f"mine: device {device} in {sys.executable}", file=sys.stderr)
        self._weights = SharedWeights(upload)

    def compile(
        self,
        program: Program,
        options: Mapping[str, str],
        progress: Callable[[float, str], None],
    ) -> bytes:
        if fault("compile_crash"):
            crash()
        if fault("compile_hang"):
            time.sleep(1e9)
        if fault("compile_error"):
            raise RuntimeError("internal compiler error: E1042")
        if fault("compile_garbage"):
            return "no bytes"  # type: ignore[return-value]
        if fault("unsupported"):
            raise NotImplementedError("attention of this kind")
        if fault("out_of_memory"):
            raise MemoryError("the device has 1 GiB")
        print(f"mine: level {options.get('mine.level', '0')}", file=sys.stderr)
        for port in (*program.inputs, *program.outputs):
            assert tuple(port.example().shape) == port.shape and port.name.isidentifier()
        program.torch()  # it can be built: what a compiler would take
        seconds = float(os.environ.get("MINE_COMPILE_S", "0"))
        for step in range(20):
            progress(step / 20, "lowering")
            time.sleep(seconds / 20)
        progress(1.0, "done")
        return program.code

    def load(self, artefact: bytes, weights: Mapping[str, Tensor]) -> Loaded:
        if fault("load_hang"):
            time.sleep(1e9)
        held = {name: self._weights.of(tensor) for name, tensor in weights.items()}
        given = {name: one.value for name, one in held.items()}
        return Loaded(Program("rm.ir/1", artefact, weights).torch(given).eval(), held)

    def make_state(self, port: Port) -> TorchState:
        return TorchState(port)
