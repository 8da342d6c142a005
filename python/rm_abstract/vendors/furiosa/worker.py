"""The worker's side of the backend `furiosa`, in the Python that RM_FURIOSA_PYTHON names.

Compiling runs FuriosaAI's compiler. Loading and executing follow the package's interface and have
not been tried on a card (docs/npu_furiosa.md); the gate compares every first answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rm_abstract.plugin import Failure
from rm_abstract.vendors.furiosa import artefact, compiler, description, messages
from rm_abstract.vendors.furiosa.attention import as_sum, mask_inputs
from rm_abstract.worker.python_backend import Program
from rm_abstract.worker.tensors import Tensor


class Loaded:
    """A binary with its weights on one card."""

    def __init__(
        self, runnable: Any, fixed: Sequence[torch.Tensor | None], sums: set[int], device: str
    ) -> None:
        self._runnable, self._fixed, self._sums = runnable, fixed, sums
        self._device = device

    def execute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        tensors = (tensor.torch() for tensor in inputs)
        calls = (as_sum(t) if i in self._sums else t for i, t in enumerate(tensors))
        given = [_moved(next(calls), self._device) if one is None else one for one in self._fixed]
        results = self._runnable.execute(given)
        for result, output in zip(results, outputs, strict=True):
            output.write(result.cpu().reshape(output.shape))


class Worker:
    def __init__(self, device: int) -> None:
        self._device = device

    def compile(
        self,
        program: Program,
        options: Mapping[str, str],
        progress: Callable[[float, str], None],
    ) -> bytes:
        weights = {name: tensor.torch() for name, tensor in program.weights.items()}
        return compiler.compile_program(program.text, weights, progress).pack()

    def load(self, data: bytes, weights: Mapping[str, Tensor]) -> Loaded:
        from furiosa.torch import ir

        read = artefact.unpack(data)
        try:
            runnable = ir.Runnable.deserialize(read.runnable)
        except ValueError as error:
            raise Failure(f"[furiosa load] expected a binary, got: {error}", "RM602") from error
        # The package claims 64 devices on a machine without any: only nodes count.
        cards = description.nodes()
        if self._device >= len(cards):
            raise Failure(
                f"[furiosa load] expected card {self._device}, got {len(cards)} nodes in /dev/rngd",
                "RM407",
            )
        device = f"furiosa:{self._device}"
        tensors = {name: tensor.torch() for name, tensor in weights.items()}
        module = compiler.module_of(read.text, tensors)
        runnable.binary = _moved(runnable.binary, device)
        if runnable.weight is not None:
            runnable.weight = _moved(runnable.weight, device)
        runnable.reserve_stacks()
        fixed = [_moved(getattr(module, name), device) if name else None for name in read.inputs]
        return Loaded(runnable, fixed, mask_inputs(module.program), device)


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    try:
        return tensor.to(device)
    except torch.OutOfMemoryError as error:
        raise messages.of_moving(str(error)) from error
