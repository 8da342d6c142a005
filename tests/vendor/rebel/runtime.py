"""`rebel.Runtime`: a compiled model on an NPU."""

from __future__ import annotations

import io
import os
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rebel import faults
from rebel.compiled_model import VERSION, RBLNCompiledModel
from rebel.core.exception import RBLNRuntimeError
from rebel.devices import family, get_npu_name


class _Rounding(TorchDispatchMode):
    """Rounds what an operator gives. Source: public notes that the compiler computes in bf16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, _rounded, result)


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().to(tensor.dtype) if tensor.dtype is torch.float32 else tensor


class _Memory(dict[str, torch.Tensor]):
    """The tensors that stay on one device, of the programs compiled with one context."""


_stay: weakref.WeakValueDictionary[tuple[str, int], _Memory] = weakref.WeakValueDictionary()


class Runtime:
    """Source: docs.rbln.ai, Runtime: takes a compiled model or a path; `tensor_type` np (the
    default) or pt; `device` an index or as many as were compiled for, a negative one is a dummy;
    `timeout` in seconds, exactly an int (a TypeError of the binding otherwise, in public logs)."""

    def __init__(
        self,
        compiled_model: RBLNCompiledModel | str | os.PathLike[str],
        *,
        tensor_type: str = "np",
        device: int | list[int] | None = None,
        activate_profiler: bool | None = None,
        timeout: int | None = None,
    ) -> None:
        if tensor_type not in ("np", "pt"):
            raise ValueError(f"tensor_type must be np or pt, got {tensor_type}")
        if timeout is not None and type(timeout) is not int:
            raise TypeError("create_sync_runtime(): incompatible function arguments.")
        model = compiled_model
        if not isinstance(model, RBLNCompiledModel):
            model = RBLNCompiledModel(model)
        faults.crash_or_hang("load")
        meta = model._meta
        devices = [device] if isinstance(device, int) else device or list(range(meta["devices"]))
        self._is_dummy = any(index < 0 for index in devices)
        if not self._is_dummy:
            _check_devices(model, devices)
        if faults.happens("out_of_memory"):  # text: optimum-rbln, pull request 552
            raise RBLNRuntimeError("SYS_EBUSY: Lack of device memory. (code: -16)")
        self._model, self._tensor_type = model, tensor_type
        self._module = torch.export.load(io.BytesIO(model._program)).module()
        self._inputs = model._inputs()
        self._given = [one for one in self._inputs if one.name not in meta["static"]]
        self._memory = _stay.setdefault((meta["context"], devices[0]), _Memory())
        for one in self._inputs:
            if one.name in meta["static"] and one.name not in self._memory:
                self._memory[one.name] = torch.zeros(meta["static"][one.name], dtype=one.dtype)

    def run(self, *args: Any, out: list[torch.Tensor] | None = None, **named: Any) -> Any:
        """Source: docs.rbln.ai: inputs by position or by the names of `input_info`; one result
        bare, several as a list. `out` takes the results (optimum-rbln)."""
        if self._is_dummy:
            raise RBLNRuntimeError("INIT_INTERNAL: a dummy device cannot run.")
        faults.crash_or_hang("run")
        if faults.happens("run_error"):  # text: public logs of vllm-rbln
            raise RBLNRuntimeError("Inference failed: 501")
        if faults.happens("device_lost"):  # docs.rbln.ai, error codes: SYS_ is the driver's stage
            raise RBLNRuntimeError("SYS_ENODEV: No such device. (code: -19)")
        given = list(args) + [named[one.name] for one in self._given[len(args) :]]
        tensors = [torch.as_tensor(value) for value in given]
        for tensor, one in zip(tensors, self._given, strict=True):
            if tuple(tensor.shape) != one.shape:  # text: public logs
                raise RBLNRuntimeError(
                    f"{one.name} (shape={tuple(tensor.shape)}) has a shape different to required "
                    f"shape {one.shape}"
                )
            if tensor.dtype != one.dtype:
                raise RBLNRuntimeError(f"{one.name} has dtype {tensor.dtype}, expected {one.dtype}")
        results = self._compute(tensors)
        if out is not None:
            for slot, result in zip(out, results, strict=True):
                slot.copy_(result)
            results = list(out)
        if self._tensor_type == "np":
            results = [result.numpy() for result in results]
        return results[0] if len(results) == 1 else results

    __call__ = run

    def _compute(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        left = iter(given)
        tensors = [
            self._memory[one.name] if one.name in self._memory else next(left)
            for one in self._inputs
        ]
        with torch.no_grad():
            if os.environ.get("REBEL_NUMERICS") == "bf16":
                with _Rounding():
                    found = self._module(*tensors)
            else:
                found = self._module(*tensors)
        results = torch.utils._pytree.tree_leaves(found)
        if self._model._meta["wrong"] or faults.happens("wrong_numbers"):
            results = [r * 1.05 if r.is_floating_point() else r for r in results]
        return results


def _check_devices(model: RBLNCompiledModel, devices: list[int]) -> None:
    """Source: docs.rbln.ai, create_runtime: RBLNRuntimeError when the NPU is missing or is not the
    compiled model's; versions are compared here too (optimum-rbln's notes), not while loading."""
    if len(devices) != model._meta["devices"]:  # docs.rbln.ai: as many as were compiled for
        raise RBLNRuntimeError(
            f"INIT_INTERNAL: {len(devices)} devices for a model of {model._meta['devices']}."
        )
    for index in devices:
        name = get_npu_name(index)
        if name is None:
            raise RBLNRuntimeError(f"INIT_INTERNAL: NPU {index} is not available.")
        if family(name) != family(model._meta["npu"]):
            raise RBLNRuntimeError(
                f"INIT_INTERNAL: compiled for {model._meta['npu']}, which does not match {name}."
            )
    version = model._meta["version"]
    if version != VERSION:
        raise RBLNRuntimeError(
            f"INIT_VERSION_MISMATCH: compiled by {version}, which does not match {VERSION}."
        )
