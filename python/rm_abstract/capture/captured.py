"""A captured call as data."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rm_abstract.capture.imported import KeptOp
from rm_abstract.capture.outputs import Structure


@dataclass
class Captured:
    """A captured call. `inputs` of the IR are the tensors of the call in order, caches unfolded."""

    ir: str
    input_dims: list[list[str]]
    weights: list[str]  # names in the user's module
    constants: dict[str, torch.Tensor]  # large tensors made inside forward
    output: Structure
    caches: list[Structure]  # caches to commit although the output does not return them
    kept: list[KeptOp]
    capture_ms: float
    repeated: list[list[int]] = field(default_factory=list)  # by output: axes of stride 0
    extended: bool = False  # layers were written that were not traced
