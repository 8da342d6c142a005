"""Ewise programs for tests: the opcodes, an interpreter in torch, and random fused chains."""

from __future__ import annotations

import random

import torch

F = torch.nn.functional
_NAMES = (
    "const copy neg abs exp log sqrt rsqrt sin cos tanh erf sigmoid relu gelu gelu_tanh silu "
    "logical_not reciprocal floor ceil round sign softplus log1p expm1 isnan trunc"
).split()
_BINARY = (
    "add sub mul div pow minimum maximum floor_div remainder eq ne lt le gt ge and or xor"
).split()
OPCODES = {name: k for k, name in enumerate(_NAMES)}
OPCODES |= {name: 40 + k for k, name in enumerate(_BINARY)} | {"where": 70, "fma": 71}
NAMES = {code: name for name, code in OPCODES.items()}

_SPECIAL = {
    "copy": lambda a: a.clone(),
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "silu": F.silu,
    "softplus": F.softplus,
    "floor_div": torch.floor_divide,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "xor": torch.logical_xor,
    "where": lambda a, b, c: torch.where(a != 0, b, c),
    "fma": lambda a, b, c: a * b + c,
    "sign": torch.sign,
}


def apply(opcode: int, *values: torch.Tensor) -> torch.Tensor:
    name = NAMES[opcode]
    return (_SPECIAL.get(name) or getattr(torch, name))(*values)


def run(code: list[int], imm: list[float], operands: list[torch.Tensor]) -> torch.Tensor:
    """The program in the operands' own (float64) precision."""
    registers = list(operands)
    for i in range(0, len(code), 5):
        opcode, _, a, b, c = code[i : i + 5]
        if opcode == 0:
            registers.append(torch.full_like(operands[0], imm[a]))
            continue
        values = [registers[r] for r in (a, b, c) if r >= 0]
        result = apply(opcode, *values)
        registers.append(result.to(operands[0].dtype))
    return registers[-1]


def chains(seed: int, count: int, cls: int = 0) -> list[tuple[list[int], list[float], int]]:
    """Smooth, bounded programs of up to 12 instructions over up to 4 operands."""
    rng = random.Random(seed)
    unary = [OPCODES[n] for n in "neg tanh sigmoid silu gelu gelu_tanh sin cos relu abs".split()]
    binary = [OPCODES[n] for n in "add sub mul maximum minimum".split()]
    out = []
    for _ in range(count):
        operands = rng.randint(1, 4)
        code: list[int] = []
        imm: list[float] = []
        for i in range(rng.randint(2, 12)):
            top = operands + i - 1
            pick = rng.random()
            a, b, c = (rng.randint(max(0, top - 4), top) for _ in range(3))
            a = top if rng.random() < 0.7 else a
            if pick < 0.1:
                imm.append(rng.uniform(-2, 2))
                code += [0, cls, len(imm) - 1, -1, -1]
            elif pick < 0.5:
                code += [rng.choice(unary), cls, a, -1, -1]
            elif pick < 0.9:
                code += [rng.choice(binary), cls, a, b, -1]
            else:
                code += [71, cls, a, b, c]
        code += [OPCODES["tanh"], cls, operands + len(code) // 5 - 1, -1, -1]
        out.append((code, imm, operands))
    return out


def lines(seed: int, count: int) -> list[tuple[list[int], list[float], int]]:
    """Programs whose every step takes the step before and at most one new operand or constant."""
    rng = random.Random(seed)
    unary = [OPCODES[n] for n in "neg tanh sigmoid silu gelu gelu_tanh relu abs copy".split()]
    binary = [OPCODES[n] for n in "add sub mul maximum minimum".split()]
    out = []
    for _ in range(count):
        operands = rng.randint(1, 3)
        steps: list[int] = []  # an operand's number, -1 a unary step, -2 a constant
        steps += range(1, operands)
        steps += [rng.choice((-1, -1, -2)) for _ in range(rng.randint(1, 5))]
        order = [s for s in rng.sample(steps, len(steps)) if s < 0]
        for s in range(1, operands):  # operands keep their order
            order.insert(rng.randint(order.index(s - 1) + 1 if s > 1 else 0, len(order)), s)
        code: list[int] = []
        imm: list[float] = []
        last = 0
        for s in order:
            other = s
            if s == -1:
                code += [rng.choice(unary), 0, last, -1, -1]
            else:
                if s == -2:
                    imm.append(rng.uniform(-2, 2))
                    code += [0, 0, len(imm) - 1, -1, -1]
                    other = operands + len(code) // 5 - 1
                pair = [last, other] if rng.random() < 0.5 else [other, last]
                code += [rng.choice(binary), 0, *pair, -1]
            last = operands + len(code) // 5 - 1
        out.append((code, imm, operands))
    return out
