"""Random numbers by a counter: functions of seed, counter and place (Philox4x32-10). A replay of
a recorded step draws what the eager step would have drawn, on every backend.

The state is read by the program and advanced by the host, after a step that succeeded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rm_abstract.framework.backends import Numbers
from rm_abstract.framework.recording import Recorder, each_time
from rm_abstract.framework.tensor import ElementType, Tensor, apply, executor, of


class Generator:
    """Draws in the order of the calls. ``state``: i64 [2], seed and number of draws so far, on the
    host."""

    def __init__(self, seed: int) -> None:
        self.state = torch.tensor([seed, 0])
        self._numbers = Numbers(self.state)

    def uniform(self, shape: Sequence[int], dtype: ElementType = torch.float32) -> Tensor:
        """Numbers in [0,1) in steps of 2^-24, f32 or f64."""
        by = executor()
        each_time(before=self._send)
        state = of(self._numbers.at(by.backend))
        if isinstance(by, Recorder):
            earlier = by.draws.get(self, 0)
            by.draws[self] = earlier + 1
            if earlier:
                state = state + Tensor(torch.tensor([0, earlier]))
        attrs = (("dtype", "f64" if dtype == torch.float64 else "f32"), ("shape", tuple(shape)))
        drawn = apply("uniform", (state,), attrs)
        each_time(after=self._count)
        return drawn

    def _send(self) -> None:
        self._numbers.send(executor().backend)

    def _count(self) -> None:
        self.state[1] += 1


_default = Generator(0)


def default_generator() -> Generator:
    """The one that layers draw from."""
    return _default


def manual_seed(seed: int) -> None:
    """Starts the default generator again; recorded steps draw from the new sequence as well."""
    _default.state.copy_(torch.tensor([seed, 0]))
