"""The gradient programs, run by a float64 interpreter on the host, against torch's autograd."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from programs import OPCODES, chains, run

FLAT = ("logical_not", "isnan")  # torch gives them no gradient at all
UNARY = [name for name, code in OPCODES.items() if 2 <= code <= 27 and name not in FLAT]
BINARY = ["add", "sub", "mul", "div", "pow", "minimum", "maximum", "remainder"]


def check(m: ModuleType, code: list[int], imm: list[float], operands: list[torch.Tensor]) -> None:
    leaves = [x.clone().requires_grad_() for x in operands]
    y = run(code, imm, leaves)
    dy = torch.rand_like(y) + 0.5
    if y.requires_grad:
        expected = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    else:  # a chain of constants
        expected = [None] * len(leaves)
    for k, wanted in enumerate(expected):
        grad_code, grad_imm = m.gradient(code, imm, len(operands), k)
        got = run(grad_code, grad_imm, [*operands, dy]) if grad_code else torch.zeros_like(dy)
        wanted = torch.zeros_like(dy) if wanted is None else wanted
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", UNARY)
def test_unary_gradients_are_those_of_torch(
    module: Callable[[str], ModuleType], name: str, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.rand(500, dtype=torch.float64) * 3 + 0.05
    if name not in ("log", "sqrt", "rsqrt"):
        x = torch.cat([x, -x * 0.3])
    check(module("ewise"), [OPCODES[name], 1, 0, -1, -1], [], [x])


@pytest.mark.parametrize("name", BINARY)
def test_binary_gradients_are_those_of_torch(
    module: Callable[[str], ModuleType], name: str, seed: int
) -> None:
    torch.manual_seed(seed)
    a, b = torch.rand(2, 500, dtype=torch.float64) * 3 + 0.1
    b[:50] = a[:50] if name in ("minimum", "maximum") else b[:50]  # ties
    check(module("ewise"), [OPCODES[name], 1, 0, 1, -1], [], [a, b])


def test_gradients_of_random_chains_are_those_of_torch(
    module: Callable[[str], ModuleType], seed: int
) -> None:
    torch.manual_seed(seed)
    for code, imm, count in chains(seed, 60, cls=1):
        check(module("ewise"), code, imm, list(torch.randn(count, 64, dtype=torch.float64)))
