"""Where a step's model lies, and what runs its programs there: the CPU, or one NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract import device as devices
from rm_abstract.base.decline import Decline

_BRIDGE = "torch"
_GPU = "cuda"  # torch's name of the kind, and our backend's


class Place:
    """The device of parameters, states and batches; programs are for it alone."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.kind = device, device.type
        self.index = device.index or 0  # of the device, among its backend's
        self._copies: dict[str, torch.Tensor] = {}

    def check(self) -> None:
        """Raises Decline where nothing is compiled for."""
        if self.kind not in ("cpu", _GPU):
            raise Decline("RM703", f"the model is on {self.device}")
        if self.kind == _GPU and torch.cuda.is_current_stream_capturing():
            raise Decline("RM103", "a CUDA graph of the script's own is being captured")

    def backends(self) -> list[str]:
        """Whose kernels the programs run, in order. Raises Decline where there are none."""
        devices.load_plugins(gpu=self.kind == _GPU)
        rows = {row["name"]: row for row in _core.backend.backends()}
        usable = [name for name, row in rows.items() if row["available"]]
        if self.kind != _GPU:
            return [name for name in ("cpu", _BRIDGE) if name in usable]
        if _GPU not in usable:
            why = rows[_GPU]["reason"] if _GPU in rows else "its plugin is not built"
            raise Decline("RM401", f"the model is on {self.device}: {why}")
        return [_GPU]

    def there(self, t: torch.Tensor) -> torch.Tensor:
        return t if t.device == self.device else t.to(self.device)

    def follow(self, name: str, t: torch.Tensor) -> torch.Tensor:
        """A small tensor of the host as programs read it: itself, or its copy, which keeps its
        place. Work that was launched before reads what it held then."""
        if self.kind != _GPU:
            return t
        copy = self._copies.get(name)
        if copy is None or copy.shape != t.shape or copy.dtype != t.dtype:
            copy = self._copies[name] = torch.empty_like(t, device=self.device)
        # Of memory that is not pinned the driver has taken a copy when this returns.
        return copy.copy_(t, non_blocking=True)


def device_type(parameters: Iterable[torch.Tensor]) -> str:
    """Of the first of them; the CPU's without any."""
    return next((p.device.type for p in parameters), "cpu")


def place_of(parameter: Any) -> Place:
    """The place of a model with this parameter; None: one that has none."""
    return Place(torch.device("cpu") if parameter is None else parameter.device)
