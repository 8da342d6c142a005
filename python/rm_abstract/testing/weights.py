"""Are weights that several programs have still there when one ends, and are others kept apart?

A device that keeps one copy of a weight for all programs that have it (docs/plugin_guide.md) may
give it up too early, or take the copy of another weight of the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rm_abstract.worker import ir_text, onnx_program
from rm_abstract.worker.ir_to_torch import ir_to_torch
from rm_abstract.worker.pool import WorkerPool
from rm_abstract.worker.shared_tensors import tensors_in, weights_block

_PROGRAM = """rmir 1
input %0 "x" : f32[2,4]
weight %1 "w" : f32[3,4]
%2 = linear(%0, %1) : f32[2,3]
%3 = {op}(%2) : f32[2,3]
return %3
"""
PROMPT, TOKEN = _PROGRAM.format(op="relu"), _PROGRAM.format(op="tanh")  # two programs of a model
_LIMIT_S = 600.0


class _Loaded:
    def __init__(self, pool: WorkerPool, takes_onnx: bool, text: str, weight: torch.Tensor) -> None:
        weights = {"w": weight}
        self._expected = ir_to_torch(text, weights)
        block = weights_block(weights)
        code = onnx_program.to_onnx(text, weights) if takes_onnx else text.encode()
        artefact = pool.worker("compile").compile(
            0, code, [], block, lambda fraction, stage: None, _LIMIT_S
        )
        program = ir_text.parse(text)
        kinds = [[(t.dtype, list(t.shape)) for t in types]
                 for types in (program.input_types, program.output_types)]  # fmt: skip
        self._program = pool.worker("execute").load(0, artefact, block, *kinds, _LIMIT_S)
        memory = self._program.memory
        (self._in,) = tensors_in(memory, self._program.inputs, ["f32"])
        (self._out,) = tensors_in(memory, self._program.outputs, ["f32"])

    def check(self, compare: Callable[[list[torch.Tensor], Any], None]) -> None:
        x = torch.linspace(-1, 1, 8).reshape(2, 4)
        self._in.copy_(x)
        self._out.fill_(float("nan"))
        self._program.execute(_LIMIT_S)
        compare([self._out], self._expected(x))

    def unload(self) -> None:
        del self._in, self._out, self._program


def check(
    pool: WorkerPool, takes_onnx: bool, compare: Callable[[list[torch.Tensor], Any], None]
) -> None:
    """Raises AssertionError for wrong numbers; ``compare(outputs, expected)`` does."""
    draws = torch.Generator().manual_seed(5)
    one, other = (torch.randn(3, 4, generator=draws) for _ in range(2))
    prompt, token = (_Loaded(pool, takes_onnx, text, one) for text in (PROMPT, TOKEN))
    for program in (prompt, token):
        program.check(compare)
    prompt.unload()
    token.check(compare)
    changed = _Loaded(pool, takes_onnx, TOKEN, other)
    for program in (changed, token, changed):
        program.check(compare)
    token.unload()
    changed.check(compare)
    again = _Loaded(pool, takes_onnx, PROMPT, one)
    for program in (again, changed):
        program.check(compare)
