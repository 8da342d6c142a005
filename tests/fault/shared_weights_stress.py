"""Loads and ends programs whose weights are alike in every way but one, damages artefacts and kills
workers, and compares every result with torch's.

``shared_weights_stress.py PLUGIN STEPS SEED``, PLUGIN ``sim`` or ``mine`` (tests/python_plugins),
prints ``done STEPS``. Written from docs/plugin_guide.md: a device keeps one copy of a weight for
all programs that have the same content, type and shape, until the last of them ends.
"""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from rm_abstract import _core, device
from rm_abstract.worker import ir_text, python_plugins
from rm_abstract.worker.dtypes import DTYPE_NAMES, DTYPES
from rm_abstract.worker.ir_to_torch import ir_to_torch
from rm_abstract.worker.pool import WorkerPool
from rm_abstract.worker.shared_tensors import tensors_in, weights_block

PLUGINS = Path(__file__).resolve().parents[1] / "python_plugins"
DTYPES_OF = {
    "sim": ["f32", "i32", "i64", "u8", "bool"],
    "mine": ["f32", "bf16", "f16", "i64", "i32", "i8", "u8", "bool"],
}
BYTES, MOST_PROGRAMS, LIMIT_S = 48, 12, 600.0
REFUSED = {"RM602", "RM403"}  # what a damaged artefact is
Key = tuple[torch.dtype, tuple[int, ...], bytes]


def key_of(tensor: torch.Tensor) -> Key:
    flat = tensor.contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


class Draws:
    """Weights from a few contents: often the same bytes, as another type, shape or strides."""

    def __init__(self, plugin: str, seed: int) -> None:
        self.random = random.Random(seed)
        self._names = DTYPES_OF[plugin]
        torch.manual_seed(seed)
        bits = [torch.randint(2, (BYTES,), dtype=torch.uint8) for _ in range(3)]
        zeros = torch.zeros(BYTES // 4)  # and those with a sign: other bytes, equal numbers
        self._contents = [*bits, zeros.view(torch.uint8), (-zeros).view(torch.uint8)]

    def weight(self) -> torch.Tensor:
        dtype = DTYPES[self.random.choice(self._names)]
        tensor = self.random.choice(self._contents).clone().view(torch.uint8)
        tensor = (tensor & 1 if dtype is torch.bool else tensor).view(dtype)
        if tensor.is_floating_point():
            tensor = tensor.nan_to_num(0.5, 1.0, -1.0).clamp(-4, 4)
        count = tensor.numel()
        shapes = [(count,), (count // 2, 2), (2, count // 2), (1, count), (count, 1)]
        tensor = tensor.reshape(self.random.choice([s for s in shapes if math.prod(s) == count]))
        ways = (
            lambda t: t.transpose(0, -1),
            lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
            lambda t: t[:1].expand_as(t),
            lambda t: t.flip(0),
            lambda t: t[:0],
            lambda t: t,
        )
        return self.random.choice(ways)(tensor)


def program_of(weights: dict[str, torch.Tensor], operator: str) -> str:
    """Every weight's elements, in f32, through one operator."""
    lines, results, value = ["rmir 1", 'input %0 "x" : f32[1]'], [], 1
    for name, weight in weights.items():
        dims, dtype = ",".join(map(str, weight.shape)), DTYPE_NAMES[weight.dtype]
        lines.append(f'weight %{value} "{name}" : {dtype}[{dims}]')
        if dtype != "f32":
            lines.append(f"%{value + 1} = cast(%{value}) : f32[{dims}]")
            value += 1
        lines.append(f"%{value + 1} = {operator}(%{value}) : f32[{dims}]")
        results.append(f"%{value + 1}")
        value += 2
    return "\n".join([*lines, f"return {', '.join(results)}", ""])


class Loaded:
    def __init__(
        self, pool: WorkerPool, weights: dict[str, torch.Tensor], operator: str, damage: int = -1
    ) -> None:
        """``damage``: which bit of the artefact is another one."""
        text = program_of(weights, operator)
        block = weights_block(weights)
        artefact = bytearray(
            pool.worker("compile").compile(
                0, text.encode(), [], block, lambda fraction, stage: None, LIMIT_S
            )
        )
        if damage >= 0:
            artefact[damage // 8 % len(artefact)] ^= 1 << damage % 8
        self.expected = ir_to_torch(text, {n: w.clone() for n, w in weights.items()})(torch.ones(1))
        self.weights = {name: weight.clone() for name, weight in weights.items()}
        self.keys = {key_of(weight) for weight in weights.values()}
        types = ir_text.parse(text).output_types
        outputs = [(t.dtype, list(t.shape)) for t in types]
        self._program = pool.worker("execute").load(
            0, bytes(artefact), block, [("f32", [1])], outputs, LIMIT_S
        )
        self._out = tensors_in(
            self._program.memory, self._program.outputs, [t.dtype for t in types]
        )

    def check(self) -> None:
        for out in self._out:
            out.fill_(float("nan"))
        self._program.execute(LIMIT_S)
        for out, expected in zip(self._out, self.expected, strict=True):
            torch.testing.assert_close(out, expected, rtol=0, atol=0)


class Stress:
    def __init__(self, plugin: str, seed: int) -> None:
        self._pool = WorkerPool(plugin, bytes(_core.backend.fingerprint(plugin, 0)))
        self._draws = Draws(plugin, seed)
        self._live: list[Loaded] = []
        self.copies = 0  # that the device needs at most

    def load(self) -> None:
        draw = self._draws.random
        weights = {f"w{i}": self._draws.weight() for i in range(draw.randrange(1, 4))}
        if self._live and draw.random() < 0.5:
            weights["w0"] = next(iter(draw.choice(self._live).weights.values()))
        held = set().union(*(one.keys for one in self._live))
        self._live.append(Loaded(self._pool, weights, draw.choice(["abs", "neg"])))
        self.copies += len(self._live[-1].keys - held)
        if len(self._live) > MOST_PROGRAMS:
            self.end()

    def end(self) -> None:
        self._live.pop(self._draws.random.randrange(len(self._live)))
        gc.collect()

    def damaged(self) -> None:
        bit = self._draws.random.randrange(1 << 16)
        try:
            Loaded(self._pool, {"w0": self._draws.weight()}, "neg", bit)
        except _core.CoreError as error:
            assert error.reason in REFUSED, (error.reason, error)
        else:
            raise AssertionError(f"expected an artefact with another bit {bit} to be refused")

    def kill(self) -> None:
        self._live.clear()
        for pid in self._pool.alive():
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)

    def check(self) -> None:
        for one in self._draws.random.sample(self._live, min(3, len(self._live))):
            one.check()

    def run(self, steps: int) -> None:
        acts, shares = (self.load, self.check, self.end, self.damaged, self.kill), (8, 8, 3, 1, 1)
        for _ in range(steps):
            (act,) = self._draws.random.choices(acts, shares)
            (act if self._live else self.load)()
        for one in self._live:
            one.check()
        self._pool.close()


def main(plugin: str, steps: str, seed: str) -> None:
    device.load_plugins()
    if plugin == "mine":
        python_plugins.register(python_plugins.read(PLUGINS / "rm_backend_mine.py"))
    stress = Stress(plugin, int(seed))
    stress.run(int(steps))
    print(f"copies {stress.copies}")
    print(f"done {steps}")


if __name__ == "__main__":
    main(*sys.argv[1:])
