"""Where a model's programs run: on the host, or on a GPU that the session uses.

On a GPU the weights lie on it once, whoever put them there: a model that was moved there is used as
it lies, one on the CPU is copied. Calls follow the model: its inputs come from where it is and its
outputs go back there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.decline import Decline
from rm_abstract.calls.call import CallSpec, objects_in
from rm_abstract.device import Resolved

_CPU = torch.device("cpu")
_KDL_CPU, _KDL_CUDA = 1, 2  # DLPack's device types


def placement_of(device: Resolved) -> Placement:
    """The placement of a session's device; any device that is no GPU is the host's."""
    for row in _core.backend.backends():
        if row["name"] != device.backend or not row["kernels"]:
            continue
        kind, number = row["devices"][device.index]["dl_device"]
        if kind == _KDL_CUDA:
            return GpuPlacement(torch.device("cuda", int(number)), device.name)
    return Placement()


class Placement:
    """The host: everything is used where it lies."""

    on_gpu = False  # programs run on a device that has its own memory
    index = 0  # of the device, among its backend's

    def check(self, model_device: torch.device) -> None:
        """Raises Decline when a model there cannot be served."""
        if model_device.type != "cpu":
            raise Decline("RM119", f"the model is on {model_device}, programs run on the CPU")

    def check_inner(self, model_device: torch.device) -> None:
        """Raises Decline when a model inside a routed one, there, gets no program of its own."""

    def check_call(self, model_device: torch.device, spec: CallSpec) -> None:
        """Raises Decline for a call that a model there cannot be served for."""

    def weights(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights as a program is given them."""
        return weights

    def forget(self) -> None:
        """Weights changed in a way their versions may not show."""

    def placed(self, program: Any, model_device: torch.device) -> Any:
        """The program as calls use it; `model_device` is where the weights are."""
        return program

    def wait(self) -> None:
        """Until the device has done what it was given: before a clock is read."""


class GpuPlacement(Placement):
    on_gpu = True

    def __init__(self, device: torch.device, name: str) -> None:
        self._device, self._name = device, name
        self._lock = threading.Lock()
        self._copies: dict[str, tuple[Hashable, torch.Tensor]] = {}
        self.index = device.index

    def check(self, model_device: torch.device) -> None:
        if model_device not in (_CPU, self._device):
            where = f"the model is on {model_device}, the session's device is {self._name}"
            raise Decline("RM119", where)

    def check_inner(self, model_device: torch.device) -> None:
        if model_device != self._device:
            where = f"a model inside another one, on {model_device}: its weights would be copied"
            raise Decline("RM119", f"{where} a second time; move it to {self._name}")

    def check_call(self, model_device: torch.device, spec: CallSpec) -> None:
        self.check(model_device)
        caches = [s[1] for s in objects_in(spec) if s[0] == "cache"]
        if any(kind not in ("DeviceCache", "DevicePair") for kind in caches):
            raise Decline(
                "RM114", "a cache of keys and values that generate did not make, on a GPU"
            )

    def weights(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with self._lock:
            return {name: self._copy(name, tensor) for name, tensor in weights.items()}

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._device:
            return tensor
        now = _stamp(tensor)
        known = self._copies.get(name)
        if known is None or now is None or known[0] != now:
            with torch.no_grad():
                known = self._copies[name] = (now, tensor.to(self._device))
        return known[1]

    def forget(self) -> None:
        with self._lock:
            self._copies.clear()

    def placed(self, program: Any, model_device: torch.device) -> Any:
        return GpuProgram(program, self._device, model_device)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)


class GpuProgram:
    """A program on a GPU, called with tensors of the model's device.

    Where that is the CPU, inputs are copied to the GPU, what the program updates in place and its
    results back.
    """

    def __init__(self, program: Any, device: torch.device, model_device: torch.device) -> None:
        self._program, self._device, self._model_device = program, device, model_device
        self._at_home = model_device == device
        self._updated: list[int] = [] if self._at_home else program.updated_inputs()
        for name in ("accept_kernels", "report", "take_trace", "launch_into", "wait_for_packing"):
            setattr(self, name, getattr(program, name))
        # Of whole steps of a generation (generation/step_graph.py); good within one epoch.
        self.recordings: Any = None
        self.epoch = 0

    @property
    def core(self) -> Any:
        """What runs calls of a model that lies on the GPU; None for one that does not."""
        return self._program if self._at_home else None

    def update_weights(self, weights: dict[str, torch.Tensor], shared: Any = None) -> None:
        self.epoch += 1
        self._program.update_weights(weights, shared)

    def start_trace(self) -> None:
        self.epoch += 1
        self._program.start_trace()

    def run(
        self, inputs: Sequence[torch.Tensor], only_accepted: bool = False
    ) -> list[torch.Tensor | None]:
        if torch.cuda.is_current_stream_capturing():
            raise Decline("RM103", "the user's own CUDA graph is being captured")
        if self._at_home:
            number = self._device.index
            for t in inputs:
                if t.get_device() != number:
                    inputs = self._there(inputs)
                    break
        if self._at_home:
            results: list[torch.Tensor | None] = self._program.run(inputs, only_accepted)
            return results
        there = self._there(inputs)
        results = self._program.run(there, only_accepted)
        self.bring_back(there, inputs)
        return [None if r is None else r.to(self._model_device) for r in results]

    @property
    def is_away(self) -> bool:
        """Whether the model, and so the tensors of its calls, lie elsewhere."""
        return not self._at_home

    def brought(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of a call in memory of the GPU, for `decode_step` of a model elsewhere."""
        with torch.inference_mode(False), torch.no_grad():
            return self._there(inputs)

    def bring_back(self, there: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """What runs on `there`, copies of `inputs` on the GPU, updated in place becomes theirs."""
        with torch.no_grad():
            for number in self._updated:
                inputs[number].copy_(there[number])

    def decode_step(
        self,
        inputs: list[torch.Tensor],
        roles: dict[str, int],
        tokens: list[int] | torch.Tensor,
    ) -> tuple[list[torch.Tensor | None], list[int]]:
        """As `_core.Program.decode_step`, with the tensors of the roles on the GPU, `tokens` too
        where they are a tensor. Nothing here waits for it: the largest logits are not known."""
        ids, length = inputs[roles["ids"]], inputs[roles["length"]]
        with torch.no_grad():
            given = tokens if isinstance(tokens, torch.Tensor) else torch.tensor(tokens)
            ids.copy_(given.view(ids.shape))
            if "mask" in roles:
                mask = inputs[roles["mask"]]
                mask.scatter_(1, length.expand(mask.shape[0], 1), 1)
            results: list[torch.Tensor | None] = self._program.run(inputs)
            length.add_(1)
            if "positions" in roles:
                inputs[roles["positions"]].add_(1)
        return results, []

    def kernel_set(self, inputs: Sequence[torch.Tensor]) -> int:
        return int(self._program.kernel_set(self._there(inputs)))

    def describe(self, inputs: Sequence[torch.Tensor]) -> str:
        return str(self._program.describe(self._there(inputs)))

    def profile(self, inputs: Sequence[torch.Tensor], rounds: int = 10) -> Any:
        return self._program.profile(self._there(inputs), rounds)

    def _there(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._model_device != self._device:
            return [t.to(self._device) for t in inputs]
        # As PyTorch: a number may lie on the host, a tensor may not. What a program updates in
        # place is never a copy.
        if any(t.device != self._device and t.dim() for t in inputs):
            where = f"a tensor is on another device than the model, which is on {self._device}"
            raise Decline("RM119", where)
        return [t if t.device == self._device else t.to(self._device) for t in inputs]


def core_of(program: Any) -> tuple[Any, Callable[[], bool] | None]:
    """The core's program of one that runs where its calls' tensors lie, else None; and what makes
    Python decide about a call after all."""
    unless = None
    if isinstance(program, GpuProgram):
        program, unless = program.core, torch.cuda.is_current_stream_capturing
    return (program if isinstance(program, _core.Program) else None), unless


def device_of(module: torch.nn.Module, inputs: Sequence[Any]) -> torch.device:
    """Where a model lies: its weights, or without any the inputs of the call."""
    for group in (module.parameters(), module.buffers(), inputs):
        for value in group:
            if isinstance(value, torch.Tensor):
                return value.device
    return _CPU


def _stamp(tensor: torch.Tensor) -> Hashable:
    """Another one after a write that anything shows; None for a tensor that counts none."""
    if tensor.is_inference():
        return None
    return tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, tensor.stride()
