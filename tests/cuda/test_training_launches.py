"""What one launch does of a training step on a GPU: small products with their programs, slopes of
several weights, losses over few elements. Each against the CPU's kernels, step by step."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
rm = pytest.importorskip("rm_abstract")

from torch import nn  # noqa: E402 # torch is there from here on
from torch.nn import functional as F  # noqa: E402

pytestmark = pytest.mark.cuda


def both(text: str, inputs: list[Any]) -> tuple[list[Any], list[Any], dict[str, int]]:
    """Results of a program on the GPU and on the CPU, and the GPU's kernels."""
    from rm_abstract import _core, device

    device.load_plugins(gpu=True)
    wanted = _core.Program(text, {}, ["cpu"]).run(inputs)
    program = _core.Program(text, {}, ["cuda"])
    got = program.run([t.cuda() for t in inputs])
    again = program.run([t.cuda() for t in inputs])
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    return [t.cpu() for t in got], wanted, program.report()["kernels"]


SIZES = [(64, 256, 256), (64, 10, 256), (64, 256, 10), (1, 1, 1), (17, 33, 5), (300, 70, 600)]


@pytest.mark.parametrize("rows, columns, depth", SIZES)
@pytest.mark.parametrize("turned", [0, 1])
def test_small_products_and_their_programs(
    rows: int, columns: int, depth: int, turned: int
) -> None:
    b = (columns, depth) if turned else (depth, columns)
    result = f"f32[{rows},{columns}]"
    relu = "code=[0,0,0,-1,-1,52,0,0,2,-1,70,0,3,2,1], imm=f[0x0p+0]"
    text = (
        f'rmir 1\ninput %0 "a" : f32[{rows},{depth}]\ninput %1 "b" : f32[{b[0]},{b[1]}]\n'
        f'input %2 "bias" : f32[{columns}]\ninput %3 "x" : f32[{rows},{columns}]\n'
        f'%4 = gemm(%0, %1, %2, _) {{activation="relu", trans_b={turned}}} : {result}\n'
        f'%5 = gemm(%0, %1, _, _) {{activation="none", trans_b={turned}}} : {result}\n'
        f"%6 = ewise(%3, %5) {{{relu}}} : {result}\nreturn %4, %6\n"
    )
    inputs = [
        torch.randn(rows, depth),
        torch.randn(b),
        torch.randn(columns),
        torch.randn(rows, columns),
    ]
    got, wanted, kernels = both(text, inputs)
    for a, c in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, c, rtol=2e-5, atol=2e-5 * depth**0.5)
    assert kernels.get("cuda/gemm_small_any", 0) >= 1  # of gemm_ewise, too


@pytest.mark.parametrize("count", [1, 4, 14])
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_slopes_of_several_products(count: int, rows: int) -> None:
    text, inputs, results, next_value = "rmir 1\n", [], [], 2 * count
    body = ""
    for i in range(count):
        n, k = ((256, 256), (10, 256), (33, 5), (2, 3))[i % 4]
        text += f'input %{2 * i} "g{i}" : f32[{rows},{n}]\n'
        text += f'input %{2 * i + 1} "x{i}" : f32[{rows},{k}]\n'
        inputs += [torch.randn(rows, n), torch.randn(rows, k)]
        v = next_value
        body += f"%{v} = permute(%{2 * i}) {{axes=[1,0]}} : f32[{n},{rows}]\n"
        how = f'{{activation="none", trans_b=0}} : f32[{n},{k}]'
        body += f"%{v + 1} = gemm(%{v}, %{2 * i + 1}, _, _) {how}\n"
        body += f'%{v + 2} = reduce(%{2 * i}) {{axes=[0], keepdim=0, kind="sum"}} : f32[{n}]\n'
        results += [f"%{v + 1}"] + ([f"%{v + 2}"] if i % 3 != 2 else [])
        next_value += 3
    got, wanted, kernels = both(f"{text}{body}return {', '.join(results)}\n", inputs)
    for a, c in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, c, rtol=2e-5, atol=2e-5 * rows**0.5)
    if rows > 1:
        assert kernels["cuda/slopes_tiles_any"] == (2 if count > 12 else 1)


LOSS = """%8 = gemm(%0, %1, _, _) {{activation="none", trans_b=1}} : f32[{r},{c}]
%9 = softmax(%8) {{axis=1, log=1}} : f32[{r},{c}]
%10 = reshape(%2) {{shape=<{r},1>}} : i64[{r},1]
%11 = ne(%10, %4) : bool[{r},1]
%12 = where(%11, %10, %5) : i64[{r},1]
%13 = gather(%9, %12) {{axis=1}} : f32[{r},1]
%14 = where(%11, %13, %27) : f32[{r},1]
%15 = reduce(%14) {{axes=[0,1], keepdim=0, kind="sum"}} : f32[]
%16 = cast(%11) : f32[{r},1]
%17 = reduce(%16) {{axes=[0,1], keepdim=0, kind="sum"}} : f32[]
%18 = div(%15, %17) : f32[]
%19 = reduce(%9) {{axes=[0], keepdim=0, kind="max"}} : f32[{c}]
%20 = reduce(%9) {{axes=[1], keepdim=0, kind="mean"}} : f32[{r}]
%21 = cast(%3) : f32[1,8]
%22 = softmax(%8) {{axis=0, log=0}} : f32[{r},{c}]
return %18, %19, %20, %21, %22, %9
"""


@pytest.mark.parametrize("rows, classes", [(64, 10), (1, 2), (7, 200), (130, 3), (300, 10)])
def test_small_steps_of_a_loss(rows: int, classes: int) -> None:
    text = (
        f'rmir 1\ninput %0 "x" : f32[{rows},32]\ninput %1 "w" : f32[{classes},32]\n'
        f'input %2 "y" : i64[{rows}]\ninput %3 "h" : f64[1,8]\n'
        "literal %4 : i64[] = 9cffffffffffffff\nliteral %5 : i64[] = 0000000000000000\n"
        "literal %27 : f32[] = 00000000\n" + LOSS.format(r=rows, c=classes)
    )
    ids = torch.randint(0, classes, (rows,))
    ids[3::5] = -100
    inputs = [torch.randn(rows, 32), torch.randn(classes, 32), ids, torch.randn(1, 8).double()]
    got, wanted, kernels = both(text, inputs)
    for a, c in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, c, rtol=2e-5, atol=2e-5)
    assert kernels["cuda/small_steps_any"] >= 1
    if rows * classes <= 2048:
        assert sum(kernels.values()) == 2  # with the product


@pytest.mark.parametrize("keys", [3, 64, 1000, 4096])
def test_the_mask_and_the_angles_of_a_decoding_step_are_one_launch(keys: int) -> None:
    text = (
        f'rmir 1\ninput %0 "mask" : i64[1,{keys}]\ninput %1 "position" : i64[1,1]\n'
        'input %2 "length" : i64[]\ninput %3 "frequencies" : f32[32]\n'
        "literal %4 : i64[] = 0100000000000000\n"
        f"%5 = cast(%0) : bool[1,{keys}]\n%6 = iota() {{start=<0>, step=1}} : i64[{keys}]\n"
        f"%7 = reshape(%6) {{shape=<1,{keys}>}} : i64[1,{keys}]\n%8 = le(%7, %1) : bool[1,{keys}]\n"
        f"%9 = and(%5, %8) : bool[1,{keys}]\n%10 = cast(%1) : f32[1,1]\n"
        "%11 = mul(%10, %3) : f32[1,32]\n"
        "%12 = cos(%11) : f32[1,32]\n%13 = cast(%12) : bf16[1,32]\n%14 = sin(%11) : f32[1,32]\n"
        "%15 = cast(%14) : bf16[1,32]\n%16 = add(%2, %4) : i64[]\nreturn %9, %13, %15, %16\n"
    )
    position = torch.tensor([[keys * 2 // 3]])
    frequencies = 1.0 / 10000 ** (torch.arange(32) / 32)
    inputs = [(torch.rand(1, keys) < 0.8).long(), position, torch.tensor(keys), frequencies]
    got, wanted, kernels = both(text, inputs)
    for a, c in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-2, atol=1e-4)
    assert sum(n for name, n in kernels.items() if not name.startswith("cpu/")) <= 2, kernels


def test_an_mlps_step_is_ten_launches() -> None:
    torch.manual_seed(0)
    layers = [module for _ in range(3) for module in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    options = {"fallback": "error"}
    step = rm.compile_step(model, F.cross_entropy, optimizer, options=options)
    x, y = torch.randn(64, 256).cuda(), torch.randint(0, 10, (64,)).cuda()
    losses = [float(step(x, y)) for _ in range(12)]
    assert losses[-1] < losses[0]
    assert step.report()["programs"][0]["kernels"] == {
        "cuda/gemm_small_any": 7,  # four forward, three back with the slope of relu
        "cuda/small_steps_any": 1,  # the loss, its slope and the cast of the optimizer's numbers
        "cuda/slopes_tiles_any": 1,
        "cuda/adam_update_any": 1,
    }
