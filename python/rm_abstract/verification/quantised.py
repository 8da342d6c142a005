"""Weight-only quantisation said in torch: what the weights of `int8` and `int4` products are.

The core quantises and multiplies with kernels of its own; this is the same arithmetic written a
second time, so that the parity gate can ask what eager gives with such weights. One weight at a
time is held in its dequantised form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BITS = {"int8": 8, "int4": 4}
AUTO_GROUPS = {"int8": 128, "int4": 32}  # as src/passes/quantize.hpp: auto_group
GPU_AUTO_GROUP = 128  # of both
AUTO_ACTIVATIONS = "int8"  # as src/passes/quantize.hpp: auto_activations
_CHUNK = 1 << 18  # elements worked on at once: they stay in the processor's caches

# Rows of a table are looked up in the weight itself, also where a product shares it (tied heads).
_LOOKUPS = ("aten::embedding", "aten::_embedding_bag", "aten::index", "aten::index_select")


class QuantisedWeight(NamedTuple):
    """A weight that products of a program read quantised (`_core.ir.quantised_weights`)."""

    name: str
    bits: int
    group: int
    symmetric: bool
    transposed: bool  # it lies as [K, N]: groups run along its first axis
    pairs: bool = False  # laid out for a GPU: scales are of the weight's own type

    def bytes_of(self, shape: Iterable[int], item: int = 2) -> int:
        """Memory of its quantised form; `item`: bytes of an element of the weight."""
        n, k = reversed(tuple(shape)) if self.transposed else tuple(shape)
        scale = item if self.pairs else 2
        scales = scale * (-(-k // self.group)) * (1 if self.symmetric else 2)
        return int(n) * (-(-k // 64) * 64 * self.bits // 8 + scales)


def dequantised(weight: torch.Tensor, form: QuantisedWeight) -> torch.Tensor:
    """The weight as products see it: rounded to the integers of its groups, and back."""
    if form.transposed:
        return dequantised(weight.t(), form._replace(transposed=False)).t()
    rows, columns = weight.shape
    result = torch.empty(rows, columns, dtype=weight.dtype, device=weight.device)
    padded = -(-columns // form.group) * form.group
    step = max(1, _CHUNK // max(1, padded))
    for start in range(0, rows, step):
        part = weight[start : start + step].float()
        part = torch.nn.functional.pad(part, (0, padded - columns))
        groups = part.reshape(part.shape[0], -1, form.group)
        kept = weight.dtype if form.pairs else torch.float16
        values = _rounded(groups, form.bits, form.symmetric, kept).reshape(part.shape)
        result[start : start + step] = values[:, :columns]
    return result


def _rounded(groups: torch.Tensor, bits: int, symmetric: bool, kept: torch.dtype) -> torch.Tensor:
    """Groups along the last axis, through integers; a group with NaN or infinity becomes NaN.
    Scales are kept as `kept`."""
    if symmetric:
        at = groups.abs().argmax(-1, keepdim=True)
        most = groups.gather(-1, at)
        levels = torch.full_like(most, 127)  # by a number, a GPU multiplies with its inverse
        scale, zero = (most.abs() / levels, 0.0) if bits == 8 else (most / -8, 8.0)
        low, high = (-127, 127) if bits == 8 else (0, 15)
        scale = scale.to(kept).float()
        zeros = torch.full_like(scale, zero)
    else:
        bottom, top = groups.amin(-1, True).clamp(max=0), groups.amax(-1, True).clamp(min=0)
        low, high = (-128, 127) if bits == 8 else (0, 15)
        scale = ((top - bottom) / (high - low)).half().float()
        zeros = torch.where(scale > 0, (low - bottom / scale).round(), float(low)).half().float()
    integers = ((groups / scale).round() + zeros).clamp(low, high)
    values = (integers - zeros) * scale
    return torch.where(scale == 0, torch.zeros_like(values), values)


class OnQuantisedWeights(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, operators read the given weights dequantised; only look-ups of rows read them as they
    are. Nothing is changed in any module."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], forms: Iterable[QuantisedWeight]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forms = {_place(weights[form.name]): form for form in forms}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in _LOOKUPS:
            return func(*args, **kwargs)
        return func(*(self._read(a) for a in args), **{k: self._read(v) for k, v in kwargs.items()})

    def _read(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._read(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        form = self._forms.get(_place(value))
        return value if form is None else dequantised(value.detach(), form)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What tells a weight from other tensors, views of its memory with another shape included."""
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
