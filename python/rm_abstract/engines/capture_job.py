"""One capture as bytes that another process can carry out: the module, the call, the settings.

The bytes go through a pipe to a process that this one started, and nowhere else. Weights and inputs
go without their contents: a capture asks for types and sizes only, and for the values of a few
integers (capture/known_values.py). Code is named, not sent, so that
the other process imports what this one imported; that both mean the same is checked by comparing
the module's identity (guards/identity.py) on both sides.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.calls.call import FlatCall
from rm_abstract.guards.torch_state import may_be_asked

NOT_POSSIBLE = "RM211"  # the code of what cannot be captured in another process
_MOST_BYTES = 64 << 20  # of tensors that are no weights
_IMPORTED = ("transformers",)  # whose version is part of every identity once it is imported


@dataclass
class Job:
    module: torch.nn.Module
    call: FlatCall
    pattern: tuple[Any, ...]
    identity: str
    settings: dict[str, tuple[str, str]]


def pack(job: Job) -> bytes:
    """Raises Decline (NOT_POSSIBLE) for what another process cannot be given."""
    weights = [*job.module.parameters(), *job.module.buffers()]
    for tensor in (*weights, *(x for x in job.call.leaves if isinstance(x, torch.Tensor))):
        if tensor.device.type != "cpu":
            raise Decline(NOT_POSSIBLE, f"a tensor on {tensor.device}")
    stream = io.BytesIO()
    process = {
        "path": [p for p in sys.path if isinstance(p, str)],
        "imported": [name for name in _IMPORTED if name in sys.modules],
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    try:
        _Pickler(stream, weights).dump(process)
        _Pickler(stream, weights).dump(job)
    except Decline:
        raise
    except Exception as error:  # whatever a module's own parts raise when pickled
        raise Decline(NOT_POSSIBLE, f"the module cannot be pickled: {error}") from error
    return stream.getvalue()


def unpack(data: bytes) -> Job:
    """In the other process; puts the search path and torch's switches as they were there."""
    stream = io.BytesIO(data)
    process = _Unpickler(stream).load()
    sys.path[:] = process["path"]
    for name in process["imported"]:
        __import__(name)
    torch.set_default_dtype(process["dtype"])
    torch.set_float32_matmul_precision(process["matmul"])
    torch.use_deterministic_algorithms(process["deterministic"])
    job = _Unpickler(stream).load()
    assert isinstance(job, Job)
    job.call.has_contents = False
    return job


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, weights: Sequence[torch.Tensor]) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._weights = {id(tensor) for tensor in weights}
        self._empty: dict[int, torch.Tensor] = {}  # alive: their ids are the names
        self._bytes = 0

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, type) or callable(value):
            if getattr(value, "__module__", None) == "__main__":
                raise Decline(NOT_POSSIBLE, f"{value!r} is code of the script itself")
            return None
        if not isinstance(value, torch.Tensor):
            if isinstance(value, FlatCall):
                inputs = [x for x in value.leaves if isinstance(x, torch.Tensor)]
                self._empty |= {id(x): x for x in inputs if not may_be_asked(x)}
            return None
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise Decline(NOT_POSSIBLE, f"a tensor of the class {type(value).__qualname__}")
        if id(value) not in self._weights and id(value) not in self._empty:
            self._bytes += value.numel() * value.element_size()
            if self._bytes > _MOST_BYTES:
                raise Decline(NOT_POSSIBLE, "the module holds large tensors that are no weights")
            return None
        form = (tuple(value.shape), value.stride(), value.dtype, value.requires_grad)
        # Attributes of tensors are part of what a module means; torch itself marks buffers.
        return (id(value), isinstance(value, torch.nn.Parameter), *form, vars(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, name: Any) -> torch.Tensor:
        number, is_parameter, shape, stride, dtype, wants_gradients, attributes = name
        if number not in self._made:
            # Memory that nobody touches costs nothing.
            tensor = torch.empty_strided(shape, stride, dtype=dtype)
            if is_parameter:
                tensor = torch.nn.Parameter(tensor, requires_grad=wants_gradients)
            vars(tensor).update(attributes)
            self._made[number] = tensor
        return self._made[number]
