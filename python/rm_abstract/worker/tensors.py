"""A tensor in memory shared with the user's process, as a Python plugin's worker sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# bf16 has no NumPy type: numpy() gives its bits.
_NUMPY = {
    "f32": "float32",
    "f64": "float64",
    "bf16": "uint16",
    "f16": "float16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "bool": "bool",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
}
SIZES = {
    "f32": 4,
    "f64": 8,
    "bf16": 2,
    "f16": 2,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "bool": 1,
    "u16": 2,
    "u32": 4,
    "u64": 8,
}  # bytes of an element


@dataclass(frozen=True)
class Tensor:
    """``data`` is mapped, not copied: valid while the program is loaded, and for weights and inputs
    not to be written."""

    name: str
    dtype: str  # "f32", as in the program's text
    shape: tuple[int, ...]
    data: memoryview
    digest: bytes = b""  # of what a weight holds, 32 bytes; empty for inputs, outputs and states

    def numpy(self) -> Any:
        """A view as numpy.ndarray."""
        import numpy

        return numpy.frombuffer(self.data, dtype=_NUMPY[self.dtype]).reshape(self.shape)

    def torch(self) -> Any:
        """A view as torch.Tensor on the CPU."""
        import warnings

        import torch

        from rm_abstract.worker.dtypes import DTYPES

        if not self.data.nbytes:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "not writable": inputs and weights are not
            return torch.frombuffer(self.data, dtype=DTYPES[self.dtype]).reshape(self.shape)

    def write(self, value: Any) -> None:
        """Takes an output's value: a torch tensor or an array, of this shape and element type."""
        if tuple(value.shape) != self.shape:
            raise ValueError(
                f"[worker] expected an output of shape {self.shape}, got {tuple(value.shape)}"
            )
        if hasattr(value, "detach"):
            mine = self.torch()
            if value.dtype != mine.dtype:
                raise ValueError(f"[worker] expected {mine.dtype}, got {value.dtype}")
            mine.copy_(value.detach())
            return
        mine = self.numpy()
        if value.dtype != mine.dtype:
            raise ValueError(f"[worker] expected {mine.dtype}, got {value.dtype}")
        mine[...] = value
