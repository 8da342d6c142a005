"""One buffer that holds every tensor of a call, so that a write anywhere else is seen.

Between the tensors, and between the rows of a pitched one, lie guard bytes of 0xFF: NaN as any
float, so that a kernel that reads them spoils its result, and known, so that one that writes them
is found. Operands are guarded in the same way: only what was marked as a result may change.
"""

from __future__ import annotations

import torch

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dense(shape: tuple[int, ...]) -> list[int]:
    """Row-major strides."""
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= max(1, n)
    return out[::-1]


class Arena:
    def __init__(self, size: int = 96 << 20) -> None:
        self.memory = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
        self.results = torch.zeros(size, dtype=torch.uint8, device="cuda")  # 0xFF: may change
        self.used = 0
        self.before: torch.Tensor | None = None

    def clear(self) -> None:
        self.memory[: self.used].fill_(0xFF)
        self.results[: self.used].zero_()
        self.used, self.before = 0, None

    def _take(self, bytes_: int, guard: int, offset: int) -> int:
        at = (self.used + guard + 511) // 512 * 512 + offset
        self.used = at + bytes_ + guard
        assert self.used <= self.memory.numel(), "the arena is too small for the problem"
        return at

    def view(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        pitch: int | None = None,
        order: tuple[int, ...] | None = None,
        offset: int = 0,
        guard: int = 4096,
    ) -> torch.Tensor:
        """A tensor in guard bytes. pitch: elements from one index of the last but one axis to the
        next; order: the axes from the slowest to the fastest as they lie; offset: bytes behind a
        multiple of 512."""
        order = order or tuple(range(len(shape)))
        stored = [shape[d] for d in order]
        if pitch is not None:
            stored[-1] = pitch
        strides = [0] * len(shape)
        for d, step in zip(order, dense(tuple(stored)), strict=True):
            strides[d] = step
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
        at = self._take(span * dtype.itemsize, guard, offset)
        return self._as(self.memory, at, span, dtype).as_strided(shape, strides)

    @staticmethod
    def _as(memory: torch.Tensor, at: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return memory[at : at + count * dtype.itemsize].view(dtype)

    def put(self, value: torch.Tensor, dtype: torch.dtype, **where: object) -> torch.Tensor:
        """A copy of `value` in the arena."""
        t = self.view(tuple(value.shape), dtype, **where)  # type: ignore[arg-type]
        t.copy_(value)
        return t

    def workspace(self, size: int, offset: int = 0) -> torch.Tensor:
        at = self._take(size, 1 << 16, offset)
        self.results[at : at + size] = 0xFF
        return self.memory[at : at + size]

    def result(self, t: torch.Tensor) -> torch.Tensor:
        """`t`'s elements, and no byte between them, may change."""
        if t.numel():
            at = t.data_ptr() - self.memory.data_ptr()
            span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            kind = _INTEGER[t.element_size()]
            self._as(self.results, at, span, kind).as_strided(t.shape, t.stride()).fill_(-1)
        return t

    def freeze(self) -> None:
        self.before = self.memory[: self.used].clone()

    def poison(self) -> None:
        """What a call may write becomes 0xFF again: for a second run."""
        self.memory[: self.used] |= self.results[: self.used]

    def changed(self) -> list[int]:
        """Offsets of bytes that changed though they belong to no result."""
        assert self.before is not None
        wrong = (self.memory[: self.used] != self.before) & (self.results[: self.used] == 0)
        return [int(i) for i in wrong.nonzero().flatten()[:8]] if bool(wrong.any()) else []

    def where(self, offset: int, tensors: dict[str, torch.Tensor]) -> str:
        """The tensor that begins last before a byte, for a message."""
        starts = {
            name: t.data_ptr() - self.memory.data_ptr() for name, t in tensors.items() if t.numel()
        }
        before = [(at, name) for name, at in starts.items() if at <= offset]
        if not before:
            return f"byte {offset} before all tensors"
        at, name = max(before)
        t = tensors[name]
        return f"byte {offset - at} of {name} {tuple(t.shape)} {t.stride()} {t.dtype}"
