"""What random problems are made of: a generator, an arena of guard bytes, and a problem's results.

Written from the modules' public contract (docs/cuda_ops.md and the docstrings), not from their
sources: any legal size, pitch, layout and place in memory, and every row of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from arena import Arena
from problems import DTYPES, assert_close

# where kernels change their mind: vectors, warps, tiles, blocks, and one element to each side
EDGES = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256,
         257, 320, 511, 512, 513, 768, 1023, 1024, 1025, 2048, 4096, 4097, 8192)  # fmt: skip


@dataclass
class Result:
    name: str
    got: torch.Tensor
    wanted: torch.Tensor
    bound: float  # relative to |wanted| + scale; 0: the same bits
    scale: float = 1.0


@dataclass
class Problem:
    """call(kernel=..., stream=...) runs it; `results` says what is right afterwards."""

    what: str
    call: Callable[..., None]
    rows: list[str]
    results: Callable[[], list[Result]]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    repeats: bool = True  # a second run gives the same: no operand is overwritten

    def check(self, how: str) -> None:
        for r in self.results():
            what = f"{self.what}, {how}, {r.name}"
            if r.bound == 0:
                same = torch.equal(r.got.nan_to_num(0.0), r.wanted.nan_to_num(0.0))
                assert same and torch.equal(r.got.isnan(), r.wanted.isnan()), what
            else:
                assert_close(r.got, r.wanted, r.bound, r.scale, what)


class Maker:
    """Draws sizes, dtypes and places; every tensor lies in the arena."""

    def __init__(self, seed: int, arena: Arena) -> None:
        self.rng, self.arena = np.random.default_rng(seed), arena
        self.tensors: dict[str, torch.Tensor] = {}
        self.friendly = self.maybe()  # sizes and places that fast kernels take
        torch.manual_seed(seed)

    def size(self, most: int, least: int = 1) -> int:
        """Half of the time at an edge, else anywhere, small ones more often."""
        n = self._size(most, least)
        return max(least, n // 8 * 8) if self.friendly and n > 8 else n

    def _size(self, most: int, least: int) -> int:
        if self.rng.random() < 0.5:
            fitting = [n for n in EDGES if least <= n <= most]
            if fitting:
                return int(self.rng.choice(fitting))
        return int(np.exp(self.rng.uniform(np.log(least), np.log(most + 1))))

    def maybe(self, chance: float = 0.5) -> bool:
        return bool(self.rng.random() < chance)

    def one_of(self, *values: Any) -> Any:
        return values[int(self.rng.integers(0, len(values)))]

    def dtype(self, *names: str) -> str:
        return str(self.one_of(*(names or tuple(DTYPES))))

    def where(self, shape: tuple[int, ...], t: torch.dtype, dense: bool = False) -> dict[str, Any]:
        """A pitch and an offset: mostly as fast kernels like it, sometimes not."""
        out: dict[str, Any] = {}
        if shape and not dense and self.maybe(0.4):
            step = 16 // t.itemsize
            pad = self.one_of(step, 2 * step, 1, 3, 64)
            pitch = shape[-1] + pad
            whole = self.friendly or self.maybe(0.6)
            out["pitch"] = (pitch + step - 1) // step * step if whole else pitch
        if not self.friendly and self.maybe(0.3):
            out["offset"] = t.itemsize * int(self.rng.integers(1, 16))
        return out

    def random(self, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device="cuda") * scale

    def operand(
        self, name: str, shape: tuple[int, ...], t: torch.dtype, *, scale: float = 1.0,
        dense: bool = False, value: torch.Tensor | None = None, **where: Any,
    ) -> torch.Tensor:  # fmt: skip
        value = self.random(shape, scale) if value is None else value
        out = self.arena.put(value, t, **(where or self.where(shape, t, dense)))
        self.tensors[name] = out
        return out

    def result(
        self, name: str, shape: tuple[int, ...], t: torch.dtype, *, dense: bool = False,
        **where: Any,
    ) -> torch.Tensor:  # fmt: skip
        out = self.arena.result(self.arena.view(shape, t, **(where or self.where(shape, t, dense))))
        self.tensors[name] = out
        return out

    def in_place(self, t: torch.Tensor) -> torch.Tensor:
        return self.arena.result(t)

    def workspace(self, size: int) -> torch.Tensor:
        out = self.arena.workspace(size, 256 if self.maybe() else 0)
        self.tensors["workspace"] = out
        return out
