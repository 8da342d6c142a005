"""How long a capture may take, and which sizes it keeps open.

A capture happens inside a user's call, so it must end. `Deadline` raises from the next operator
that runs after the time is up: between operators, never in the middle of torch's own bookkeeping.
What a capture needs is processor time, which is the same on a busy machine; what a user waits for
is the clock. Both have a limit, and only the first says something of the model (RM208 is stored).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.export import Dim
from torch.overrides import TorchFunctionMode

# Processor time of the capturing thread: for a capture with open sizes, then for one with the sizes
# of the call. Where no size is open the second is the only one and has the time of both.
FIRST_S = 10.0
SECOND_S = 5.0
WAIT_S = 60.0  # for all of it, by the clock
MODULES = 200  # a model of more has so much more time: torch.export's grows with the operators
PATIENCE = 10  # times as long where the user asked for the capture itself and waits for it
SAY_AFTER_S = 2.0
_CHANNELS = (3, 4)  # of images and of what diffusion models compute with


class TooLong(Exception):
    """The time for a capture is up."""


class Waited(TooLong):
    """The user waited too long, on a machine that is busy with something else."""


class Deadline(TorchFunctionMode):
    """Raises TooLong from the first operator that runs when this thread has used the processor for
    ``seconds``, and Waited when it is later than ``end`` by time.monotonic()."""

    def __init__(self, seconds: float, end: float) -> None:
        super().__init__()
        self._used = time.thread_time() + seconds
        self._end = end

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # traces this, too: for the branches of torch.cond
            return func(*args, **(kwargs or {}))
        if time.thread_time() > self._used:
            raise TooLong
        if time.monotonic() > self._end:
            raise Waited
        return func(*args, **(kwargs or {}))


class SayWhenSlow:
    """Calls ``say`` once, on a thread of its own, when the block takes longer than SAY_AFTER_S."""

    def __init__(self, say: Callable[[], None]) -> None:
        self._timer = threading.Timer(SAY_AFTER_S, say)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()


def share_of(module: torch.nn.Module) -> float:
    """How many times the limits a model of this size has; at least once."""
    return max(1.0, sum(1 for _ in module.modules()) / MODULES)


def open_sizes(tensors: Sequence[torch.Tensor], cached: Sequence[bool]) -> list[dict[int, Any]]:
    """For each input the sizes that become symbols; the others are those of this call.

    ``cached`` marks the tensors of caches. An image or a video, which is the one floating-point
    input with four axes or more and 3 or 4 channels, keeps all but its first size: models compute
    windows, strides and paddings from heights and widths, and reasoning about these as symbols took
    minutes for a Swin or an EfficientNet, where another size is another capture of seconds. Sizes 0
    and 1 are specialised by torch.
    """
    images = [
        t.is_floating_point() and t.dim() >= 4 and t.shape[1] in _CHANNELS and not held
        for t, held in zip(tensors, cached, strict=True)
    ]
    if images.count(True) != 1:  # several are no images: queries, keys and values, say
        images = [False] * len(tensors)
    return [
        {i: Dim.AUTO for i in (range(1) if image else range(t.dim())) if t.shape[i] > 1}
        for t, image in zip(tensors, images, strict=True)
    ]


def too_long(error: BaseException) -> TooLong | None:
    """The TooLong that caused it, if one did: torch.export wraps what it catches."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, TooLong):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None
