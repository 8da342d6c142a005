"""sdpa_backward, the operator that attention's gradient becomes where a device has kernels for it,
against the gradient that is made of products and softmax."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rm_abstract import _core, device

SERVED = ["sdpa_backward"]
# batch, heads, groups, queries, keys, head size; causal; dims of a mask
SHAPES = [
    ((1, 2, 2, 5, 5, 3), True, None),
    ((2, 4, 2, 3, 6, 4), False, None),
    ((1, 4, 1, 6, 3, 2), True, None),
    ((2, 2, 2, 4, 5, 3), False, (1, 1, 4, 5)),
    ((1, 2, 1, 4, 4, 2), True, (4, 4)),
]


def _type(dtype: str, dims: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, dims))}]"


def _loss(
    sizes: tuple[int, ...], causal: bool, mask: tuple[int, ...] | None, kind: str, dtype: str
) -> str:
    """sum(sdpa(q, k, v) * w) of inputs q, k, v, w and the mask."""
    b, h, g, s, t, d = sizes
    query, key = _type(dtype, (b, h, s, d)), _type(dtype, (b, g, t, d))
    lines = ["rmir 1"]
    lines += [f'input %{i} "x{i}" : {kind_}' for i, kind_ in enumerate((query, key, key, query))]
    operands = "%0, %1, %2"
    if mask is not None:
        lines.append(f'input %4 "mask" : {_type(dtype if kind == "added" else "bool", mask)}')
        operands += ", %4"
    attrs = f"is_causal={int(causal)}, scale=0x1p-1"
    lines.append(f"%5 = sdpa({operands}) {{{attrs}}} : {query}")
    lines.append(f"%6 = mul(%5, %3) : {query}")
    lines.append(f'%7 = reduce(%6) {{axes=[0,1,2,3], keepdim=0, kind="sum"}} : {dtype}[]')
    lines.append("return %7")
    return "\n".join(lines) + "\n"


def _whole(text: str) -> str:
    """The same with the gradients by sdpa_backward, written by hand: its dtype may be any."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if " = sdpa(" in line)
    query = lines[at].rsplit(" : ", 1)[1]
    dtype, dims = query[:-1].split("[")
    key = next(line for line in lines if '"x1"' in line).rsplit(" : ", 1)[1]
    operands, attrs = lines[at].split("sdpa(")[1].split(") ", 1)
    attrs = attrs.rsplit(" : ", 1)[0]
    rows = f"{'f64' if dtype == 'f64' else 'f32'}[{dims.rsplit(',', 1)[0]}]"
    saved = attrs.replace("}", ", lse=1}")
    saved = "{" + ", ".join(sorted(saved[1:-1].split(", "))) + "}"
    lines[at] = f"%5, %8 = sdpa({operands}) {saved} : {query}, {rows}"
    mask = "%4" if "%4" in operands else "_"
    lines[-1:] = [
        f"%9, %10, %11 = sdpa_backward(%0, %1, %2, {mask}, _, %5, %8, %3) {attrs} : "
        f"{query}, {key}, {key}",
        "return %7, %9, %10, %11",
    ]
    return "\n".join(lines) + "\n"


def _values(
    sizes: tuple[int, ...], mask: tuple[int, ...] | None, kind: str, seed: int
) -> list[list[float]]:
    draw = random.Random(f"{seed} {sizes} {kind}")
    b, h, g, s, t, d = sizes
    counts = [b * h * s * d, b * g * t * d, b * g * t * d, b * h * s * d]
    values = [[draw.uniform(-2, 2) for _ in range(n)] for n in counts]
    if mask is not None:
        n = math.prod(mask)
        if kind == "added":
            values.append([draw.choice((0.0, 0.5, -1.0, -math.inf)) for _ in range(n)])
        else:
            values.append([float(draw.random() < 0.7) for _ in range(n)])
        keys = mask[-1]
        closed = 0.0 if kind == "chosen" else -math.inf
        values[-1][-keys:] = [closed] * keys  # the last row sees nothing
    return values


@pytest.mark.parametrize("kind", ["added", "chosen"])
@pytest.mark.parametrize(("sizes", "causal", "mask"), SHAPES)
def test_it_gives_what_products_and_softmax_give(
    sizes: tuple[int, ...], causal: bool, mask: tuple[int, ...] | None, kind: str, seed: int
) -> None:
    text = _loss(sizes, causal, mask, kind, "f64")
    values = _values(sizes, mask, kind, seed)
    wanted = _core.autograd.evaluate(_core.autograd.differentiate(text, [0, 1, 2]), values)
    got = _core.autograd.evaluate(_whole(text), values)
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("sizes", "causal", "mask"), SHAPES)
def test_the_rule_uses_it_where_it_is_served(
    sizes: tuple[int, ...], causal: bool, mask: tuple[int, ...] | None, dtype: str, seed: int
) -> None:
    text = _loss(sizes, causal, mask, "chosen", dtype)
    values = _values(sizes, mask, "chosen", seed)
    composed = _core.autograd.differentiate(text, [0, 1, 2])
    whole = _core.autograd.differentiate(text, [0, 1, 2], SERVED)
    assert "sdpa_backward" in whole and "softmax" not in whole
    assert "sdpa_backward" not in composed and "lse" not in composed
    bound = {"f32": 1e-5, "bf16": 0.05, "f16": 0.01}[dtype]
    got, wanted = (_core.autograd.evaluate(t, values) for t in (whole, composed))
    for mine, theirs in zip(got[1:], wanted[1:], strict=True):
        assert mine == pytest.approx(theirs, rel=bound, abs=bound)


def test_a_row_closed_by_the_lowest_finite_number() -> None:
    # What transformers' masks add; softmax then gives 1 / n for each key.
    sizes, mask = (1, 2, 2, 3, 4, 2), (3, 4)
    text, values = _loss(sizes, False, mask, "added", "f32"), _values(sizes, mask, "added", 5)
    values[4] = [0.0] * 8 + [torch.finfo(torch.float32).min] * 4
    got, wanted = (
        _core.autograd.evaluate(_core.autograd.differentiate(text, [0, 1, 2], *served), values)
        for served in ((SERVED,), ())
    )
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_a_gradient_of_one_operand_alone() -> None:
    text = _loss((1, 2, 2, 5, 5, 3), True, None, "chosen", "f32")
    values = _values((1, 2, 2, 5, 5, 3), None, "chosen", 3)
    all_three = _core.autograd.evaluate(
        _core.autograd.differentiate(text, [0, 1, 2], SERVED), values
    )
    for i in range(3):
        alone = _core.autograd.differentiate(text, [i], SERVED)
        assert "sdpa_backward" in alone
        assert _core.autograd.evaluate(alone, values)[1] == all_three[1 + i]


def test_what_its_kernels_do_not_take_stays_composed() -> None:
    added = _loss((1, 2, 2, 3, 4, 2), False, (3, 4), "added", "f32")
    # An added mask (see below), with a gradient or without, doubles.
    assert "sdpa_backward" not in _core.autograd.differentiate(added, [0, 4], SERVED)
    assert "sdpa_backward" not in _core.autograd.differentiate(added, [0, 1], SERVED)
    doubles = _loss((1, 2, 2, 3, 4, 2), False, None, "added", "f64")
    assert "sdpa_backward" not in _core.autograd.differentiate(doubles, [0], SERVED)
    # Values of another size than the keys.
    text = (
        'rmir 1\ninput %0 "q" : f32[1,1,3,2]\ninput %1 "v" : f32[1,1,3,4]\n'
        "%2 = sdpa(%0, %0, %1) {is_causal=0, scale=0x1p0} : f32[1,1,3,4]\n"
        '%3 = reduce(%2) {axes=[0,1,2,3], keepdim=0, kind="sum"} : f32[]\nreturn %3\n'
    )
    assert "sdpa_backward" not in _core.autograd.differentiate(text, [0, 1], SERVED)


def _with_range_mask(sizes: tuple[int, ...], expanded: bool) -> str:
    lines = _loss(sizes, False, None, "chosen", "f32").splitlines()
    at = next(i for i, line in enumerate(lines) if " = sdpa(" in line)
    batch, n = sizes[0], sizes[3]
    made = [
        f"%20 = iota() {{start=<0>, step=1}} : i64[{n}]",
        f"%21 = reshape(%20) {{shape=<{n},1>}} : i64[{n},1]",
        f"%22 = le(%20, %21) : bool[{n},{n}]",
    ]
    if expanded:
        made.append(f"%23 = expand(%22) {{shape=<{batch},1,{n},{n}>}} : bool[{batch},1,{n},{n}]")
    lines[at : at + 1] = [*made, lines[at].replace("%2)", f"%2, %{23 if expanded else 22})")]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("expanded", [False, True])
def test_a_range_mask_becomes_causal_in_both(expanded: bool) -> None:
    sizes = (2, 2, 2, 80, 80, 2)  # smaller masks are folded
    made = _core.autograd.differentiate(_with_range_mask(sizes, expanded), [0, 1, 2], SERVED)
    text = _core.ir.run_passes(made, {})
    assert text.count("is_causal=1") == 2 and "is_causal=0" not in text
    values = _values(sizes, None, "chosen", 5)
    got, wanted = (_core.autograd.evaluate(t, values) for t in (text, made))
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%9, %10, %11 = sdpa_backward(%0, %1, %2, _, _, %0, %8, %3)", "what sdpa gave"),
        ("%9, %10, %11 = sdpa_backward(%0, %1, %2, _, _, %5, %5, %3)", "what sdpa gave"),
        ("%9, %10, %11 = sdpa_backward(%0, %1, %2, _, _, _, %8, %3)", "sdpa_backward"),
    ],
)
def test_operands_that_do_not_fit_are_refused(line: str, said: str) -> None:
    b, h, s, t, d = 1, 2, 3, 4, 2
    text = (
        f'rmir 1\ninput %0 "q" : f32[{b},{h},{s + 1},{d}]\ninput %1 "k" : f32[{b},{h},{t},{d}]\n'
        f'input %2 "v" : f32[{b},{h},{t},{d}]\ninput %3 "dy" : f32[{b},{h},{s},{d}]\n'
        f'input %5 "y" : f32[{b},{h},{s},{d}]\ninput %8 "lse" : f32[{b},{h},{s}]\n'
        f"{line} {{is_causal=0, scale=0x1p0}} : f32[{b},{h},{s + 1},{d}], f32[{b},{h},{t},{d}], "
        f"f32[{b},{h},{t},{d}]\nreturn %9\n"
    )
    with pytest.raises(_core.CoreError, match=said):
        _core.autograd.evaluate(text, [[0.0]] * 6)


def _joined(axis: int, kept: bool) -> str:
    """Gradients of q, k and v as heads of rows, beside each other along an axis."""
    b, h, s, d = 2, 3, 5, 4
    heads, rows = f"f32[{b},{h},{s},{d}]", f"f32[{b},{s},{h * d}]"
    lines = ["rmir 1"]
    lines += [f'input %{i} "{name}" : {heads}' for i, name in enumerate(("q", "k", "v", "dy"))]
    lines += [
        "%4, %5 = sdpa(%0, %1, %2) {is_causal=1, lse=1, scale=0x1p-1} : "
        f"{heads}, f32[{b},{h},{s}]",
        "%6, %7, %8 = sdpa_backward(%0, %1, %2, _, _, %4, %5, %3) "
        f"{{is_causal=1, scale=0x1p-1}} : {heads}, {heads}, {heads}",
    ]
    for i in range(3):
        lines += [
            f"%{10 + i} = permute(%{6 + i}) {{axes=[0,2,1,3]}} : f32[{b},{s},{h},{d}]",
            f"%{20 + i} = reshape(%{10 + i}) {{shape=<{b},{s},{h * d}>}} : {rows}",
        ]
    wide = [b, s, h * d]
    wide[axis] *= 3
    lines.append(f"%30 = concat(%20, %21, %22) {{axis={axis}}} : {_type('f32', tuple(wide))}")
    return "\n".join([*lines, f"return %30{', %20' if kept else ''}"]) + "\n"


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_its_results_are_written_where_they_are_joined(axis: int, kept: bool, seed: int) -> None:
    device.load_plugins()
    text = _joined(axis, kept)
    generator = torch.Generator().manual_seed(seed)
    arrays = [torch.randn(2, 3, 5, 4, generator=generator) for _ in range(4)]
    program = _core.Program(text, {}, ["cpu"])
    got = program.run(arrays)
    wanted = _core.autograd.evaluate(text, [a.flatten().tolist() for a in arrays])
    for mine, theirs in zip(got, wanted, strict=True):
        mine = torch.from_dlpack(mine)
        torch.testing.assert_close(mine.flatten(), torch.tensor(theirs), rtol=1e-5, atol=1e-5)
    copies = sum(n for name, n in program.report()["kernels"].items() if "copy" in name)
    # What is read elsewhere has a place of its own; rows in the middle are not of one pitch.
    assert copies == (3 if axis == 1 else 1 if kept else 0)
