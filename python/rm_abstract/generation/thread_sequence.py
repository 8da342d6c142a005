"""Sequences of threads that call `generate`, as the scheduler's thread and their own see them.

The thread computed the prompt; from then on it waits, and chooses its tokens itself where more is
asked for than the largest logit: by its own processors, criteria, streamers and random draws.
Invariant: a sequence's thread and the scheduler's never run its user's objects at the same time,
and what is recorded of it are whole steps, so that it can go on alone from any of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from rm_abstract.kv import kv_cache
from rm_abstract.kv.device_cache import DeviceCache, DeviceLayer
from rm_abstract.kv.names import NAMES, cache_name

OWN = ("input_ids", "position_ids", "attention_mask", *NAMES)


class ThreadSequence:
    """Implements rows.Row. `inputs` are the arguments of its next step.

    With `chooses` its thread answers every step with `answer`; else the largest logit counts, until
    one of `eos` comes or `limit` tokens were made.
    """

    def __init__(
        self, inputs: dict[str, Any], limit: int, eos: list[int], chooses: bool = False
    ) -> None:
        self.cache: DeviceCache = inputs[cache_name()]
        self.last: int | None = int(inputs["input_ids"])
        self.position = int(inputs["position_ids"])
        self.inputs, self.kind = inputs, kind(inputs)
        self.tokens: list[int] = []  # what it got here, its own choices left out
        self.steps = 0  # that were made for it
        self.logits: torch.Tensor | None = None  # ``[vocabulary]``, waiting for its choice
        self.gone = False  # nothing is made for it any more
        self.in_own_cache = True  # its own cache holds what was made; else the common buffers do
        self.lost = False  # this process is a fork, and who made its steps is not in it
        self.chooses, self.daemon = chooses, threading.current_thread().daemon
        self._mask, self._limit, self._eos = inputs.get("attention_mask"), limit, eos
        self._changed = threading.Condition()

    @staticmethod
    def fits(inputs: dict[str, Any], cache: Any) -> bool:
        """One token of one row, its position given, and no padding but on the left."""
        ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
        mask, held = inputs.get("attention_mask"), inputs.get(cache_name())
        if ids is None or positions is None or not kv_cache.is_device(cache) or held is not cache:
            return False
        if mask is not None:
            if tuple(mask.shape) != (1, held.length + 1):
                return False
            if not bool(mask[0, int(mask[0].argmax()) :].all()):
                return False
        return bool(ids.shape == (1, 1) and positions.shape == (1, 1))

    def shown(self) -> torch.Tensor | None:
        """The numbers of the positions of its cache that count; None: all of them."""
        if self._mask is None or bool(self._mask.all()):
            return None
        numbers: torch.Tensor = self._mask[0, : self.cache.length].nonzero()[:, 0]
        return numbers

    # ---- the scheduler's thread ------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self.gone

    def left(self) -> int:
        return self._limit - self.steps

    def accept(self, logits: Callable[[], torch.Tensor], largest: int) -> None:
        self.steps += 1
        if self.chooses:
            with self._changed:
                self.logits = logits().clone()
                self._changed.notify_all()
            return
        self.tokens.append(largest)
        self.last = largest
        if largest in self._eos or self.steps >= self._limit:
            self.leave()

    def failed(self, error: Exception) -> None:
        """It goes home before this, and on alone."""
        self.leave()

    # ---- any thread ------------------------------------------------------------------------------

    def leave(self) -> None:
        """Nothing more is made for it."""
        with self._changed:
            self.gone = True
            self._changed.notify_all()

    def forked(self) -> None:
        """In a child made by fork: whoever held the lock is not in it."""
        self._changed = threading.Condition()
        self.lost = self.gone = True

    def wait(self) -> torch.Tensor | None:
        """The logits to choose from; None once there will be none."""
        with self._changed:
            while self.logits is None and not self.gone:
                self._changed.wait()
            logits, self.logits = self.logits, None
            return logits


class _Itself:
    """A value that is the same as itself only. Held, so that no other gets its address."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def kind(inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Steps of one kind may be made together: arguments that are not a row's own are the same."""
    named = [(k, _compared(inputs[k])) for k in sorted(inputs) if k not in OWN]
    return (*named, inputs[cache_name()].shapes())


def _compared(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return type(value), repr(value)  # tells -0.0 from 0.0, and a nan is itself
    return _Itself(value)  # the text of a large tensor leaves out most of it


def empty_like(cache: DeviceCache) -> DeviceCache:
    """A cache for rows like those of this one."""
    layers = [DeviceLayer(layer.sliding_window) for layer in cache.layers]
    held = cache.layers[0].key_buffer is not None
    return DeviceCache(layers, cache.shapes() if held else cache.expected)
