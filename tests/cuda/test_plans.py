"""Single operators as programs on a GPU, against the same programs on the host."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
rm = pytest.importorskip("rm_abstract")

pytestmark = pytest.mark.cuda

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64}
DTYPES |= {"i32": torch.int32, "bool": torch.bool}


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    from rm_abstract import device

    device.load_plugins(gpu=True)


def tensor(text: str) -> Any:
    """A random tensor of a type such as f32[2,3]; integers lie in 0..2."""
    name, _, sizes = text.rstrip("]").partition("[")
    shape = [int(n) for n in sizes.split(",") if n]
    if name in ("i64", "i32"):
        return torch.randint(0, 3, shape, dtype=DTYPES[name])
    if name == "bool":
        return torch.rand(shape) > 0.3
    return torch.randn(shape).to(DTYPES[name])


def program(inputs: list[str], lines: list[str], result: str) -> str:
    text = "rmir 1\n"
    for i, kind in enumerate(inputs):
        text += f'input %{i} "x{i}" : {kind}\n'
    return text + "\n".join(lines) + f"\nreturn {result}\n"


# (inputs, lines of the program, the result)
CASES: dict[str, tuple[list[str], list[str], str]] = {
    "gather": (
        ["f32[3,5]", "i64[2,5]"],
        ["%2 = gather(%0, %1) {axis=0} : f32[2,5]"],
        "%2",
    ),
    "gather of integers": (
        ["i64[3,4]", "i64[3,2]"],
        ["%2 = gather(%0, %1) {axis=1} : i64[3,2]"],
        "%2",
    ),
    "index of two axes": (
        ["bf16[4,3,5,6]", "i64[2,1]", "i64[7]"],
        ["%3 = index(%0, %1, %2) {axes=[1,2]} : bf16[4,2,7,6]"],
        "%3",
    ),
    "index of the first axis": (
        ["f32[5,6]", "i64[7]"],
        ["%2 = index(%0, %1) {axes=[0]} : f32[7,6]"],
        "%2",
    ),
    "index_copy": (
        ["f32[2,8,4]", "i64[1]", "f32[2,1,4]"],
        ["%3 = index_copy(%0, %1, %2) {axis=1} : f32[2,8,4]"],
        "%3",
    ),
    "linear of one row": (
        ["bf16[1,1,256]", "bf16[512,256]", "bf16[512]"],
        ["%3 = linear(%0, %1, %2) : bf16[1,1,512]"],
        "%3",
    ),
    "linear of five rows with a residual": (
        ["f16[1,5,64]", "f16[96,64]", "f16[1,5,96]"],
        [
            '%3 = gemm(%0, %1, _, %2) {activation="gelu", alpha=0x1p+0, trans_b=1} : f16[1,5,96]',
        ],
        "%3",
    ),
    "linear of many rows": (
        ["bf16[3,70,128]", "bf16[200,128]", "bf16[200]"],
        ["%3 = linear(%0, %1, %2) : bf16[3,70,200]"],
        "%3",
    ),
    "linear of float32 of odd sizes": (
        ["f32[3,17,33]", "f32[19,33]", "f32[19]"],
        ["%3 = linear(%0, %1, %2) : f32[3,17,19]"],
        "%3",
    ),
    "a weight that is transposed": (
        ["bf16[40,64]", "bf16[64,48]"],
        ["%2 = matmul(%0, %1) : bf16[40,48]"],
        "%2",
    ),
    "a view that is transposed": (
        ["f32[4,8,16]", "f32[4,8,24]"],
        [
            "%2 = permute(%0) {axes=[0,2,1]} : f32[4,16,8]",
            "%3 = matmul(%2, %1) : f32[4,16,24]",
        ],
        "%3",
    ),
    "concat and slices": (
        ["f32[3,8]", "f32[3,8]"],
        [
            "%2 = concat(%0, %1) {axis=1} : f32[3,16]",
            "%3 = slice(%2) {axis=1, start=<3>, step=2, stop=<13>} : f32[3,5]",
            "%4 = permute(%3) {axes=[1,0]} : f32[5,3]",
            "%5 = exp(%4) : f32[5,3]",
        ],
        "%5",
    ),
    "layer_norm of two axes": (
        ["f32[6,4,8]", "f32[4,8]", "f32[4,8]"],
        ["%3 = layer_norm(%0, %1, %2) {eps=0x1p-20, num_axes=2} : f32[6,4,8]"],
        "%3",
    ),
    "rms_norm with an offset": (
        ["bf16[5,64]", "bf16[64]"],
        ["%2 = rms_norm(%0, %1) {eps=0x1p-20, weight_offset=0x1p+0} : bf16[5,64]"],
        "%2",
    ),
    "softmax": (
        ["f32[4,3,65]"],
        ["%1 = softmax(%0) {axis=2, log=0} : f32[4,3,65]"],
        "%1",
    ),
    "log_softmax": (
        ["f16[4,64]"],
        ["%1 = softmax(%0) {axis=1, log=1} : f16[4,64]"],
        "%1",
    ),
    "mean over two axes": (
        ["f32[3,4,5,6]"],
        ['%1 = reduce(%0) {axes=[1,3], keepdim=0, kind="mean"} : f32[3,5]'],
        "%1",
    ),
    "argmax": (
        ["f32[7,50]"],
        ['%1 = reduce(%0) {axes=[1], keepdim=1, kind="argmax"} : i64[7,1]'],
        "%1",
    ),
    "attention with a mask of bool": (
        ["bf16[2,4,9,16]", "bf16[2,2,9,16]", "bf16[2,2,9,16]", "bool[2,1,1,9]"],
        ["%4 = sdpa(%0, %1, %2, %3) {is_causal=0, scale=0x1p-2} : bf16[2,4,9,16]"],
        "%4",
    ),
    "attention that is causal": (
        ["f32[1,3,40,32]", "f32[1,3,40,32]", "f32[1,3,40,32]"],
        ["%3 = sdpa(%0, %1, %2) {is_causal=1, scale=0x1p-2} : f32[1,3,40,32]"],
        "%3",
    ),
    "embedding": (
        ["bf16[3,40]", "i64[2,9]"],
        ["%2 = embedding(%0, %1) : bf16[2,9,40]"],
        "%2",
    ),
    "rope": (
        ["bf16[2,4,9,16]", "bf16[9,16]", "bf16[9,16]"],
        ["%3 = rope(%0, %1, %2) {interleaved=0} : bf16[2,4,9,16]"],
        "%3",
    ),
    "rope with tables that are transposed": (
        ["f32[2,4,9,16]", "f32[16,9]", "f32[16,9]"],
        [
            "%3 = permute(%1) {axes=[1,0]} : f32[9,16]",
            "%4 = permute(%2) {axes=[1,0]} : f32[9,16]",
            "%5 = rope(%0, %3, %4) {interleaved=0} : f32[2,4,9,16]",
        ],
        "%5",
    ),
    "softmax of another axis": (
        ["f32[4,5,6]"],
        ["%1 = softmax(%0) {axis=1, log=0} : f32[4,5,6]"],
        "%1",
    ),
    "a norm of a view": (
        ["f32[8,5,6]", "f32[8]"],
        [
            "%2 = permute(%0) {axes=[2,1,0]} : f32[6,5,8]",
            "%3 = rms_norm(%2, %1) {eps=0x1p-20} : f32[6,5,8]",
        ],
        "%3",
    ),
    "embedding of ids that repeat": (
        ["f32[3,40]", "i64[1,9]"],
        ["%2 = expand(%1) {shape=<4,9>} : i64[4,9]", "%3 = embedding(%0, %2) : f32[4,9,40]"],
        "%3",
    ),
    "embedding of a column of ids": (
        ["f16[3,40]", "i64[7,5]"],
        [
            "%2 = slice(%1) {axis=1, start=<1>, step=2, stop=<5>} : i64[7,2]",
            "%3 = embedding(%0, %2) : f16[7,2,40]",
        ],
        "%3",
    ),
    "sort of columns": (
        ["f32[9,5,6]"],
        ["%1, %2 = sort(%0) {axis=1, descending=0, k=-1} : f32[9,5,6], i64[9,5,6]"],
        "%1",
    ),
    "places of the largest": (
        ["bf16[14,60]"],
        ["%1, %2 = sort(%0) {axis=1, descending=1, k=8} : bf16[14,8], i64[14,8]"],
        "%2",
    ),
    "places of equal integers in a long line": (
        ["i64[9000]"],
        ["%1, %2 = sort(%0) {axis=0, descending=0, k=-1} : i64[9000], i64[9000]"],
        "%2",
    ),
    "counts of integers": (
        ["i64[7]", "i64[700]", "i64[700]"],
        ['%3 = scatter(%0, %1, %2) {axis=0, kind="add"} : i64[7]'],
        "%3",
    ),
    "places of a permutation": (
        ["i64[1,300,1]", "i64[300]", "i64[1,300,1]"],
        [
            "%3, %4 = sort(%1) {axis=0, descending=0, k=-1} : i64[300], i64[300]",
            "%5 = reshape(%4) {shape=<1,300,1>} : i64[1,300,1]",
            '%6 = scatter(%0, %5, %2) {axis=1, kind="set"} : i64[1,300,1]',
        ],
        "%6",
    ),
    "products of rows in groups": (
        ["f32[40,64]", "f32[3,48,64]", "i64[3]"],
        [
            "%3 = permute(%1) {axes=[0,2,1]} : f32[3,64,48]",
            "%4 = cumsum(%2) {axis=0} : i64[3]",
            "%5 = grouped_gemm(%0, %3, %4) : f32[40,48]",
        ],
        "%5",
    ),
    "products of groups of a model of 16 bits": (
        ["bf16[6,72]", "bf16[3,40,72]", "i32[3]"],
        [
            "%3 = cumsum(%2) {axis=0} : i64[3]",
            "%4 = permute(%1) {axes=[0,2,1]} : bf16[3,72,40]",
            "%5 = grouped_gemm(%0, %4, %3) : bf16[6,40]",
        ],
        "%5",
    ),
    "cumsum of integers": (
        ["i32[3,70]"],
        ["%1 = cumsum(%0) {axis=1} : i64[3,70]"],
        "%1",
    ),
    "cumsum of a mask": (
        ["bool[5,9,2]"],
        ["%1 = cumsum(%0) {axis=1} : i64[5,9,2]"],
        "%1",
    ),
    "cumsum of floats along the first axis": (
        ["f32[300,7]"],
        ["%1 = cumsum(%0) {axis=0} : f32[300,7]"],
        "%1",
    ),
    "cumsum of halves": (
        ["f16[2,600]"],
        ["%1 = cumsum(%0) {axis=1} : f16[2,600]"],
        "%1",
    ),
    "argmax of integers": (
        ["i64[4,50]"],
        ['%1 = reduce(%0) {axes=[1], keepdim=0, kind="argmax"} : i64[4]'],
        "%1",
    ),
    "argmin of few integers": (
        ["i32[6,5,4]"],
        ['%1 = reduce(%0) {axes=[1], keepdim=1, kind="argmin"} : i64[6,1,4]'],
        "%1",
    ),
    "sum of a mask": (
        ["bool[3,400]"],
        ['%1 = reduce(%0) {axes=[1], keepdim=1, kind="sum"} : i64[3,1]'],
        "%1",
    ),
    "product of integers": (
        ["i64[3,5,6]"],
        ['%1 = reduce(%0) {axes=[0,2], keepdim=0, kind="prod"} : i64[5]'],
        "%1",
    ),
    "largest of integers": (
        ["i32[40,9]"],
        ['%1 = reduce(%0) {axes=[0,1], keepdim=0, kind="max"} : i32[]'],
        "%1",
    ),
    "any of floats": (
        ["f32[7,3]", "f32[7,3]"],
        [
            "%2 = sub(%0, %0) : f32[7,3]",
            "%3 = concat(%2, %1) {axis=0} : f32[14,3]",
            '%4 = reduce(%3) {axes=[1], keepdim=0, kind="any"} : bool[14]',
        ],
        "%4",
    ),
    "all of a mask": (
        ["bool[4,3,90]"],
        ['%1 = reduce(%0) {axes=[2], keepdim=0, kind="all"} : bool[4,3]'],
        "%1",
    ),
    "conv of vectors of channels": (
        ["bf16[2,64,9,10]", "bf16[72,64,3,3]", "bf16[72]", "bf16[2,72,5,5]"],
        [
            '%4 = conv(%0, %1, %2, %3) {activation="relu", groups=1, padding=[1,1,1,1], '
            "stride=[2,2]} : bf16[2,72,5,5]",
        ],
        "%4",
    ),
    "conv of an image": (
        ["f32[2,3,20,21]", "f32[8,3,7,7]", "f32[8]"],
        [
            "%3 = conv(%0, %1, %2) {groups=1, padding=[3,3,3,3], stride=[2,2]} : f32[2,8,10,11]",
        ],
        "%3",
    ),
    "conv that rounds to tf32": (
        ["f32[2,32,9,9]", "f32[40,32,3,3]"],
        ["%2 = conv(%0, %1) {groups=1, padding=[1,1,1,1], tf32=1} : f32[2,40,9,9]"],
        "%2",
    ),
    "conv with more padding at the ends": (
        ["f16[1,16,8,8]", "f16[16,16,2,2]"],
        ["%2 = conv(%0, %1) {groups=1, padding=[0,0,1,1]} : f16[1,16,8,8]"],
        "%2",
    ),
    "conv of a line": (
        ["f32[3,16,33]", "f32[24,8,5]", "f32[24]"],
        [
            '%3 = conv(%0, %1, %2) {activation="hardswish", dilation=[2], groups=2, '
            "padding=[4,4]} : f32[3,24,33]",
        ],
        "%3",
    ),
    "conv of each channel": (
        ["bf16[2,40,11,12]", "bf16[40,1,3,3]"],
        [
            '%2 = conv(%0, %1) {activation="silu", groups=40, padding=[1,1,1,1]} : '
            "bf16[2,40,11,12]",
        ],
        "%2",
    ),
    "conv transposed": (
        ["f32[2,16,7,6]", "f32[16,12,3,3]", "f32[12]"],
        [
            "%3 = conv(%0, %1, %2) {groups=1, output_padding=[1,1], padding=[1,1,1,1], "
            "stride=[2,2], transposed=1} : f32[2,12,14,12]",
        ],
        "%3",
    ),
    "conv transposed in groups": (
        ["bf16[1,32,5,5]", "bf16[32,8,4,4]"],
        [
            '%2 = conv(%0, %1) {activation="gelu", groups=2, padding=[1,1,1,1], stride=[2,2], '
            "transposed=1} : bf16[1,16,10,10]",
        ],
        "%2",
    ),
    "max pool behind a conv": (
        ["bf16[2,16,12,12]", "bf16[32,16,1,1]"],
        [
            "%2 = conv(%0, %1) {groups=1} : bf16[2,32,12,12]",
            '%3 = pool(%2) {dilation=[1,1], kernel=[3,3], kind="max", padding=[1,1,1,1], '
            "stride=[2,2]} : bf16[2,32,6,6]",
        ],
        "%3",
    ),
    "max pool with dilation": (
        ["f32[2,3,12,13]"],
        [
            '%1 = pool(%0) {dilation=[2,1], kernel=[3,2], kind="max", padding=[1,0,1,1], '
            "stride=[1,2]} : f32[2,3,10,7]",
        ],
        "%1",
    ),
    "mean pool that counts its padding": (
        ["f32[1,8,9,9]"],
        [
            '%1 = pool(%0) {count_include_pad=1, dilation=[1,1], kernel=[3,3], kind="mean", '
            "padding=[1,1,2,2], stride=[2,2]} : f32[1,8,5,5]",
        ],
        "%1",
    ),
    "mean pool of a line": (
        ["f16[2,5,17]"],
        [
            '%1 = pool(%0) {count_include_pad=0, dilation=[1], kernel=[4], kind="mean", '
            "padding=[2,2], stride=[3]} : f16[2,5,6]",
        ],
        "%1",
    ),
    "mean pool of a space with a divisor": (
        ["f32[1,4,6,6,6]"],
        [
            '%1 = pool(%0) {dilation=[1,1,1], divisor=5, kernel=[2,2,2], kind="mean", '
            "padding=[0,0,0,0,0,0], stride=[2,2,2]} : f32[1,4,3,3,3]",
        ],
        "%1",
    ),
    "group_norm": (
        ["f32[2,12,5,7]", "f32[12]", "f32[12]"],
        ["%3 = group_norm(%0, %1, %2) {eps=0x1p-17, groups=3} : f32[2,12,5,7]"],
        "%3",
    ),
    "group_norm with silu behind a conv": (
        ["bf16[2,16,20,21]", "bf16[320,16,3,3]", "bf16[320]", "bf16[320]"],
        [
            "%4 = conv(%0, %1) {groups=1, padding=[1,1,1,1]} : bf16[2,320,20,21]",
            '%5 = group_norm(%4, %2, %3) {activation="silu", eps=0x1p-17, groups=32} : '
            "bf16[2,320,20,21]",
        ],
        "%5",
    ),
    "group_norm of many channels": (
        ["f16[1,16,3,3]", "f16[2560,16,1,1]"],
        [
            "%2 = conv(%0, %1) {groups=1} : f16[1,2560,3,3]",
            "%3 = group_norm(%2) {eps=0x1p-17, groups=32} : f16[1,2560,3,3]",
        ],
        "%3",
    ),
    "resize to the nearest": (
        ["bf16[2,24,5,6]", "bf16[16,24,1,1]"],
        [
            "%2 = conv(%0, %1) {groups=1} : bf16[2,16,5,6]",
            '%3 = resize(%2) {mode="nearest", ratio=f[0x1p-1,0x1p-1], size=<10,12>} : '
            "bf16[2,16,10,12]",
        ],
        "%3",
    ),
    "resize between": (
        ["f32[2,3,9,7]"],
        [
            '%1 = resize(%0) {mode="linear", ratio=f[0x1.8p+0,0x1.cp-1], size=<6,8>} : '
            "f32[2,3,6,8]",
        ],
        "%1",
    ),
    "resize between with corners": (
        ["f32[1,4,5,4,3]"],
        [
            '%1 = resize(%0) {align_corners=1, mode="linear", ratio=f[0x1p-1,0x1p-1,0x1p-1], '
            "size=<9,7,5>} : f32[1,4,9,7,5]",
        ],
        "%1",
    ),
    "integers and comparisons": (
        ["i64[5]", "i64[4,1]"],
        [
            "%2 = lt(%0, %1) : bool[4,5]",
            "%3 = cast(%2) : f32[4,5]",
            "%4 = add(%0, %1) : i64[4,5]",
            "%5 = cast(%4) : f32[4,5]",
            "%6 = where(%2, %3, %5) : f32[4,5]",
        ],
        "%6",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("offset", [0, 1])
def test_an_operator_gives_what_the_host_gives(name: str, offset: int) -> None:
    """With offset 1 operands do not lie on vectors."""
    from rm_abstract import _core

    inputs, lines, result = CASES[name]
    text = program(inputs, lines, result)
    torch.manual_seed(1)
    given = [tensor(kind) for kind in inputs]
    (expected,) = _core.Program(text, {}, ["cpu"]).run(given)
    moved = []
    for t in given:
        room = torch.empty(t.numel() + offset, dtype=t.dtype, device="cuda")[offset:]
        moved.append(room.view(t.shape).copy_(t))
    here = _core.Program(text, {}, ["cuda"])
    for _ in range(2):
        (actual,) = here.run(moved)
    assert actual.is_cuda and actual.dtype == expected.dtype
    if not expected.is_floating_point():
        assert torch.equal(actual.cpu(), expected)
        return
    scale = max(1.0, float(expected.abs().max()))
    limit = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[expected.dtype]
    limit = 3e-3 if "tf32=1" in text else limit
    assert float((actual.cpu().float() - expected.float()).abs().max()) <= limit * scale


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("conv")])
def test_constant_weights_are_packed_once(name: str) -> None:
    """The weights lie as torch has them; kernels want the channels last."""
    from rm_abstract import _core

    inputs, lines, result = CASES[name]
    text = program(inputs, lines, result).replace('input %1 "x1"', 'weight %1 "w"')
    torch.manual_seed(2)
    x, w, *rest = [tensor(kind) for kind in inputs]
    (expected,) = _core.Program(text, {"w": w}, ["cpu"]).run([x, *rest])
    there = _core.Program(text, {"w": w.cuda()}, ["cuda"])
    for _ in range(4):  # recorded from the third run on
        (actual,) = there.run([t.cuda() for t in (x, *rest)])
    limit = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[expected.dtype]
    limit = 3e-3 if "tf32=1" in text else limit
    scale = max(1.0, float(expected.abs().max()))
    assert float((actual.cpu().float() - expected.float()).abs().max()) <= limit * scale


def test_group_norm_far_from_zero_keeps_its_digits() -> None:
    from rm_abstract import _core

    text = program(
        ["f32[1,8,64,64]"],
        [
            "%1 = permute(%0) {axes=[0,2,3,1]} : f32[1,64,64,8]",
            "%2 = exp(%1) : f32[1,64,64,8]",
            "%3 = permute(%2) {axes=[0,3,1,2]} : f32[1,8,64,64]",
            "%4 = group_norm(%3) {eps=0x1p-30, groups=2} : f32[1,8,64,64]",
        ],
        "%4",
    )
    x = torch.log(1000 + torch.rand(1, 8, 64, 64))
    (actual,) = _core.Program(text, {}, ["cuda"]).run([x.cuda()])
    given = torch.exp(x.cuda()).double()
    expected = torch.nn.functional.group_norm(given, 2, eps=2**-30)
    assert float((actual - expected).abs().max()) < 3e-3


def test_an_index_outside_is_an_error_and_the_process_lives() -> None:
    """In a process of its own: the error ends the context."""
    import subprocess
    import sys

    code = (
        "import torch\nfrom rm_abstract import _core, device\n"
        "device.load_plugins(gpu=True)\n"
        'text = "rmir 1\\ninput %0 \\"x\\" : f32[3]\\ninput %1 \\"i\\" : i64[1]\\n'
        '%2 = gather(%0, %1) {axis=0} : f32[1]\\nreturn %2\\n"\n'
        "p = _core.Program(text, {}, ['cuda'])\n"
        "(y,) = p.run([torch.ones(3).cuda(), torch.tensor([3]).cuda()])\n"
        "try:\n    y.cpu()\nexcept RuntimeError as e:\n    print('caught', type(e).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "caught" in done.stdout, done.stderr


def test_tensors_of_another_device_are_refused() -> None:
    from rm_abstract import _core

    text = program(["f32[2]"], ["%1 = exp(%0) : f32[2]"], "%1")
    here = _core.Program(text, {}, ["cuda"])
    with pytest.raises(_core.CoreError, match="expected a tensor of a supported dtype on cuda:0"):
        here.run([torch.ones(2)])
