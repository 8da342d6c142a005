"""What is recognised in a forward before it is differentiated for a GPU; sums of gradients of
slices."""

from __future__ import annotations

import random

import pytest

from rm_abstract import _core

GELU = [  # of transformers' NewGELUActivation under autocast: f32 and back at every step
    "%10 = mul(%0, %1) : {h}[2,9]",
    "%11 = pow(%0, %2) : {h}[2,9]",
    "%12 = cast(%11) : f32[2,9]",
    "%13 = mul(%12, %3) : f32[2,9]",
    "%14 = cast(%13) : {h}[2,9]",
    "%15 = add(%0, %14) : {h}[2,9]",
    "%16 = cast(%15) : f32[2,9]",
    "%17 = mul(%16, %4) : f32[2,9]",
    "%18 = cast(%17) : {h}[2,9]",
    "%19 = tanh(%18) : {h}[2,9]",
    "%20 = add(%19, %5) : {h}[2,9]",
    "%21 = mul(%10, %20) : {h}[2,9]",
    "return %21",
]


def _gelu(half: str) -> str:
    bits = {"bf16": ("003f", "4040", "803f"), "f16": ("0038", "0042", "003c")}[half]
    lines = ["rmir 1", 'input %0 "x" : {h}[2,9]']
    for i, text in zip((1, 2, 5), bits, strict=True):
        lines.append(f"literal %{i} : {{h}}[] = {text}")
    lines += ["literal %3 : f32[] = 1327373d", "literal %4 : f32[] = 2a424c3f"]
    order = sorted(lines[2:], key=lambda line: int(line.split("%")[1].split(" ")[0]))
    return "\n".join([*lines[:2], *order, *GELU]).replace("{h}", half) + "\n"


@pytest.mark.parametrize("half", ["bf16", "f16"])
def test_a_gelu_with_autocasts_roundings_is_one_operator(half: str) -> None:
    text = _gelu(half)
    made = _core.ir.run_forward_passes(text, True)
    assert "gelu_tanh(%0)" in made and "tanh(%1" not in made and "pow" not in made
    x = [[-3 + i / 3 for i in range(18)]]
    wanted, got = (_core.autograd.evaluate(t, x)[0] for t in (text, made))
    assert got == pytest.approx(wanted, rel=0.02, abs=0.02)


F32_GELU = [  # as CUDA's autocast has it: pow and what follows in f32
    'rmir 1\ninput %0 "x" : bf16[2,9]',
    "literal %1 : bf16[] = 003f",
    "literal %2 : f32[] = 00004040",
    "literal %3 : f32[] = 1327373d",
    "literal %4 : f32[] = 2a424c3f",
    "literal %5 : f32[] = 0000803f",
    "%10 = mul(%0, %1) : bf16[2,9]",
    "%11 = cast(%0) : f32[2,9]",
    "%12 = pow(%11, %2) : f32[2,9]",
    "%13 = mul(%12, %3) : f32[2,9]",
    "%14 = add(%11, %13) : f32[2,9]",
    "%15 = mul(%14, %4) : f32[2,9]",
    "%16 = tanh(%15) : f32[2,9]",
    "%17 = add(%16, %5) : f32[2,9]",
    "%18 = cast(%10) : f32[2,9]",
    "%19 = mul(%18, %17) : f32[2,9]",
    "return %19",
]


def test_a_gelu_in_f32_of_half_values_is_one_operator() -> None:
    text = "\n".join(F32_GELU) + "\n"
    made = _core.ir.run_forward_passes(text, True)
    assert "gelu_tanh(" in made and "pow" not in made
    x = [[-3 + i / 3 for i in range(18)]]
    wanted, got = (_core.autograd.evaluate(t, x)[0] for t in (text, made))
    assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_roundings_of_a_model_in_f32_are_meant() -> None:
    lines = [line.replace("bf16", "f32").replace("= 003f", "= 0000003f") for line in F32_GELU]
    lines = [line for line in lines if "cast(" not in line]
    text = "\n".join(lines).replace("%11", "%0").replace("%18", "%10") + "\n"
    assert "gelu_tanh(%0)" in _core.ir.run_forward_passes(text, True)
    rounded = text.replace("add(%0, %13)", "add(%0, %21)").replace(
        "%14 = ", "%20 = cast(%13) : bf16[2,9]\n%21 = cast(%20) : f32[2,9]\n%14 = "
    )
    assert "gelu_tanh" not in _core.ir.run_forward_passes(rounded, True)


def test_values_of_a_half_type_are_not_kept_in_f32_as_well() -> None:
    """What several element-wise steps read in f32 is converted by each of them."""
    text = (
        'rmir 1\ninput %0 "x" : bf16[64,64]\ninput %1 "y" : f32[64,64]\n'
        "%2 = cast(%0) : f32[64,64]\n%3 = exp(%2) : f32[64,64]\n"
        '%4 = reduce(%3) {axes=[1], keepdim=1, kind="sum"} : f32[64,1]\n'
        "%5 = mul(%2, %1) : f32[64,64]\n%6 = div(%5, %4) : f32[64,64]\nreturn %6\n"
    )
    made = _core.ir.run_passes(text, {})
    assert "cast(" not in made and made.count(" = ewise(%0") == 2
    values = [[i / 4096 for i in range(4096)], [1 - i / 4096 for i in range(4096)]]
    wanted, got = (_core.autograd.evaluate(t, values)[0] for t in (text, made))
    assert got == pytest.approx(wanted, rel=1e-5)


def _classes(half: bool, folded: bool) -> str:
    """The logarithms of one class a row."""
    kind = "bf16" if half else "f32"
    lead = "2,128" if folded else "256"
    lines = ["rmir 1", f'input %0 "x" : {kind}[{lead},300]', 'input %1 "id" : i64[256,1]']
    last = 0
    if half:
        lines.append(f"%2 = cast(%0) : f32[{lead},300]")
        last = 2
    if folded:
        lines.append(f"%3 = reshape(%{last}) {{shape=<256,300>}} : f32[256,300]")
        last = 3
    lines += [
        f"%4 = softmax(%{last}) {{axis=1, log=1}} : f32[256,300]",
        "%5 = gather(%4, %1) {axis=1} : f32[256,1]",
        '%6 = reduce(%5) {axes=[0,1], keepdim=0, kind="sum"} : f32[]',
        "return %6",
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_loss_over_classes_is_one_operator(half: bool, folded: bool, seed: int) -> None:
    text = _classes(half, folded)
    made = _core.ir.run_forward_passes(text, True)
    assert "cross_entropy" in made and "softmax" not in made and "cast" not in made
    draw = random.Random(seed)
    ids = [float(draw.randrange(300)) for _ in range(256)]
    values = [[draw.uniform(-4, 4) for _ in range(256 * 300)], ids]
    both = [_core.autograd.differentiate(t, [0]) for t in (text, made)]
    assert "cross_entropy_backward" in both[1]
    wanted, got = (_core.autograd.evaluate(t, values) for t in both)
    assert got[0] == pytest.approx(wanted[0], rel=1e-5)
    assert got[1] == pytest.approx(wanted[1], rel=0.01 if half else 1e-5, abs=1e-6)


def test_a_cpu_recognises_losses_alone() -> None:
    assert "cross_entropy" in _core.ir.run_forward_passes(_classes(True, True), False)
    assert "gelu_tanh" not in _core.ir.run_forward_passes(_gelu("bf16"), False)


def test_a_softmax_that_others_read_and_a_small_one_stay() -> None:
    small = _classes(False, False).replace("300]", "30]")
    assert "cross_entropy" not in _core.ir.run_forward_passes(small, True)
    text = _classes(False, False).replace("return %6", "return %6, %4")
    assert "cross_entropy" not in _core.ir.run_forward_passes(text, True)


def test_pieces_of_rows_of_a_loss(seed: int) -> None:
    """Logits of a product by pieces: what the whole gives."""
    rows, width, classes = 384, 4, 3000
    text = (
        f'rmir 1\ninput %0 "x" : f32[{rows},{width}]\ninput %1 "id" : i64[{rows},1]\n'
        f'weight %2 "w" : f32[{classes},{width}]\n'
        f"%3 = linear(%0, %2) : f32[{rows},{classes}]\n"
        f"%4 = softmax(%3) {{axis=1, log=1}} : f32[{rows},{classes}]\n"
        f"%5 = gather(%4, %1) {{axis=1}} : f32[{rows},1]\n"
        '%6 = reduce(%5) {axes=[0,1], keepdim=0, kind="sum"} : f32[]\n'
        "%7 = neg(%6) : f32[]\nreturn %7\n"
    )
    draw = random.Random(seed)
    x = [draw.uniform(-1, 1) for _ in range(rows * width)]
    w = [draw.uniform(-1, 1) for _ in range(classes * width)]
    ids = [float(draw.randrange(classes)) for _ in range(rows)]
    results = []
    for least in (0, 1):
        made = _core.autograd.training_step(
            _core.ir.run_forward_passes(text, True),
            {},
            [(["w"], 0)],
            [],
            update=False,
            split_bytes=least,
        )
        assert made["split"]["pieces"] == (3 if least else 0)
        assert made["text"].count(" = cross_entropy(") == max(1, made["split"]["pieces"])
        results.append(_core.autograd.evaluate(made["text"], [x, ids, w]))
    for mine, theirs in zip(*results, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def _slices(places: list[tuple[int, int]]) -> str:
    """The sum of squares of slices of x."""
    lines, at, total = ["rmir 1", 'input %0 "x" : f32[2,9]'], 10, None
    for start, stop in places:
        kind = f"f32[2,{stop - start}]"
        lines += [
            f"%{at} = slice(%0) {{axis=1, start=<{start}>, step=1, stop=<{stop}>}} : {kind}",
            f"%{at + 1} = mul(%{at}, %{at}) : {kind}",
            f'%{at + 2} = reduce(%{at + 1}) {{axes=[0,1], keepdim=0, kind="sum"}} : f32[]',
        ]
        if total is not None:
            lines.append(f"%{at + 3} = add(%{total}, %{at + 2}) : f32[]")
        total = at + 2 if total is None else at + 3
        at += 4
    return "\n".join([*lines, f"return %{total}"]) + "\n"


@pytest.mark.parametrize(
    ("places", "parts"),
    [
        ([(0, 3), (3, 6), (6, 9)], 3),
        ([(6, 9), (0, 3)], 3),  # with zeros between them
        ([(0, 4), (3, 9)], 0),  # both say something about one place
    ],
)
def test_gradients_of_slices_are_joined(places: list[tuple[int, int]], parts: int) -> None:
    made = _core.autograd.differentiate(_slices(places), [0])
    text = _core.ir.run_passes(made, {})
    values = [[float(i) for i in range(18)]]
    wanted, got = (_core.autograd.evaluate(t, values) for t in (made, text))
    assert got == wanted
    concats = [line for line in text.splitlines() if " = concat(" in line]
    if parts:
        assert len(concats) == 1 and "ewise" not in text.split("concat")[1]
        assert len(concats[0].split("(")[1].split(")")[0].split(",")) == parts
    else:
        assert len(concats) == 2
