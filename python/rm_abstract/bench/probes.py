"""What the machine can do at best: bytes read a second, GEMM operations a second.

A probe is a candidate like any other: put it into the same interleaved rounds as what it bounds.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

READ_BYTES = 1 << 28  # far beyond any last-level cache
GEMM_SIZE = 2048


@dataclass(frozen=True)
class Probe:
    """`amount` bytes or operations a call; amount / seconds is the machine's rate."""

    name: str
    unit: str
    amount: float
    call: Callable[[], object]


def read_probes(read_bytes: int = READ_BYTES) -> list[Probe]:
    """Streams a buffer once with all threads of torch; use the best of them."""
    import torch

    buffer = torch.ones(read_bytes // 4)
    return [
        Probe("read: sum", "byte/s", float(read_bytes), buffer.sum),
        Probe("read: max", "byte/s", float(read_bytes), buffer.max),
    ]


class ReadProbe:
    """Bytes a second that all threads of torch read; with or without huge pages under them."""

    def __init__(self, huge: bool, read_bytes: int = READ_BYTES) -> None:
        import mmap

        import torch

        self.memory = mmap.mmap(-1, read_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        self.buffer = torch.frombuffer(self.memory, dtype=torch.float32).fill_(1.0)
        rows = self.buffer.view(8, -1)
        # Which reduction streams best differs by processor and number of threads.
        self.ways: list[Callable[[], object]] = [self.buffer.sum, lambda: rows.sum(1)]

    def rate(self) -> float:
        seconds = []
        for way in self.ways:
            start = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - start)
        return float(self.buffer.nbytes) / min(seconds)


def gemm_probes(dtype: torch.dtype, size: int = GEMM_SIZE) -> list[Probe]:
    """Square products of normal numbers, plain and with prepacked weights; use the best of them."""
    import torch

    a = torch.randn(size, size).to(dtype)
    b = torch.randn(size, size).to(dtype)
    operations = 2.0 * size**3
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        # torch.mm is emulated there (minutes at this size): such products are done in fp32.
        return gemm_probes(torch.float32, size)
    probes = [Probe("gemm: torch.mm", "flop/s", operations, lambda: torch.mm(a, b))]
    if torch._C._has_mkldnn:
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(b, size)
        except RuntimeError:  # oneDNN has no kernel of this dtype for this processor
            return probes

        def prepacked() -> Any:
            return torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], "")

        probes.append(Probe("gemm: oneDNN prepacked", "flop/s", operations, prepacked))
    return probes


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def environment() -> dict[str, Any]:
    """What a figure depends on and a reader must know."""
    import torch
    import transformers

    return {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kernel": platform.release(),
    }
