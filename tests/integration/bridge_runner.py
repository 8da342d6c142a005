"""Runs one ATen call through the torch bridge's plugin, by the C ABI alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rm_abstract.capture.aten_args import encode_call, op_name
from rm_abstract.testing import host

DTYPES = {
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
    torch.int16: (0, 16),
    torch.int8: (0, 8),
    torch.uint8: (1, 8),
    torch.bool: (6, 8),
    torch.complex64: (5, 64),
}


def flatten(result: Any) -> list[torch.Tensor]:
    items = result if isinstance(result, (tuple, list)) else [result]
    return [t for item in items for t in (item if isinstance(item, (list, tuple)) else [item])]


def operand(tensor: torch.Tensor) -> host.Operand:
    return host.Operand(tensor.data_ptr(), tensor.shape, tensor.stride(), *DTYPES[tensor.dtype])


class Bridge:
    def __init__(self, path: Path) -> None:
        self.plugin = host.Plugin(path, private=True)
        self.plugin.initialize()
        self.info = self.plugin.device_info(self.plugin.open_device(0))
        (self.row,) = self.plugin.rows()

    def prepare(
        self,
        op: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outputs: Sequence[torch.Tensor | None],
    ) -> tuple[host.PreparedKernel, list[host.Operand], list[host.Operand | None]]:
        tensors, attrs = encode_call(op, args, kwargs)
        if "sym_args" in attrs:
            attrs["sym_args"] = [int(s) for s in attrs["sym_args"]]
        inputs = [operand(t) for t in tensors]
        outs = [None if t is None else operand(t) for t in outputs]
        problem = host.make_problem(op_name(op), inputs, outs, attrs)
        return host.PreparedKernel(self.plugin, self.row, problem, self.info), inputs, outs

    def call(
        self,
        op: Any,
        *args: Any,
        like: Callable[[torch.Tensor], torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> list[torch.Tensor]:
        """The results, written into fresh memory (contiguous, or what `like` makes)."""
        with torch.no_grad():
            expected = flatten(op(*args, **kwargs))
        make = like or (lambda t: torch.empty(t.shape, dtype=t.dtype))
        results = [make(t) for t in expected]
        kernel, inputs, outs = self.prepare(op, args, kwargs, results)
        try:
            kernel.launch([i.data for i in inputs], [o.data for o in outs if o is not None])
        finally:
            kernel.close()
        return results
