"""The record of one compiled entry: filled by an engine, read by the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class EntryReport:
    """What one compiled entry is and what it cost; filled by the engine, read by ``explain()``."""

    signature: str
    engine: str
    device: str
    artefact: str = ""  # cache key of the plan
    cache: str = ""  # "hit", "miss" or "bypass: why"
    compile_ms: float = 0.0
    capture_ms: float = 0.0
    nodes: int = 0
    native_nodes: int = 0  # nodes run by kernels of our registry
    flops: float = 0.0
    native_flops: float = 0.0
    kernels: dict[str, int] = field(default_factory=dict)  # kernel name -> steps
    kept: dict[str, int] = field(default_factory=dict)  # operator kept on torch -> nodes
    parity: str = ""  # "passed", "failed: ...", "stored verdict"
    max_error: float | None = None
    calls: int = 0
    eager_ms: float | None = None  # one call served by the original; None: it served none
    compiled_ms: float | None = None  # the best call that the program served
    timed: str = ""  # how: "by turns" (best against best), "first calls" (eager's only run)
    compared: int = 0  # calls that PyTorch ran as well, the first ones included
    crashes: list[str] = field(default_factory=list)  # of worker processes, survived: their endings
    shapes: int = 0  # concrete shapes instantiated
    precision: str = ""  # of the weights of products: "int8, groups of 128"; empty: the model's own
    quantised: dict[str, int] = field(default_factory=dict)  # weights, bytes, bytes_before

    @property
    def native_share(self) -> float:
        return self.native_nodes / self.nodes if self.nodes else 0.0

    @property
    def native_flops_share(self) -> float | None:
        """None when operators were kept on torch: their FLOPs, so any share, are not known."""
        return 1.0 if self.nodes and self.native_nodes == self.nodes else None

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["native_share"] = self.native_share
        values["native_flops_share"] = self.native_flops_share
        return values
