"""What an import of an exported program gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rm_abstract.capture.dims import SymbolNames


@dataclass(frozen=True)
class KeptOp:
    """An operator left to the torch bridge (RM202), with the user's source line."""

    op: str
    source: str


@dataclass
class ImportedProgram:
    """The result: text, and what a caller needs to feed it."""

    text: str
    input_dims: list[list[str]]
    weights: list[str]
    constants: dict[str, torch.Tensor]
    symbols: SymbolNames
    kept: list[KeptOp] = field(default_factory=list)
    written: list[str] = field(default_factory=list)  # buffers whose new values are results too
    draws: int = 0  # of random numbers, from the weight ir_builder.RANDOM
    asks_tf32: bool = False  # holds what depends on torch's switch for tf32 in convolutions
