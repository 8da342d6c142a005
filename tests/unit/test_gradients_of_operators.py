"""Every gradient rule against central differences of the operator's reference in float64."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest

from rm_abstract import _core

_STEP = 1e-5


@dataclass(frozen=True)
class Case:
    """`op` on float inputs of these shapes, then on integer inputs of these values."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]
    attrs: str = ""
    ints: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    order: tuple[int, ...] = ()  # operands by input; all in order when empty
    low: float = -2.0
    high: float = 2.0
    second: str = field(default="")  # type of a second result

    @property
    def name(self) -> str:
        return f"{self.op} {self.attrs} {self.shapes}"


def _type(dtype: str, dims: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, dims))}]"


_UNARY = "neg abs exp sin cos tanh erf sigmoid relu gelu gelu_tanh silu softplus expm1".split()
_POSITIVE = "log sqrt rsqrt reciprocal log1p".split()
_I = "i64"
CASES = [
    *(Case(op, ((2, 3),), (2, 3)) for op in _UNARY),
    *(Case(op, ((2, 3),), (2, 3), low=0.3) for op in _POSITIVE),
    *(Case(op, ((2, 3), (3,)), (2, 3)) for op in ("add", "sub", "mul", "maximum", "minimum")),
    Case("div", ((2, 1), (3,)), (2, 3), low=0.5),
    Case("pow", ((2, 3), (3,)), (2, 3), low=0.5),
    Case("remainder", ((5,), (5,)), (5,), low=0.7, high=5.0),
    Case("where", ((2, 3), (3,)), (2, 3), ints=(((2, 3), (1, 0, 1, 0, 0, 1)),), order=(2, 0, 1)),
    Case("cast", ((2, 3),), (2, 3)),
    Case("reshape", ((2, 3),), (3, 2), "shape=<3,2>"),
    Case("permute", ((2, 3, 4),), (4, 2, 3), "axes=[2,0,1]"),
    Case("expand", ((3, 1),), (2, 3, 4), "shape=<2,3,4>"),
    Case("slice", ((2, 7),), (2, 3), "axis=1, start=<2>, step=1, stop=<5>"),
    Case("slice", ((7, 2),), (3, 2), "axis=0, start=<1>, step=2, stop=<6>"),
    Case("slice", ((7,),), (3,), "axis=0, start=<0>, step=3, stop=<7>"),
    Case("concat", ((2, 3), (2, 2)), (2, 5), "axis=1"),
    *(
        Case("reduce", ((2, 3, 2),), (2, 2), f'axes=[1], keepdim=0, kind="{kind}"')
        for kind in ("sum", "mean", "max", "min", "prod")
    ),
    Case("reduce", ((2, 3),), (1, 1), 'axes=[0,1], keepdim=1, kind="mean"'),
    Case("cumsum", ((2, 4),), (2, 4), "axis=1"),
    Case("softmax", ((2, 4),), (2, 4), "axis=1, log=0"),
    Case("softmax", ((3, 2),), (3, 2), "axis=0, log=1"),
    Case("sort", ((2, 4),), (2, 4), "axis=1, descending=1, k=-1", second="i64[2,4]"),
    Case("cross_entropy", ((3, 4),), (3,), ints=(((3,), (2, 0, 3)),), second="f64[3]"),
    Case("matmul", ((2, 3, 4), (4, 2)), (2, 3, 2)),
    Case("matmul", ((3, 4), (2, 4, 2)), (2, 3, 2)),
    Case("linear", ((2, 2, 3), (4, 3), (4,)), (2, 2, 4)),
    Case("layer_norm", ((2, 5), (5,), (5,)), (2, 5), "eps=0x1p-10, num_axes=1"),
    Case("layer_norm", ((2, 2, 3),), (2, 2, 3), "eps=0x1p-10, num_axes=2"),
    Case("rms_norm", ((2, 5), (5,)), (2, 5), "eps=0x1p-10, weight_offset=0x1p0"),
    Case(
        "sdpa",
        ((1, 4, 3, 2), (1, 2, 3, 2), (1, 2, 3, 3)),
        (1, 4, 3, 3),
        "is_causal=1, scale=0x1p-1",
    ),
    Case(
        "sdpa",
        ((1, 2, 3, 2), (1, 2, 4, 2), (1, 2, 4, 2), (3, 4)),
        (1, 2, 3, 2),
        "is_causal=0, scale=0x1p0",
    ),
    Case(
        "sdpa",
        ((1, 1, 2, 2), (1, 1, 3, 2), (1, 1, 3, 2)),
        (1, 1, 2, 2),
        "is_causal=0, scale=0x1p0",
        ints=(((2, 3), (1, 0, 1, 0, 0, 0)),),  # the second row sees nothing
    ),
    Case(
        "conv",
        ((2, 2, 5), (3, 2, 2), (3,)),
        (2, 3, 2),
        "dilation=[2], groups=1, padding=[1,0], stride=[2]",
    ),
    Case(
        "conv",
        ((1, 4, 4, 3), (4, 2, 2, 3)),
        (1, 4, 2, 2),
        "groups=2, padding=[0,1,0,1], stride=[2,2]",
    ),
    Case(
        "conv",
        ((2, 2, 3), (2, 3, 2), (3,)),
        (2, 3, 7),
        "dilation=[2], groups=1, output_padding=[1], padding=[1,0], stride=[2], transposed=1",
    ),
    Case(
        "conv",
        ((1, 4, 2, 3), (4, 1, 2, 3)),
        (1, 2, 3, 6),
        "groups=2, output_padding=[0,1], padding=[0,1,1,1], stride=[2,2], transposed=1",
    ),
    *(
        Case("pool", ((1, 2, 5, 7),), result, attrs)
        for result, attrs in (
            ((1, 2, 2, 3), 'kernel=[2,2], kind="max", stride=[2,2]'),
            ((1, 2, 3, 4), 'kernel=[2,2], kind="max", padding=[0,0,1,1], stride=[2,2]'),
            ((1, 2, 3, 4), 'kernel=[3,3], kind="max", padding=[1,1,1,1], stride=[2,2]'),
            ((1, 2, 3, 5), 'dilation=[2,1], kernel=[2,3], kind="max"'),
            ((1, 2, 2, 3), 'kernel=[2,2], kind="mean", stride=[2,2]'),
            ((1, 2, 3, 4), 'kernel=[3,3], kind="mean", padding=[1,1,1,1], stride=[2,2]'),
            (
                (1, 2, 3, 4),
                'count_include_pad=0, kernel=[3,2], kind="mean", padding=[1,0,1,1], stride=[2,2]',
            ),
            (
                (1, 2, 2, 3),
                'divisor=3, kernel=[3,3], kind="mean", padding=[1,1,-1,-1], stride=[2,2]',
            ),
            ((1, 2, 4, 4), 'kernel=[2,4], kind="mean"'),
        )
    ),
    Case("pool", ((2, 1, 9),), (2, 1, 3), 'kernel=[3], kind="max", stride=[3]'),
    Case("pool", ((1, 1, 3, 4, 2),), (1, 1, 2, 3, 1), 'kernel=[2,2,2], kind="mean"'),
    *(
        Case("resize", ((1, 2, 3, 4),), result, attrs)
        for result, attrs in (
            ((1, 2, 6, 8), 'mode="nearest", ratio=f[0x1p-1,0x1p-1], size=<6,8>'),
            ((1, 2, 4, 3), 'mode="nearest", ratio=f[0x1.8p-1,0x1.5555555555555p+0], size=<4,3>'),
            (
                (1, 2, 6, 6),
                'align_corners=0, mode="linear", ratio=f[0x1p-1,0x1.5555555555555p-1], size=<6,6>',
            ),
            (
                (1, 2, 5, 2),
                'align_corners=1, mode="linear", ratio=f[0x1p-1,0x1.8p+1], size=<5,2>',
            ),
        )
    ),
    Case("resize", ((2, 1, 5),), (2, 1, 3), 'mode="linear", ratio=f[0x1.aaaaaap+0], size=<3>'),
    Case("group_norm", ((2, 4, 3), (4,), (4,)), (2, 4, 3), "eps=0x1p-10, groups=2"),
    Case("group_norm", ((1, 3, 2, 2),), (1, 3, 2, 2), "eps=0x1p-10, groups=3"),
    Case("embedding", ((4, 3),), (2, 2, 3), ints=(((2, 2), (3, 1, 3, 0)),)),
    Case("gather", ((2, 4),), (2, 3), "axis=1", ints=(((2, 3), (3, 1, 3, 0, 0, 2)),)),
    Case("gather", ((3, 4),), (3, 1), "axis=1", ints=(((3, 1), (3, 0, 2)),)),
    Case(
        "gather", ((3, 2, 4),), (1, 2, 4), "axis=0", ints=(((1, 2, 4), (2, 0, 1, 1, 0, 0, 2, 2)),)
    ),
    Case("index", ((4, 3),), (3, 3), "axes=[0]", ints=(((3,), (-1, 2, 2)),)),
    Case("index", ((2, 3, 2),), (2, 2), "axes=[0,1]", ints=(((2,), (1, 1)), ((2,), (2, -1)))),
    Case("index_copy", ((4, 2), (2, 2)), (4, 2), "axis=0", ints=(((2,), (3, 1)),), order=(0, 2, 1)),
    *(
        Case(
            "scatter",
            ((2, 4), (2, 2)),
            (2, 4),
            f'axis=1, kind="{kind}"',
            ints=(((2, 2), (3, 1, 0, 2)),),
            order=(0, 2, 1),
        )
        for kind in ("add", "set")
    ),
]


def _program(case: Case) -> tuple[str, int]:
    """(text of sum(op(...) * w), number of differentiated inputs); w is the last input."""
    lines, inputs = ["rmir 1"], 0
    for shape in case.shapes:
        lines.append(f'input %{inputs} "x{inputs}" : {_type("f64", shape)}')
        inputs += 1
    for shape, _ in case.ints:
        dtype = "bool" if case.op in ("where", "sdpa") else "i64"
        lines.append(f'input %{inputs} "x{inputs}" : {_type(dtype, shape)}')
        inputs += 1
    weight, y = inputs, inputs + 1
    lines.append(f'input %{weight} "w" : {_type("f64", case.result)}')
    order = case.order or tuple(range(inputs))
    results, types = f"%{y}", _type("f64", case.result)
    last = y
    if case.second:
        last += 1
        results, types = f"{results}, %{last}", f"{types}, {case.second}"
    attrs = f" {{{case.attrs}}}" if case.attrs else ""
    operands = ", ".join(f"%{i}" for i in order)
    lines.append(f"{results} = {case.op}({operands}){attrs} : {types}")
    lines.append(f"%{last + 1} = mul(%{y}, %{weight}) : {_type('f64', case.result)}")
    axes = ",".join(str(i) for i in range(len(case.result)))
    lines.append(
        f'%{last + 2} = reduce(%{last + 1}) {{axes=[{axes}], keepdim=0, kind="sum"}} : f64[]'
    )
    lines.append(f"return %{last + 2}")
    return "\n".join(lines) + "\n", len(case.shapes)


def _keep_apart(values: list[list[float]]) -> None:
    """Moves numbers so that a step of the difference never changes which of two is larger."""
    places = [(i, j) for i, row in enumerate(values) for j in range(len(row))]
    last = -math.inf
    for i, j in sorted(places, key=lambda p: values[p[0]][p[1]]):
        last = values[i][j] = max(values[i][j], last + 10 * _STEP)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_rule_gives_the_slope_of_the_reference(case: Case, seed: int) -> None:
    draw = random.Random(f"{seed} {case.name}")
    text, count = _program(case)
    values = [
        [draw.uniform(case.low, case.high) for _ in range(math.prod(shape))]
        for shape in case.shapes
    ]
    for i, j in itertools.product(range(len(values)), range(12)):  # off the kinks
        if j < len(values[i]) and abs(values[i][j]) < 0.01:
            values[i][j] += 0.1
    if "max" in case.op + case.attrs or "min" in case.op + case.attrs or case.op == "sort":
        _keep_apart(values)
    values += [list(map(float, numbers)) for _, numbers in case.ints]
    values.append([draw.uniform(0.5, 1.5) for _ in range(math.prod(case.result))])
    both = _core.autograd.differentiate(text, list(range(count)))
    _, *gradients = _core.autograd.evaluate(both, values)
    assert len(gradients) == count
    for i in range(count):
        for j in range(len(values[i])):
            kept = values[i][j]
            sums = []
            for sign in (1, -1):
                values[i][j] = kept + sign * _STEP
                sums.append(_core.autograd.evaluate(text, values)[0][0])
            values[i][j] = kept
            slope = (sums[0] - sums[1]) / (2 * _STEP)
            assert gradients[i][j] == pytest.approx(slope, rel=2e-5, abs=2e-7), (i, j)


def test_every_operator_is_differentiated_here_or_has_no_gradient() -> None:
    assert {c.op for c in CASES} == set(_core.autograd.differentiable())
    reasons = _core.autograd.without_gradient()
    assert not set(reasons) & {c.op for c in CASES}
    assert all(reasons.values()), [op for op, why in reasons.items() if not why]


def test_an_operator_without_a_rule_says_why() -> None:
    text = (
        'rmir 1\ninput %0 "a" : f64[2,2]\n'
        '%1 = gemm(%0, %0) {activation="none", trans_b=0} : f64[2,2]\n'
        '%2 = reduce(%1) {axes=[0,1], keepdim=0, kind="sum"} : f64[]\nreturn %2\n'
    )
    with pytest.raises(_core.CoreError, match="only passes make it") as caught:
        _core.autograd.differentiate(text, [0])
    assert caught.value.reason == "RM702"


def test_a_product_of_factors_that_are_zero_has_the_slope_of_the_others() -> None:
    text = (
        'rmir 1\ninput %0 "x" : f64[3,3]\n'
        '%1 = reduce(%0) {axes=[1], keepdim=0, kind="prod"} : f64[3]\n'
        '%2 = reduce(%1) {axes=[0], keepdim=0, kind="sum"} : f64[]\nreturn %2\n'
    )
    both = _core.autograd.differentiate(text, [0])
    _, gradient = _core.autograd.evaluate(both, [[2.0, 3.0, 4.0, 2.0, 0.0, 4.0, 0.0, 0.0, 4.0]])
    assert gradient == [12.0, 8.0, 6.0, 0.0, 8.0, 0.0, 0.0, 0.0, 0.0]


def test_an_operator_without_a_rule_is_named() -> None:
    text = (
        'rmir 1\ninput %0 "x" : f64[2]\n'
        '%1 = aten.foo.default(%0) {schema_args="[]"} : f64[]\nreturn %1\n'
    )
    with pytest.raises(_core.CoreError, match=r"aten\.foo\.default") as caught:
        _core.autograd.differentiate(text, [0])
    assert caught.value.reason == "RM702"


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    text = 'rmir 1\ninput %0 "x" : f64[2]\n%1 = exp(%0) : f64[2]\nreturn %1\n'
    with pytest.raises(_core.CoreError) as caught:
        _core.autograd.differentiate(text, [0])
    assert caught.value.reason == "RM704"
