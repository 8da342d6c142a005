"""A generation step on a whole-program device whose keys and values stay there.

The cache's buffers are states of the device (kv/residence.py), updated in place by the
program; tokens, positions and mask go in, logits come out. New tokens are padded like any others;
where a model needs them padded on the left, the gap this leaves in the cache is closed on the
device after the run. Nothing before the new tokens is written, so a failed step leaves the cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.engines.buckets import TOKEN_INPUTS, Padding
from rm_abstract.engines.device_program import DeviceProgram

if TYPE_CHECKING:
    from rm_abstract.kv.device_cache import DeviceCache
    from rm_abstract.kv.residence import Residence


class ResidentProgram(DeviceProgram):
    """One bucket of a step: batch rows, new tokens, and the room of the cache's buffers."""

    def _check_support(self) -> None:
        roles = self._buckets.roles
        _, *self._buffers = [i for i, role in enumerate(roles) if role.is_past]
        self._tokens = next(i for i, role in enumerate(roles) if role.name in TOKEN_INPUTS)
        self._length_output = int(self._record.caches[0][2][0])
        if set(self._buffers) - self.support.states:
            why = ", ".join(sorted(self.support.kept)[:4]) or "read in several parts"
            raise Decline("RM304", f"keys and values the device cannot update in place: {why}")

    def run_step(self, inputs: list[torch.Tensor], cache: DeviceCache) -> list[Any]:
        """The outputs; None for buffers, which hold the step's keys and values afterwards. The
        length is the caller's to advance. Raises as `run` does, and Decline."""
        residence, padding = _residence(cache), self._step_padding(inputs, cache)
        outputs = self._step(inputs, residence, padding, 0.0)
        if padding.gap:
            new = inputs[self._tokens].shape[1]
            with self._lock:
                self._as_execution(lambda: residence.close_gap(padding.start, padding.gap, new))
        return outputs

    def step_padding_is_inert(self, inputs: list[torch.Tensor], cache: DeviceCache) -> bool:
        """Runs the step with other values in the padding: neither its results nor the keys and
        values of real tokens may notice. The cache is a copy made for this."""
        residence, padding = _residence(cache), self._step_padding(inputs, cache)
        first = padding.start + padding.gap
        end = first + inputs[self._tokens].shape[1]
        seen = []
        for fill in (0.0, 1.0):
            outputs = [
                out for out in self._step(inputs, residence, padding, fill) if out is not None
            ]
            seen.append([*outputs, *(t[:, :, first:] for t in residence.peek(end))])
        return all(
            torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
            for a, b in zip(*seen, strict=True)
        )

    def _step_padding(self, inputs: list[torch.Tensor], cache: DeviceCache) -> Padding:
        new = inputs[self._tokens].shape[1]
        gap = self._shapes[self._tokens][1] - new if self.side == "left" else 0
        if gap and cache.length and any(layer.sliding_window for layer in cache.layers):
            raise Decline("RM105", "padded tokens behind a past that a sliding window sees")
        padding = self._padding(self.sizes_of([t.shape for t in inputs]))
        return replace(padding, start=cache.length, gap=gap)

    def _step(
        self, inputs: list[torch.Tensor], residence: Residence, padding: Padding, fill: float
    ) -> list[Any]:
        def attempt() -> list[Any]:
            self._enter()
            states = residence.enter(self._compiler, self._shapes[self._buffers[0]][0])
            return self._run_parts(inputs, padding, fill, fill, states)

        with self._lock:
            outputs: list[Any] = self._as_execution(attempt)
        end = padding.start + inputs[self._tokens].shape[1]
        outputs[self._length_output] = torch.tensor(end)
        return outputs

    def _put(
        self, index: int, slot: torch.Tensor, tensor: torch.Tensor, padding: Padding, fill: float,
        rows: float,
    ) -> None:  # fmt: skip
        super()._put(index, slot, tensor, padding, fill, rows)
        if padding.gap and self._buckets.roles[index].is_mask:
            # The mask lies over the cache's positions: its new part moves with the new tokens.
            window, start, gap = slot[: tensor.shape[0]], padding.start, padding.gap
            window[:, start + gap :] = tensor[:, start : slot.shape[1] - gap]
            window[:, start : start + gap] = 0


def _residence(cache: DeviceCache) -> Residence:
    assert cache.residence is not None
    return cache.residence
