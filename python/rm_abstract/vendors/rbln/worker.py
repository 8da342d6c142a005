"""The worker's side of the backend `rbln`, in the Python that RM_RBLN_PYTHON names.

Loading and executing follow the vendor's documentation and have not been tried on an NPU
(docs/npu_rbln.md); the gate compares every first answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rm_abstract.vendors.rbln import artefact, description, messages, scratch

if TYPE_CHECKING:
    from rm_abstract.worker.python_backend import Program
    from rm_abstract.worker.tensors import Tensor


class Loaded:
    """A compiled program on its NPUs."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def execute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        import torch

        given = [t.torch().to(torch.int32) if t.dtype == "bool" else t.torch() for t in inputs]
        try:
            found = self._runtime.run(*given)
        except Exception as error:
            raise messages.of_running("execute", error) from error
        results = list(found) if isinstance(found, (list, tuple)) else [found]
        for result, output in zip(results, outputs, strict=True):
            value = result.reshape(output.shape)
            output.write(value != 0 if output.dtype == "bool" else value)


class Worker:
    def __init__(self, device: int) -> None:
        self._device = device
        # torch-rbln, where it is installed, would change torch at its import.
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        scratch.sweep()

    def compile(
        self,
        program: Program,
        options: Mapping[str, str],
        progress: Callable[[float, str], None],
    ) -> bytes:
        from rm_abstract.vendors.rbln import compiler

        arch = description.devices()[self._device].arch
        target = "" if arch == description.UNKNOWN else arch
        devices = description.number_of_devices(options)
        file = compiler.compile_program(program, target, devices, progress)
        return artefact.pack(file, devices)

    def load(self, data: bytes, weights: Mapping[str, Tensor]) -> Loaded:
        import rebel

        file, count = artefact.unpack(data)
        devices = list(range(self._device, self._device + count))
        for index in devices:
            if rebel.get_npu_name(index) is None:
                raise messages.no_npu(index, rebel.device_count())
        try:
            with scratch.folder() as folder:
                path = folder / "program.rbln"
                path.write_bytes(file)
                compiled = rebel.RBLNCompiledModel(str(path))
                where = devices if count > 1 else self._device
                runtime = rebel.Runtime(compiled, tensor_type="pt", device=where)
        except Exception as error:
            raise messages.of_running("load", error) from error
        return Loaded(runtime)
