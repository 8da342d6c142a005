"""Where the keys and values of one DeviceCache are: buffers of this process, or states of a device.

Invariant: the content is in one place. A device's program updates it there; whoever touches the
buffers brings it back first; and when the device's worker is gone, the model is given again what it
was given before (history.py), by the original, so that a generation goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from rm_abstract import _core
from rm_abstract.base.errors import ExecutionError
from rm_abstract.kv.history import History

POSITIONS = 2  # the axis of a buffer [batch, heads, positions, size]
LayerShape = tuple[int, int, int, torch.dtype]  # heads, size of a key, size of a value, type
Types = Sequence[tuple[tuple[int, ...], torch.dtype]]


class StateStore(Protocol):
    """A device that keeps tensors between the runs of its programs. Each method raises CoreError
    when the device's worker is gone."""

    def make_states(self, types: Types) -> Any:
        """New states of these shapes and types, all zeros."""

    def copy_states(self, to: Any, source: Any, **region: Any) -> None:
        """Copies a part on the device (src/worker/protocol.hpp: StatesRegion)."""

    def write_states(self, states: Any, tensors: Sequence[torch.Tensor], axis: int) -> None:
        """Copies tensors of this process to the start of every state."""

    def read_states(self, states: Any, types: Types, axis: int) -> list[torch.Tensor]:
        """The first positions of every state, as many as ``types`` have along ``axis``."""


class Residence:
    """The buffers of all layers, ``[keys 0, values 0, keys 1, ...]``, wherever they are."""

    def __init__(self, layers: int) -> None:
        self.buffers: list[torch.Tensor | None] = [None] * (2 * layers)
        self.history = History()
        self.replay: Callable[[History], list[torch.Tensor]] | None = None
        self.replays = 0  # how often the content was made anew
        self.batch = self.capacity = 0  # what the cache says of buffers that are not here
        self.shapes: tuple[LayerShape, ...] = ()
        self._on_device = False
        self._device: StateStore | None = None
        self._states: Any = None  # None while on a device: zeros that nobody made yet
        self._rows = self._room = 0  # the states' own batch and capacity
        self._placeholders: tuple[Any, list[torch.Tensor]] | None = None

    @property
    def on_device(self) -> bool:
        """True while the content is not in this process."""
        return self._on_device

    def placeholders(self) -> list[torch.Tensor]:
        """Tensors of the buffers' shapes and types, for calls that need no more. Never read."""
        key = (self.batch, self.capacity, self.shapes)
        if self._placeholders is None or self._placeholders[0] != key:
            with torch.inference_mode(False):
                made = [torch.empty(d, dtype=t) for d, t in self._types(self.batch, self.capacity)]
            self._placeholders = (key, made)
        return self._placeholders[1]

    def _types(self, batch: int, room: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        out: list[tuple[tuple[int, ...], torch.dtype]] = []
        for heads, key, value, dtype in self.shapes:
            out += [((batch, heads, room, size), dtype) for size in (key, value)]
        return out

    # ---- to this process ----------------------------------------------------------------------

    def buffer(self, index: int) -> torch.Tensor | None:
        """One buffer, to be read or written. Raises ExecutionError when the content is lost."""
        self.to_host()
        return self.buffers[index]

    def put(self, index: int, buffer: torch.Tensor | None) -> None:
        self.to_host()
        self.buffers[index] = buffer

    def to_host(self) -> None:
        """Brings the content into this process. Raises ExecutionError when it is lost."""
        if not self._on_device:
            return
        with torch.inference_mode(False):
            types = self._types(self.batch, self.capacity)
            buffers = [torch.zeros(dims, dtype=dtype) for dims, dtype in types]
            if self._states is not None:
                for buffer, content in zip(buffers, self._content(), strict=True):
                    buffer[:, :, : content.shape[POSITIONS]] = content
        self.buffers[:] = buffers
        self._leave_device()

    def peek(self, end: int) -> list[torch.Tensor]:
        """The first positions of every buffer as the device has them now. Raises CoreError."""
        assert self._device is not None
        return self._device.read_states(self._states, self._types(self.batch, end), POSITIONS)

    def _content(self) -> Sequence[torch.Tensor]:
        assert self._device is not None
        try:
            room = min(self._room, self.capacity)
            return self._device.read_states(self._states, self._types(self.batch, room), POSITIONS)
        except _core.CoreError as error:
            return self._again(error)

    def _again(self, error: Any) -> list[torch.Tensor]:
        if self.replay is None or not self.history.whole:
            raise ExecutionError(
                f"{error}; the keys and values it held are lost, and they came from more than "
                "tokens; try this generation again",
                code=error.reason or "RM307",
            ) from error
        content = self.replay(self.history)
        self.replays += 1
        return content

    def _leave_device(self) -> None:
        self._on_device, self._states, self._device = False, None, None
        self._rows = self._room = 0

    def drop(self) -> None:
        """Forgets everything."""
        self._leave_device()
        self.buffers[:] = [None] * len(self.buffers)
        self.history = History()

    # ---- to the device ------------------------------------------------------------------------

    def start_on_device(self, batch: int, shapes: Sequence[LayerShape], capacity: int) -> None:
        """An empty cache: zeros that the device makes when a program runs."""
        self.buffers[:] = [None] * len(self.buffers)
        self._leave_device()
        self.batch, self.capacity, self.shapes = batch, capacity, tuple(shapes)
        self._on_device = True

    def enter(self, device: StateStore, rows: int) -> Any:
        """The states a program of ``rows`` rows and this capacity updates. Raises CoreError."""
        if self._states is not None and not (self._states.alive and self._device is device):
            self.to_host()
        if self._states is not None and (self._rows, self._room) == (rows, self.capacity):
            return self._states
        if not self._on_device:
            self._note_types()
        fresh = device.make_states(self._types(rows, self.capacity))
        if self._states is not None:
            device.copy_states(fresh, self._states, axis=POSITIONS)
        elif not self._on_device:
            kept = [buffer for buffer in self.buffers if buffer is not None]
            device.write_states(fresh, kept, POSITIONS)
            self.buffers[:] = [None] * len(self.buffers)
        self._on_device, self._states, self._device = True, fresh, device
        self._rows, self._room = rows, self.capacity
        return fresh

    def _note_types(self) -> None:
        pairs = zip(self.buffers[::2], self.buffers[1::2], strict=True)
        shapes = []
        for keys, values in pairs:
            assert keys is not None and values is not None
            shapes.append((keys.shape[1], keys.shape[3], values.shape[3], keys.dtype))
            self.batch, self.capacity = keys.shape[0], keys.shape[POSITIONS]
        self.shapes = tuple(shapes)

    def close_gap(self, start: int, gap: int, count: int) -> None:
        """Moves ``count`` positions behind a gap of padding to its start, on the device."""
        assert self._device is not None
        device, old = self._device, self._states
        fresh = device.make_states(self._types(self._rows, self._room))
        if start:
            device.copy_states(fresh, old, axis=POSITIONS, count=start)
        device.copy_states(
            fresh, old, axis=POSITIONS, from_start=start + gap, to_start=start, count=count
        )
        self._states = fresh

    def select(self, rows: torch.Tensor) -> None:
        """Rows of the batch in this order, where the content is."""
        if self._on_device and self._states is not None:
            assert self._device is not None
            device, many = self._device, max(self._rows, len(rows))
            try:
                fresh = device.make_states(self._types(many, self._room))
                device.copy_states(fresh, self._states, axis=POSITIONS, rows=rows.tolist())
            except _core.CoreError:
                self.to_host()
            else:
                self._states, self._rows = fresh, many
        if self._on_device:
            self.batch = len(rows)
        else:
            self.buffers[:] = [None if b is None else b.index_select(0, rows) for b in self.buffers]
        self.history.select(rows)

    def copied(self) -> Residence:
        """The same content in memory of its own."""
        fresh = Residence(len(self.buffers) // 2)
        fresh.batch, fresh.capacity, fresh.shapes = self.batch, self.capacity, self.shapes
        fresh.history, fresh.replay = self.history.copied(), self.replay
        if self._on_device and self._states is not None:
            assert self._device is not None
            device, old = self._device, self._states
            try:
                mine = device.make_states(self._types(self._rows, self._room))
                device.copy_states(mine, old, axis=POSITIONS)
            except _core.CoreError:
                self.to_host()
            else:
                fresh._states, fresh._device = mine, device
                fresh._rows, fresh._room = self._rows, self._room
        fresh._on_device = self._on_device
        if not self._on_device:
            with torch.inference_mode(False):
                fresh.buffers = [None if b is None else b.clone() for b in self.buffers]
        return fresh
