"""The small programs of the conformance suite: what a plugin is asked to compute."""

from __future__ import annotations

import re
from collections.abc import Sequence

IDS = 11  # integers of an input are below: rows of the embedding table

# Names say what a device that fails them cannot do.
WHOLE_PROGRAMS = {
    "a feed-forward layer": """rmir 1
input %0 "x" : f32[3,8]
weight %1 "up.weight" : f32[16,8]
weight %2 "up.bias" : f32[16]
weight %3 "down.weight" : f32[8,16]
weight %4 "norm.weight" : f32[8]
weight %5 "norm.bias" : f32[8]
%6 = linear(%0, %1, %2) : f32[3,16]
%7 = gelu(%6) : f32[3,16]
%8 = linear(%7, %3) : f32[3,8]
%9 = add(%0, %8) : f32[3,8]
%10 = layer_norm(%9, %4, %5) {eps=0x1p-17, num_axes=1} : f32[3,8]
return %10
""",
    "attention": """rmir 1
input %0 "q" : f32[1,2,5,4]
input %1 "k" : f32[1,2,4,5]
input %2 "v" : f32[1,2,5,4]
%3 = matmul(%0, %1) : f32[1,2,5,5]
%4 = softmax(%3) {axis=3, log=0} : f32[1,2,5,5]
%5 = matmul(%4, %2) : f32[1,2,5,4]
%6 = mul(%5, %0) : f32[1,2,5,4]
return %6, %4
""",
    "an embedding with a mask": f"""rmir 1
input %0 "ids" : i64[2,3]
input %1 "mask" : f32[2,3,1]
weight %2 "table" : f32[{IDS},6]
%3 = embedding(%2, %0) : f32[2,3,6]
%4 = mul(%3, %1) : f32[2,3,6]
%5 = reduce(%4) {{axes=[1], keepdim=0, kind="sum"}} : f32[2,6]
%6 = tanh(%5) : f32[2,6]
return %6
""",
}


def _single(op: str, inputs: list[str], result: str, attrs: str = "") -> str:
    lines = [f'input %{i} "x{i}" : {kind}' for i, kind in enumerate(inputs)]
    operands = ", ".join(f"%{i}" for i in range(len(inputs)))
    end = len(inputs)
    node = f"%{end} = {op}({operands}){f' {{{attrs}}}' if attrs else ''} : {result}"
    return "\n".join(["rmir 1", *lines, node, f"return %{end}", ""])


KERNEL_PROGRAMS = {
    "add": _single("add", ["f32[3,5]", "f32[3,5]"], "f32[3,5]"),
    "relu": _single("relu", ["f32[3,5]"], "f32[3,5]"),
    "gelu": _single("gelu", ["f32[3,70]"], "f32[3,70]"),
    "matmul": _single("matmul", ["f32[2,3,7]", "f32[2,7,5]"], "f32[2,3,5]"),
    "linear of one row": _single("linear", ["f32[1,33]", "f32[17,33]"], "f32[1,17]"),
    "linear of many rows": _single("linear", ["f32[40,64]", "f32[48,64]"], "f32[40,48]"),
    "softmax": _single("softmax", ["f32[4,19]"], "f32[4,19]", "axis=1, log=0"),
    "layer_norm": _single(
        "layer_norm", ["f32[4,24]", "f32[24]", "f32[24]"], "f32[4,24]", "eps=0x1p-17, num_axes=1"
    ),
    "rms_norm": _single(
        "rms_norm", ["f32[4,24]", "f32[24]"], "f32[4,24]", "eps=0x1p-17, weight_offset=0x0p+0"
    ),
    "conv": _single(
        "conv",
        ["f32[2,6,7,5]", "f32[4,3,3,3]", "f32[4]"],
        "f32[2,4,4,5]",
        "dilation=[1,1], groups=2, padding=[1,1,1,1], stride=[2,1]",
    ),
    "pool": _single(
        "pool", ["f32[2,5,6,6]"], "f32[2,5,3,3]", 'kernel=[2,2], kind="max", stride=[2,2]'
    ),
    "group_norm": _single(
        "group_norm", ["f32[2,6,4,3]", "f32[6]", "f32[6]"], "f32[2,6,4,3]", "eps=0x1p-17, groups=2"
    ),
    "resize": _single(
        "resize",
        ["f32[1,4,3,5]"],
        "f32[1,4,6,10]",
        'mode="linear", ratio=f[0x1p-1,0x1p-1], size=<6,10>',
    ),
    "sdpa": _single(
        "sdpa",
        ["f32[2,4,6,8]", "f32[2,2,6,8]", "f32[2,2,6,8]"],
        "f32[2,4,6,8]",
        "is_causal=1, scale=0x1p-1",
    ),
    "embedding": _single("embedding", [f"f32[{IDS},6]", "i64[2,3]"], "f32[2,3,6]"),
    "reduce": _single("reduce", ["f32[3,4,5]"], "f32[3,5]", 'axes=[1], keepdim=0, kind="sum"'),
    "cumsum": _single("cumsum", ["f32[3,9]"], "f32[3,9]", "axis=1"),
    "concat": _single("concat", ["f32[3,4]", "f32[3,2]"], "f32[3,6]", "axis=1"),
}


_FLOATS = "f32[3,4]"
OPERATOR_PROGRAMS = {
    **KERNEL_PROGRAMS,
    **{
        name: _single(name, [_FLOATS, _FLOATS], _FLOATS)
        for name in ("sub", "mul", "maximum", "minimum")
    },
    **{
        name: _single(name, [_FLOATS], _FLOATS)
        for name in "abs cos erf exp gelu_tanh neg sigmoid silu sin tanh".split()
    },
    "div": """rmir 1
input %0 "x" : f32[3,4]
input %1 "y" : f32[3,4]
%2 = exp(%1) : f32[3,4]
%3 = div(%0, %2) : f32[3,4]
return %3
""",
    "where": """rmir 1
input %0 "x" : f32[3,4]
input %1 "y" : f32[3,4]
%2 = gt(%0, %1) : bool[3,4]
%3 = where(%2, %0, %1) : f32[3,4]
return %3
""",
    "cast": _single("cast", ["i64[3,4]"], "f32[3,4]"),
    "expand": _single("expand", ["f32[3,1]"], "f32[2,3,4]", "shape=<2,3,4>"),
    "permute": _single("permute", ["f32[2,3,4]"], "f32[4,2,3]", "axes=[2,0,1]"),
    "reshape": _single("reshape", ["f32[2,3,4]"], "f32[6,4]", "shape=<6,4>"),
    "slice": _single("slice", [_FLOATS], "f32[3,2]", "axis=1, start=<1>, step=1, stop=<3>"),
    "sort": """rmir 1
input %0 "x" : f32[3,9]
%1, %2 = sort(%0) {axis=1, descending=1, k=4} : f32[3,4], i64[3,4]
return %1, %2
""",
}


def joined(texts: Sequence[str]) -> str:
    """One program that computes what all of these do; they have no weights."""
    lines: list[str] = []
    inputs: list[str] = []
    outputs: list[str] = []
    base = 0
    for number, text in enumerate(texts):
        moved = re.sub(r"%(\d+)", lambda found: f"%{base + int(found[1])}", text)  # noqa: B023
        for line in moved.splitlines():
            if line.startswith("input"):
                inputs.append(re.sub(r'"(\w+)"', rf'"p{number}_\1"', line))
            elif line.startswith("return"):
                outputs.append(line.removeprefix("return "))
            elif line != "rmir 1":
                lines.append(line)
        base += 1 + max(int(found) for found in re.findall(r"%(\d+)", text))
    return "\n".join(["rmir 1", *inputs, *lines, f"return {', '.join(outputs)}", ""])
