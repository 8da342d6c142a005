"""A greedy step of a generation on a GPU as one CUDA graph: the program's kernels, the choice of
the token, the counters. The host launches it and does nothing else.

The cache's buffers are used where they lie, so a recording serves generations whose buffers lie
there: allocators give the same memory to the same sizes. Everything else a step reads has memory
of the recording's own.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from rm_abstract._core import CoreError
from rm_abstract.generation.largest import largest
from rm_abstract.generation.step_end import end_step

_MOST = 2  # recordings of a program that nobody uses, and places of buffers that were seen
_MANY = 64  # steps from which on a recording pays at once; else from the second generation on
_OWN = ("ids", "length", "mask", "positions")
_lock = threading.Lock()


class Recordings:
    """Of one program. Those in use are not here: a generation takes one and gives it back."""

    def __init__(self) -> None:
        self._free: list[StepGraph] = []
        self._seen: list[Any] = []
        self._fails = False

    @staticmethod
    def of(program: Any) -> Recordings:
        with _lock:
            if program.recordings is None:
                program.recordings = Recordings()
            found: Recordings = program.recordings
            return found

    def acquire(
        self,
        program: Any,
        tensors: list[torch.Tensor],
        roles: dict[str, int],
        eos: list[int],
        pad: torch.Tensor | None,
        steps: int,
    ) -> StepGraph | None:
        """For a generation over these buffers; None where there is none, and none is made yet."""
        own = {roles[name] for name in _OWN if name in roles}
        places = tuple(
            (0 if i in own else t.data_ptr(), t.shape, t.stride()) for i, t in enumerate(tensors)
        )
        # Of before the program's weights changed, or its steps were watched, none is right.
        key = (program.epoch, places, tuple(eos), pad is None)
        with _lock:
            for i, found in enumerate(self._free):
                if found.key == key:
                    return self._free.pop(i)
            if self._fails or (steps < _MANY and key not in self._seen):
                self._seen = [*self._seen[1 - _MOST :], key]
                return None
        try:
            return StepGraph(key, program, tensors, roles, eos, pad)
        except CoreError:  # it did not run often enough yet, or is watched
            return None
        except RuntimeError:
            self._fails = True
            return None

    def give_back(self, recording: StepGraph) -> None:
        with _lock:
            self._free = [*self._free[1 - _MOST :], recording]


class StepGraph:
    """One generation at a time: `enter`, `replay` for every token, `leave`.

    `open` ``[rows]``: which rows go on. Raises what a recording raises.
    """

    def __init__(
        self,
        key: Any,
        program: Any,
        tensors: list[torch.Tensor],
        roles: dict[str, int],
        eos: list[int],
        pad: torch.Tensor | None,
    ) -> None:
        self.key, self._roles = key, roles
        with torch.inference_mode(False), torch.no_grad():
            self._tensors = list(tensors)
            for name in _OWN:
                if name in roles:
                    own = torch.empty_like(
                        tensors[roles[name]], memory_format=torch.contiguous_format
                    )
                    self._tensors[roles[name]] = own.copy_(tensors[roles[name]])
            ids = self._tensors[roles["ids"]]
            self._last = ids.view(ids.shape[0])
            self.open = torch.ones(ids.shape[0], dtype=torch.bool, device=ids.device)
            places = max(t.shape[-2] for t in tensors if t.dim() > 2)  # of the cache
            self._found = torch.zeros(places + 1, ids.shape[0], dtype=torch.long, device=ids.device)
            self._eos = torch.tensor(eos, device=ids.device) if eos else None
            self._pad = None if pad is None else pad.clone()
            self._graph = torch.cuda.CUDAGraph()
            self._record(program, ids.device)
        # The cache's buffers belong to their generations.
        self._tensors = [self._tensors[roles[name]] for name in self._names()]

    def _record(self, program: Any, device: torch.device) -> None:
        cuda: Any = torch.cuda
        here, side = cuda.current_stream(device), cuda.Stream(device)
        side.wait_stream(here)
        with cuda.stream(side):
            # Relaxed: a kernel that is loaded on its first launch allocates.
            self._graph.capture_begin(capture_error_mode="relaxed")
            try:
                self._kept = self._step(program)
            finally:
                self._graph.capture_end()
        here.wait_stream(side)

    def _step(self, program: Any) -> Any:
        tensors, roles = self._tensors, self._roles
        results, kept = program.launch_into(tensors)
        largest(results[roles["logits"]][:, -1], self._last)
        positions, mask = (
            tensors[roles[name]] if name in roles else None for name in ("positions", "mask")
        )
        length = tensors[roles["length"]]
        end_step(self._last, self._found, length, positions, self.open, self._eos, self._pad, mask)
        return kept

    def enter(
        self,
        tensors: list[torch.Tensor],
        last: torch.Tensor,
        going: torch.Tensor,
        pad: torch.Tensor | None,
    ) -> None:
        """For a generation that goes on behind the tokens `last` with the rows `going`."""
        with torch.inference_mode(False), torch.no_grad():
            for own, name in zip(self._tensors, self._names(), strict=True):
                own.copy_(tensors[self._roles[name]])
            if "mask" in self._roles:  # a step leaves the mask as the next one needs it
                own, length = (self._tensors[self._names().index(n)] for n in ("mask", "length"))
                own.scatter_(1, length.expand(own.shape[0], 1), 1)
            self._last.copy_(last)
            self.open.copy_(going)
            if self._pad is not None and pad is not None:
                self._pad.copy_(pad)

    def replay(self) -> None:
        self._graph.replay()

    def leave(self, tensors: list[torch.Tensor], start: int, steps: int) -> torch.Tensor:
        """The tokens ``[rows, steps]``; the generation's tensors are those behind the last step."""
        with torch.no_grad():
            for own, name in zip(self._tensors, self._names(), strict=True):
                tensors[self._roles[name]].copy_(own)
            if "mask" in self._roles:
                tensors[self._roles["mask"]][:, start + steps : start + steps + 1] = 0
            return self._found[start : start + steps].t().clone()

    def _names(self) -> list[str]:
        return [name for name in _OWN if name in self._roles]
