"""Puts the weights into a program in ONNX (engines/onnx_program.py leaves them out: the program's
bytes are a cache key, and weights are mapped, not copied). Needs onnx only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rm_abstract.worker.tensors import Tensor

LOCATION = "rm_abstract.weights"  # of external data that is no file: looked up by name


def with_weights(code: bytes, weights: Mapping[str, Tensor]) -> Any:
    """The onnx.ModelProto with every weight as an ordinary initializer. Raises ValueError for a
    weight that is not given."""
    import onnx

    model = onnx.load_model_from_string(code)
    for initializer in model.graph.initializer:
        if not any(row.value == LOCATION for row in initializer.external_data):
            continue
        if initializer.name not in weights:
            raise ValueError(f"[onnx] expected the weight {initializer.name}, got none")
        del initializer.external_data[:]
        initializer.data_location = onnx.TensorProto.DEFAULT
        initializer.raw_data = bytes(weights[initializer.name].data)
    return model
