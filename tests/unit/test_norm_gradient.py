"""layer_norm_backward and rms_norm_backward, which gradients of norms become where a device has
kernels for them, against the gradients made of sums and products."""

from __future__ import annotations

import math
import random

import pytest

from rm_abstract import _core

SERVED = ["layer_norm_backward", "rms_norm_backward"]
# operator, dims, axes that are normalised, weight, bias, weight_offset
CASES = [
    ("layer_norm", (3, 5), 1, True, True, ""),
    ("layer_norm", (2, 3, 4), 2, True, True, ""),
    ("layer_norm", (4, 6), 1, False, False, ""),
    ("layer_norm", (4, 6), 1, True, False, ""),
    ("rms_norm", (2, 2, 7), 1, True, False, ", weight_offset=0x1p0"),
    ("rms_norm", (3, 5), 1, False, False, ""),
    ("rms_norm", (3, 5), 1, True, False, ""),
]


def _type(dtype: str, dims: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, dims))}]"


def _loss(case: tuple[str, tuple[int, ...], int, bool, bool, str], dtype: str) -> tuple[str, int]:
    """sum(norm(x + g) * w) + sum((x + g) * w): x arrives twice. And the number of parameters."""
    op, dims, axes, weight, bias, more = case
    column = _type(dtype, dims[len(dims) - axes :])
    lines = ["rmir 1", f'input %0 "x" : {_type(dtype, dims)}']
    operands = ["%0"]
    for name, given in (("weight", weight), ("bias", bias)):
        if given:
            lines.append(f'input %{len(operands)} "{name}" : {column}')
            operands.append(f"%{len(operands)}")
    count = len(operands)
    w, y = count, count + 1
    full, every = _type(dtype, dims), ",".join(map(str, range(len(dims))))
    lines.append(f'input %{w} "w" : {full}')
    attrs = f"eps=0x1p-10, num_axes={axes}{more}"
    if len(operands) == 1:
        operands.append("_")
    lines += [
        f"%{y} = {op}({', '.join(operands)}) {{{attrs}}} : {full}",
        f"%{y + 1} = mul(%{y}, %{w}) : {full}",
        f"%{y + 2} = mul(%0, %0) : {full}",
        f"%{y + 3} = add(%{y + 1}, %{y + 2}) : {full}",
        f'%{y + 4} = reduce(%{y + 3}) {{axes=[{every}], keepdim=0, kind="sum"}} : {dtype}[]',
        f"return %{y + 4}",
    ]
    return "\n".join(lines) + "\n", count


def _values(
    case: tuple[str, tuple[int, ...], int, bool, bool, str], seed: int
) -> list[list[float]]:
    draw = random.Random(f"{seed} {case}")
    _, dims, axes, weight, bias, _ = case
    column = math.prod(dims[len(dims) - axes :])
    counts = [math.prod(dims), *[column] * (weight + bias), math.prod(dims)]
    return [[draw.uniform(-2, 2) for _ in range(n)] for n in counts]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_rule_uses_it_where_it_is_served(
    case: tuple[str, tuple[int, ...], int, bool, bool, str], dtype: str, seed: int
) -> None:
    text, count = _loss(case, dtype)
    values, wrt = _values(case, seed), list(range(count))
    composed = _core.autograd.differentiate(text, wrt)
    whole = _core.autograd.differentiate(text, wrt, SERVED)
    assert f"{case[0]}_backward" in whole and "rsqrt" not in whole
    assert "_backward" not in composed
    bound = {"f32": 2e-5, "bf16": 0.05, "f16": 0.01}[dtype]
    got, wanted = (_core.autograd.evaluate(t, values) for t in (whole, composed))
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=bound, abs=bound)
    # The passes let it add what arrives at x from elsewhere.
    passed = _core.ir.run_passes(whole, {})
    got = _core.autograd.evaluate(passed, values)
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=bound, abs=bound)


@pytest.mark.parametrize("case", [c for c in CASES if c[2] == 1], ids=str)
def test_doubles_agree_to_their_last_digits(
    case: tuple[str, tuple[int, ...], int, bool, bool, str], seed: int
) -> None:
    op, dims, _, weight, _, more = case
    text, count = _loss(case, "f64")
    values = _values(case, seed)
    _, *wanted = _core.autograd.evaluate(
        _core.autograd.differentiate(text, list(range(count))), values
    )
    full, column = _type("f64", dims), _type("f64", dims[-1:])
    results = [full, column, column][: 3 if op == "layer_norm" else 2]
    names = ", ".join(f"%{10 + i}" for i in range(len(results)))
    whole = "\n".join(
        [
            *text.splitlines()[: 2 + count],
            f"%8 = add(%0, %0) : {full}",
            f"{names} = {op}_backward(%{count}, %0, {'%1' if weight else '_'}, %8) "
            f"{{eps=0x1p-10{more}}} : {', '.join(results)}",
            f"return {names}",
        ]
    )
    got = _core.autograd.evaluate(whole + "\n", values)
    for mine, theirs in zip(got[:count], wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-11)


def test_the_sum_is_taken_by_the_norm() -> None:
    text, count = _loss(CASES[0], "f32")
    whole = _core.autograd.differentiate(text, list(range(count)), SERVED)
    passed = _core.ir.run_passes(whole, {})
    line = next(line for line in passed.splitlines() if "layer_norm_backward" in line)
    operands = line.split("(")[1].split(")")[0].split(", ")
    assert len(operands) == 4 and "_" not in operands
    assert line.split(",")[0] in passed.splitlines()[-1]  # its dx is the gradient
