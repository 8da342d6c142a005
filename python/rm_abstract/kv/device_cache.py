"""DeviceCache: a transformers cache whose keys and values lie in buffers with room to grow.

A program appends to the buffers in place; eager code sees an ordinary DynamicCache. With a
`residence` (residence.py) the buffers may be on a device with a compiler of its own. Invariant: of
each buffer ``[batch, heads, capacity, size]`` the first ``length`` positions are the content, the
rest is finite and never read. A step that fails leaves ``length`` where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from rm_abstract.kv.residence import LayerShape, Residence

_Buffer = torch.Tensor | None

_CPU = torch.device("cpu")
_SMALLEST = 64
_LARGEST_DOUBLING = 1024


def capacity_for(length: int) -> int:
    """The bucket for `length` positions: powers of two from 64, from 1024 on multiples of 1024."""
    if length >= _LARGEST_DOUBLING:
        return -(-length // _LARGEST_DOUBLING) * _LARGEST_DOUBLING
    capacity = _SMALLEST
    while capacity < length:
        capacity *= 2
    return capacity


class DeviceLayer(cast("Any", DynamicLayer)):  # type: ignore[misc]
    """Keys and values of one layer. A sliding window is a matter of the mask: all is kept."""

    def __init__(self, sliding_window: int | None = None) -> None:
        self.key_buffer: torch.Tensor | None = None
        self.value_buffer: torch.Tensor | None = None
        self.length = 0
        self.place = _CPU  # where buffers are made
        super().__init__()
        self.is_sliding = sliding_window is not None
        self.sliding_window = sliding_window

    # ---- what transformers reads and assigns ---------------------------------------------------

    @property
    def keys(self) -> torch.Tensor | None:
        """``[batch, heads, length, size]``, a view of the buffer; None before the first update."""
        return None if self.key_buffer is None else self.key_buffer[:, :, : self.length]

    @keys.setter
    def keys(self, content: torch.Tensor | None) -> None:
        self.key_buffer = self._stored(content, self.key_buffer)
        self.length = 0 if content is None else content.shape[-2]

    @property
    def values(self) -> torch.Tensor | None:
        """``[batch, heads, length, size]``, as `keys`."""
        return None if self.value_buffer is None else self.value_buffer[:, :, : self.length]

    @values.setter
    def values(self, content: torch.Tensor | None) -> None:
        self.value_buffer = self._stored(content, self.value_buffer)

    def _stored(
        self, content: torch.Tensor | None, buffer: torch.Tensor | None
    ) -> torch.Tensor | None:
        if content is None:
            return None
        if buffer is not None and content.data_ptr() == buffer.data_ptr():
            same = content.shape[:2] == buffer.shape[:2] and content.stride() == buffer.stride()
            if same and content.shape[-1] == buffer.shape[-1]:
                return buffer  # a shorter view of what is there already
        room = capacity_for(content.shape[-2])
        fresh = _zeros((*content.shape[:2], room, content.shape[-1]), content.dtype, content.device)
        fresh[:, :, : content.shape[-2]] = content
        return fresh

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.place = key_states.device
        heads, key, value = key_states.shape[1], key_states.shape[-1], value_states.shape[-1]
        shape = (heads, key, value, key_states.dtype)
        if self.key_buffer is None or self.shape() != shape or self.batch() != len(key_states):
            self.make_room(len(key_states), shape, key_states.shape[-2])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends, as DynamicLayer.update; returns views of all that is held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self.grow(end)
        assert self.key_buffer is not None and self.value_buffer is not None
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self.length = end
        return self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        self.key_buffer = self.value_buffer = None
        self.length = 0
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove >= 0 or not self.is_initialized:
            super().crop(tokens_to_remove)  # nothing to do, or transformers' own error
            return
        # int: older transformers give a tensor, and a length that is one cannot be captured.
        self.length = max(self.length + int(tokens_to_remove), 0)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.length:
            assert self.key_buffer is not None and self.value_buffer is not None
            self.key_buffer = self.key_buffer.index_select(0, beam_idx)
            self.value_buffer = self.value_buffer.index_select(0, beam_idx)

    # ---- buffers -------------------------------------------------------------------------------

    def capacity(self) -> int:
        return 0 if self.key_buffer is None else self.key_buffer.shape[2]

    def batch(self) -> int:
        return 0 if self.key_buffer is None else self.key_buffer.shape[0]

    def shape(self) -> LayerShape:
        keys, values = self.key_buffer, self.value_buffer
        assert keys is not None and values is not None
        return (keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)

    def make_room(self, batch: int, shape: LayerShape, length: int) -> None:
        """Empty buffers for at least `length` positions."""
        heads, key, value, dtype = shape
        room = capacity_for(length)
        self.key_buffer = _zeros((batch, heads, room, key), dtype, self.place)
        self.value_buffer = _zeros((batch, heads, room, value), dtype, self.place)
        self.length = 0

    def grow(self, length: int) -> None:
        """Room for `length` positions; the content stays."""
        if length <= self.capacity():
            return
        keys, values, held = self.keys, self.values, self.length
        assert keys is not None and values is not None
        self.make_room(self.batch(), self.shape(), length)
        assert self.key_buffer is not None and self.value_buffer is not None
        self.key_buffer[:, :, :held] = keys
        self.value_buffer[:, :, :held] = values
        self.length = held

    def started(self, length: int) -> None:
        """What a program wrote up to `length` is content now."""
        self.length = length
        self.dtype, self.device = self.shape()[3], self.place
        self.is_initialized = True


class ResidentLayer(DeviceLayer):
    """A layer whose buffers are its cache's residence's: reading one
    brings all of them into this process."""

    def __init__(self, residence: Residence, index: int, sliding_window: int | None = None) -> None:
        self._residence, self._index = residence, index
        super().__init__(sliding_window)

    key_buffer = property(
        lambda self: self._residence.buffer(2 * self._index),
        lambda self, buffer: self._residence.put(2 * self._index, buffer),
    )
    value_buffer = property(
        lambda self: self._residence.buffer(2 * self._index + 1),
        lambda self, buffer: self._residence.put(2 * self._index + 1, buffer),
    )

    @staticmethod
    def of(residence: Residence, index: int, sliding_window: int | None) -> ResidentLayer:
        """A layer of a residence that may hold something already."""
        layer = ResidentLayer(Residence(index + 1), index, sliding_window)
        layer._residence = residence
        return layer

    def _stored(self, content: _Buffer, buffer: _Buffer) -> _Buffer:
        if content is not None:
            self._residence.history.whole = False  # it came from no call
        return super()._stored(content, buffer)

    def reset(self) -> None:
        self._residence.drop()
        super().reset()

    def capacity(self) -> int:
        return self._residence.capacity if self._residence.on_device else super().capacity()

    def batch(self) -> int:
        return self._residence.batch if self._residence.on_device else super().batch()

    def shape(self) -> LayerShape:
        return self._residence.shapes[self._index] if self._residence.on_device else super().shape()


def _zeros(shape: Sequence[int], dtype: torch.dtype, place: torch.device) -> torch.Tensor:
    # A tensor made in inference mode could not be written outside of it.
    with torch.inference_mode(False):
        return torch.zeros(tuple(shape), dtype=dtype, device=place)


@dataclass
class CacheNotes:
    """What is remembered about the caches of one model."""

    shapes: tuple[LayerShape, ...] | None = None  # seen, and not what the configuration says
    refused: bool = False


class DeviceCache(cast("Any", DynamicCache)):  # type: ignore[misc]
    """A DynamicCache of DeviceLayers, all equally long."""

    def __init__(
        self,
        layers: Sequence[DeviceLayer],
        expected: Sequence[LayerShape],
        reserve: int = 0,
        notes: CacheNotes | None = None,
        residence: Residence | None = None,
    ) -> None:
        cast("Any", Cache).__init__(self, layers=list(layers))
        self.residence = residence  # for layers that may be on a device
        self.expected = tuple(expected)  # what buffers are made for
        self.reserved = reserve  # positions to make room for then
        self._notes = notes
        self.on_trial = False  # what fails now says nothing about programs for this cache

    @property
    def length(self) -> int:
        return int(self.layers[0].length)

    @property
    def capacity(self) -> int:
        return min(int(layer.capacity()) for layer in self.layers)

    def shapes(self) -> tuple[LayerShape, ...]:
        """One a layer. Only for a cache whose buffers exist."""
        return tuple(layer.shape() for layer in self.layers)

    def prepare(self, batch: int, shapes: Sequence[LayerShape], new: int) -> None:
        """Room for `new` more positions; an empty cache gets buffers of these shapes."""
        if self.residence is not None:
            self.residence.to_host()
        if self.length == 0:
            wanted = max(new, self.reserved)
            for layer, shape in zip(self.layers, shapes, strict=True):
                fits = layer.capacity() >= new and layer.batch() == batch
                if not fits or layer.shape() != shape:
                    layer.make_room(batch, shape, wanted)
            return
        for layer in self.layers:
            layer.grow(self.length + new)

    def prepare_on_device(self, batch: int, new: int) -> None:
        """As `prepare`, for a program that has the buffers on its device."""
        assert self.residence is not None
        residence, end = self.residence, self.length + new
        if self.length == 0:
            fits = residence.on_device and residence.batch == batch and residence.capacity >= new
            if not fits or residence.shapes != self.expected:
                residence.start_on_device(
                    batch, self.expected, capacity_for(max(new, self.reserved))
                )
        elif not residence.on_device:
            for layer in self.layers:
                layer.grow(end)
        elif residence.capacity < end:
            residence.capacity = capacity_for(end)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select(beam_idx, super().reorder_cache)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices, super().batch_select_indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self.layers[0].batch()).repeat_interleave(repeats)
        self._select(rows, lambda _: super(DeviceCache, self).batch_repeat_interleave(repeats))

    def _select(self, rows: torch.Tensor, otherwise: Callable[[Any], None]) -> None:
        if self.residence is None:
            otherwise(rows)
        elif self.length:
            self.residence.select(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceCache:
        return self.copied()

    def learn(self) -> None:
        """The model's keys and values are of other shapes than expected: remembered for it."""
        if self._notes is not None:
            self._notes.shapes = self.shapes()

    def refuse(self) -> None:
        """Programs for this cache failed or were declined: the model gets no other one."""
        if self._notes is not None and self._notes.shapes is None and not self.on_trial:
            self._notes.refused = True

    def advance(self, length: int) -> None:
        """What programs wrote up to `length` is content now."""
        for layer in self.layers:
            layer.started(length)

    def copied(self) -> DeviceCache:
        """The same content in memory of its own."""
        layers: list[Any] = []
        residence = None if self.residence is None else self.residence.copied()
        for layer in self.layers:
            if residence is None:
                fresh = DeviceLayer(layer.sliding_window)
                fresh.key_buffer = _copy(layer.key_buffer)
                fresh.value_buffer = _copy(layer.value_buffer)
            else:
                fresh = ResidentLayer.of(residence, len(layers), layer.sliding_window)
            fresh.length, fresh.place = layer.length, layer.place
            fresh.is_initialized = layer.is_initialized
            if layer.is_initialized:
                fresh.dtype, fresh.device = layer.dtype, layer.device
            layers.append(fresh)
        return DeviceCache(layers, self.expected, self.reserved, None, residence)


def _copy(buffer: _Buffer) -> _Buffer:
    return None if buffer is None else buffer.clone()


class DevicePair(cast("Any", EncoderDecoderCache)):  # type: ignore[misc]
    """An EncoderDecoderCache whose self-attention half is a DeviceCache.

    The cross-attention half stays transformers' own: filled once, constant from then on.
    """


def from_dynamic(
    cache: Any,
    shape: LayerShape,
    reserve: int,
    notes: CacheNotes,
    on_device: bool = False,
    place: torch.device = _CPU,
) -> DeviceCache | None:
    """The device cache for an empty DynamicCache; None for layers of another kind.

    `shape` is what the configuration says of every layer; what `notes` learned counts more. With
    `on_device` it has a residence, for a device that keeps the buffers; else they are made on
    `place`.
    """
    layers: list[DeviceLayer] = []
    residence = Residence(len(cache.layers)) if on_device else None
    for layer in cache.layers:
        kind = type(layer).__name__
        if kind not in ("DynamicLayer", "DynamicSlidingWindowLayer") or layer.is_initialized:
            return None
        if getattr(layer, "record_past", False):
            return None
        window = getattr(layer, "sliding_window", None)
        layers.append(
            DeviceLayer(window)
            if residence is None
            else ResidentLayer(residence, len(layers), window)
        )
    if not layers or notes.refused:
        return None
    for layer in layers:
        layer.place = place
    shapes = notes.shapes if notes.shapes is not None else (shape,) * len(layers)
    return DeviceCache(layers, shapes, reserve, notes, residence)


def expected_shape(model: Any) -> LayerShape | None:
    """Heads, sizes and type of keys and values by the configuration; None when it does not say."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        return None
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return (int(kv_heads), int(size), int(size), model.dtype)
