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


class Slots:
    """What is sent to one place on the GPU, again and again, from rows of pinned memory in turn: of
    other memory the driver may wait for all work before a copy. A row is written again when the
    stream has gone past the copy from it."""

    def __init__(self, like: torch.Tensor, device: torch.device, rows: int = 64) -> None:
        self.there = torch.empty_like(like, device=device)
        shape, pinned = (rows, *like.shape), device.type == _GPU
        self._rows = list(torch.empty(shape, dtype=like.dtype, pin_memory=pinned))
        self._next = 0
        self._passed: list[Any] = [None, None]  # events behind the copies of each half

    def send(self, t: torch.Tensor) -> torch.Tensor:
        """The place, which holds ``t`` for work that is launched behind this."""
        half, within = divmod(self._next, len(self._rows) // 2)
        if within == 0:
            self._wait(half)
        row = self._rows[self._next]
        row.copy_(t)
        self.there.copy_(row, non_blocking=True)
        self._next = (self._next + 1) % len(self._rows)
        if self._next % (len(self._rows) // 2) == 0:
            self._passed[half] = self._mark()
        return self.there

    def _mark(self) -> Any:
        """An event behind all copies until now: streams that train a model wait for each other."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.there.device))
        return event

    def _wait(self, half: int) -> None:
        if self._passed[half] is not None:
            self._passed[half].synchronize()


class Place:
    """The device of parameters, states and batches; programs are for it alone."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.kind = device, device.type
        self.index = device.index or 0  # of the device, among its backend's
        self._sent: dict[str, Slots] = {}

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

    @property
    def gradient_operators(self) -> list[str]:
        """Those that gradients are better made of here than of the operators they consist of."""
        return ["layer_norm_backward", "rms_norm_backward", "sdpa_backward"]

    @property
    def on_gpu(self) -> bool:
        return self.kind == _GPU

    def there(self, t: torch.Tensor) -> torch.Tensor:
        return t if t.device == self.device else t.to(self.device)

    def follow(self, name: str, t: torch.Tensor) -> torch.Tensor:
        """A small tensor of the host as programs read it: itself, or its copy, which keeps its
        place. Work that was launched before reads what it held then."""
        if self.kind != _GPU:
            return t
        slots = self._sent.get(name)
        if slots is None or slots.there.shape != t.shape or slots.there.dtype != t.dtype:
            slots = self._sent[name] = Slots(t, self.device)
        return slots.send(t)


def device_type(parameters: Iterable[torch.Tensor]) -> str:
    """Of the first of them; the CPU's without any."""
    return next((p.device.type for p in parameters), "cpu")


def place_of(parameter: Any) -> Place:
    """The place of a model with this parameter; None: one that has none."""
    return Place(torch.device("cpu") if parameter is None else parameter.device)
