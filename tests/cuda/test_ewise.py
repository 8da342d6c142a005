"""Elementwise programs against float64: every opcode, every kernel, chains, dtypes, strides."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from problems import DTYPES, EPSILON, assert_close, from_numpy, to_numpy
from programs import OPCODES, apply, chains, lines, run

pytestmark = pytest.mark.cuda
KERNELS = ("ewise_direct_sm80", "ewise_chain_sm80", "ewise_interp_any")
UNARY = [name for name, code in OPCODES.items() if 1 <= code <= 27]
BINARY = [name for name, code in OPCODES.items() if 40 <= code <= 57]
POSITIVE = ("log", "sqrt", "rsqrt", "log1p", "pow")


def inputs(name: str, dtype: str, count: int, n: int) -> list[torch.Tensor]:
    out = []
    for _ in range(count):
        x = torch.randn(n, device="cuda") * 2
        if name in POSITIVE:
            x = x.abs() + 0.05
        elif name in ("and", "or", "xor", "logical_not", "where"):
            x = x * (torch.rand_like(x) < 0.5)
        elif name == "div":
            x = x.sign() * (x.abs() + 0.1)
        x = x.to(DTYPES[dtype])
        x[x == 0] = 0  # no negative zeros: torch's integer-like operators disagree with themselves
        out.append(x)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_opcode_equals_float64(
    module: Callable[[str], ModuleType], dtype: str, kernel: str, seed: int
) -> None:
    m = module("ewise")
    torch.manual_seed(seed)
    for name in [*UNARY, *BINARY, "where", "fma"]:
        arity = 1 if name in UNARY else 2 if name in BINARY else 3
        if arity == 3 and kernel == "ewise_direct_sm80":
            continue
        for n in (8, 1000, 70_000):
            x = inputs(name, dtype, arity, n)
            y = torch.empty_like(x[0])
            registers = [0, 1, 2][:arity] + [-1] * (3 - arity)
            m.forward([OPCODES[name], 0, *registers], [], x, y=y, kernel=kernel)
            expected = apply(OPCODES[name], *(v.double() for v in x)).double()
            steps = ("floor_div", "remainder", "sign", "trunc", "floor", "ceil", "round")
            exact = name in steps or OPCODES[name] in range(49, 58)
            # library functions are within a few units of the last place of fp32
            relative = EPSILON[dtype] + (0 if exact else 8 * 2.0**-23)
            if name == "pow":
                relative += 2.0**-19
            if name in ("floor_div", "remainder"):
                a, b = (v.double() for v in x)
                near = (a / b - (a / b).round()).abs() < 1e-5 * (1 + (a / b).abs())
                y[near], expected[near] = 0, 0
            scale = 2.0**-14 if dtype == "float16" else 1e-6
            if name in ("gelu", "gelu_tanh", "softplus", "silu", "fma", "sub", "add", "remainder"):
                scale = 0.5 if dtype == "float32" else 1.0
            rounded = expected.to(y.dtype).double()
            expected = torch.where(rounded.isinf(), rounded, expected)  # beyond fp16's range
            assert_close(y, expected, relative, scale, f"{name}, n {n}, {kernel}, seed {seed}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_random_chains_equal_float64(
    module: Callable[[str], ModuleType], dtype: str, kernel: str, seed: int
) -> None:
    m = module("ewise")
    torch.manual_seed(seed)
    for k, (code, imm, count) in enumerate(chains(seed, 120)):
        shape = (int(np.random.default_rng(seed + k).integers(1, 40)), 48)
        # operands broadcast along either axis, like biases and per-row scales
        shapes = [shape, (48,), (shape[0], 1), shape]
        x = [torch.randn(shapes[i], device="cuda").to(DTYPES[dtype]) for i in range(count)]
        y = torch.empty(shape, dtype=DTYPES[dtype], device="cuda")
        m.forward(code, imm, x, y=y, kernel=kernel)
        wide = [v.double().broadcast_to(shape) for v in x]
        expected = run(code, imm, wide)
        # fp32 intermediates: perturb the operands to learn how much the chain amplifies
        nudged = run(code, imm, [v * (1 + 2.0**-20) + 2.0**-20 for v in wide])
        amplified = (nudged - expected).abs().max().item() + 2.0**-18
        assert_close(y, expected, EPSILON[dtype] + 4 * amplified, 1.0, f"chain {k}, seed {seed}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_lines_of_steps_equal_float64(
    module: Callable[[str], ModuleType], dtype: str, seed: int
) -> None:
    m = module("ewise")
    torch.manual_seed(seed)
    for k, (code, imm, count) in enumerate(lines(seed, 120)):
        rng = np.random.default_rng(seed + k)
        shape = (int(rng.integers(1, 4)), int(rng.integers(1, 40)), 16 * int(rng.integers(1, 40)))
        forms = [shape, shape[-1:], (1,), (1, 1, shape[-1])]
        picks = [0, *rng.integers(0, 4, 2)]
        x = [torch.randn(forms[picks[i]], device="cuda").to(DTYPES[dtype]) for i in range(count)]
        y = torch.full(shape, float("nan"), dtype=DTYPES[dtype], device="cuda")
        m.forward(code, imm, x, y=y, kernel="ewise_fused_sm80")
        wide = [v.double().broadcast_to(shape) for v in x]
        expected = run(code, imm, wide)
        nudged = run(code, imm, [v * (1 + 2.0**-20) + 2.0**-20 for v in wide])
        amplified = (nudged - expected).abs().max().item() + 2.0**-18
        approximate = 0 if dtype == "float32" else 2.0**-14  # of gelu
        assert_close(y, expected, EPSILON[dtype] + 4 * amplified + 4 * approximate, 1.0,
                     f"line {k} {code}, {picks}, seed {seed}")  # fmt: skip


def _mixed_programs() -> list[tuple[list[int], list[float], str]]:
    """Over a mask and three values: the last result as each operand, constants, rare opcodes."""

    def step(name: str, a: int, b: int = -1, c: int = -1) -> list[int]:
        cls = 2 if name in ("and", "logical_not") else 0
        return [OPCODES[name], cls, a, b, c]

    return [
        (step("mul", 1, 2) + step("where", 0, 4, 3), [], "float"),
        (step("mul", 1, 2) + step("where", 0, 3, 4), [], "float"),
        (step("lt", 1, 2) + step("where", 4, 3, 1), [], "float"),
        (step("const", 0) + step("const", 1) + step("where", 0, 4, 5), [-2.0, 0.5], "float"),
        (step("lt", 1, 2) + step("logical_not", 4) + step("and", 0, 5), [], "bool"),
        (step("mul", 1, 1) + step("const", 0) + step("sub", 5, 4) + step("sub", 2, 6)
         + step("fma", 7, 3, 6) + step("maximum", 8, 0), [0.75], "float"),
        (step("abs", 1) + step("log1p", 4) + step("const", 0) + step("remainder", 2, 6)
         + step("mul", 5, 7) + step("mul", 8, 8) + step("add", 9, 0), [3.0], "float"),
        (step("tanh", 1) + step("mul", 4, 3) + step("exp", 4) + step("add", 6, 5)
         + step("add", 7, 4), [], "float"),
    ]  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_dtypes_and_layouts_mix_in_a_chain(
    module: Callable[[str], ModuleType], kernel: str, seed: int
) -> None:
    m = module("ewise")
    torch.manual_seed(seed)
    names = list(DTYPES)
    for k in range(120):
        rng = np.random.default_rng(seed + k)
        code, imm, result = _mixed_programs()[k % 8]
        shape = (int(rng.integers(1, 5)), int(rng.integers(1, 40)), 8 * int(rng.integers(1, 40)))
        forms = [shape, shape[-1:], (1,), (shape[1], 1), (shape[0], 1, shape[-1]),
                 (shape[0], shape[1], 1)]  # fmt: skip
        picks, kinds = rng.integers(0, 6, 4), rng.integers(0, 3, 4)
        if k % 3 == 0:  # all of 16 bits: another vector
            kinds = rng.integers(1, 3, 4)
        x = [torch.randn(forms[f], device="cuda").to(DTYPES[names[t]])
             for f, t in zip(picks, kinds, strict=True)]  # fmt: skip
        x[0] = x[0] > 0
        dtype = names[kinds[0]]
        y = torch.zeros(shape, dtype=torch.bool if result == "bool" else DTYPES[dtype],
                        device="cuda")  # fmt: skip
        m.forward(code, imm, x, y=y, kernel=kernel)
        expected = run(code, imm, [v.double().broadcast_to(shape) for v in x])
        bound = EPSILON[dtype] + 2.0**-11 * (dtype != "float32") + 2.0**-17
        if result == "bool":
            assert torch.equal(y, expected != 0), f"{k}, seed {seed}"
        else:
            assert_close(y, expected, bound, 8.0, f"{k} {picks} {kinds}, seed {seed}")


def test_the_fused_kernel_says_what_it_does_not_take(
    module: Callable[[str], ModuleType],
) -> None:
    m = module("ewise")
    x, y = torch.randn(2, 4, 64, device="cuda")
    column = torch.randn(4, 1, device="cuda")
    twice = [14, 0, 0, -1, -1, 42, 0, 1, 1, -1]
    for code, operands, why in (
        ([8, 0, 0, -1, -1], [x], "only the chain kernel has"),
        (twice, [x], "read again later"),
        ([40, 0, 0, 1, -1], [x, column], "neither dense nor a row"),
        ([40, 0, 0, 1, -1], [x, x.half()], "dtypes differ"),
        ([40, 0, 0, 0, -1, 42, 0, 1, 0, -1, 40, 0, 2, 0, -1], [x], "more than three operands"),
        ([0, 0, 0, -1, -1], [x], "the result is a constant"),
    ):
        with pytest.raises(m.Unsupported, match=why):
            m.forward(code, [1.0], operands, y=y, kernel="ewise_fused_sm80")


def test_gelu_is_as_exact_as_its_dtype_in_chains(
    module: Callable[[str], ModuleType], seed: int
) -> None:
    m = module("ewise")
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3e38, -3e38, 20.0, -20.0]
    for dtype in DTYPES:
        x = torch.linspace(-12, 12, 8192, device="cuda").to(DTYPES[dtype])
        x[: len(special)] = torch.tensor(special, device="cuda").to(x.dtype)
        y = torch.empty_like(x)
        for name in ("gelu", "gelu_tanh", "silu", "sigmoid", "relu", "tanh"):
            m.forward([OPCODES[name], 0, 0, -1, -1], [], [x], y=y, kernel="ewise_fused_sm80")
            expected = apply(OPCODES[name], x.double())
            bound = EPSILON[dtype] + (8 * 2.0**-23 if dtype == "float32" else 2.0**-14)
            floor = 2.0**-14 if dtype == "float16" else 1e-6
            if name == "gelu_tanh":
                floor = max(floor, 2.0**-8)  # the reference cancels below -4
            assert_close(y, expected, bound, floor, f"{name} {dtype}")


def test_chain_and_interpreter_agree_where_a_result_is_read_again_later(
    module: Callable[[str], ModuleType],
) -> None:
    m = module("ewise")
    x = torch.randn(3, 64, device="cuda")
    # t = tanh x; u = sigmoid x; v = t * u; w = v + t; y = fma(w, u, t)
    code = [10, 0, 0, -1, -1, 12, 0, 0, -1, -1, 42, 0, 1, 2, -1, 40, 0, 3, 1, -1, 71, 0, 4, 2, 1]
    results = []
    for kernel in KERNELS[1:]:
        y = torch.empty_like(x)
        m.forward(code, [], [x], y=y, kernel=kernel)
        results.append(y)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "source", ["float32", "float64", "bfloat16", "float16", "int64", "int32", "bool"]
)
@pytest.mark.parametrize(
    "target", ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool"]
)
def test_a_cast_is_torchs(module: Callable[[str], ModuleType], source: str, target: str) -> None:
    m = module("ewise")
    x = (torch.arange(-60, 60, device="cuda") / (1 if "int" in source else 8)).to(
        getattr(torch, source)
    )
    if target == "uint8":
        x = x.abs()
    cls = 1 if "float64" in (source, target) else 2 if "int" in source and "int" in target else 0
    y = torch.empty(x.shape, dtype=getattr(torch, target), device="cuda")
    m.forward([1, cls, 0, -1, -1], [], [x], y=y)
    assert torch.equal(y, x.to(y.dtype))


def test_any_strides_are_read_and_written(module: Callable[[str], ModuleType]) -> None:
    m = module("ewise")
    x = torch.randn(5, 7, 6, device="cuda").permute(2, 0, 1)
    b = torch.randn(7, device="cuda")[None, None, ::1]
    y = torch.zeros(6, 5, 14, device="cuda")[:, :, ::2]
    m.forward([40, 0, 0, 1, -1], [], [x, b], y=y)
    assert torch.equal(y, x + b)


def test_integers_wrap_and_divide_as_in_torch(
    module: Callable[[str], ModuleType], seed: int
) -> None:
    m = module("ewise")
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-100, 100, (2, 1000))
    b[b == 0] = 7
    for name in ("add", "sub", "mul", "floor_div", "remainder", "minimum", "maximum", "lt", "eq"):
        got = m.forward_numpy([OPCODES[name], 2, 0, 1, -1], [], [a, b], dtype=np.dtype("int64"))
        expected = apply(OPCODES[name], torch.from_numpy(a), torch.from_numpy(b))
        assert np.array_equal(got, expected.numpy().astype("int64")), name
    top = np.array([2**63 - 1])
    assert m.forward_numpy([40, 2, 0, 0, -1], [], [top], dtype=top.dtype)[0] == -2


def test_nan_and_inf_are_those_of_torch(module: Callable[[str], ModuleType]) -> None:
    m = module("ewise")
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 1.0, -2.0, 1e30, -0.0])
    a, b = (v.contiguous().cuda() for v in (special.repeat(8), special.repeat_interleave(8)))
    for name in ("add", "mul", "minimum", "maximum", "div", "relu", "exp", "tanh", "sigmoid", "eq"):
        arity = 1 if name in UNARY else 2
        expected = apply(OPCODES[name], *(a.double(), b.double())[:arity]).float()
        for kernel in KERNELS:
            y = torch.empty_like(a)
            m.forward([OPCODES[name], 0, 0, 1 if arity == 2 else -1, -1], [], [a, b][:arity], y=y,
                      kernel=kernel)  # fmt: skip
            torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-38, equal_nan=True, msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numpy_form_runs_the_gradient_too(
    module: Callable[[str], ModuleType], dtype: str
) -> None:
    m = module("ewise")
    x, dy = torch.randn(2, 96).to(DTYPES[dtype])
    silu = [OPCODES["silu"], 0, 0, -1, -1]
    y = from_numpy(m.forward_numpy(silu, [], [to_numpy(x)], dtype=to_numpy(x).dtype))
    assert_close(y, torch.nn.functional.silu(x.double()), EPSILON[dtype] + 2.0**-20, 1e-3, "silu")
    leaf = x.double().requires_grad_()
    (wanted,) = torch.autograd.grad(torch.nn.functional.silu(leaf), leaf, dy.double())
    (got,) = m.backward_numpy(silu, [], [to_numpy(x)], to_numpy(dy))
    assert_close(from_numpy(got), wanted, EPSILON[dtype] + 2.0**-19, 1e-2, "silu gradient")


def test_launches_are_captured_in_a_graph(module: Callable[[str], ModuleType]) -> None:
    ewise, norm, softmax = module("ewise"), module("rmsnorm"), module("softmax")
    x = torch.randn(4, 256, device="cuda")
    y, z, w = torch.empty(3, 4, 256, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        ewise.forward([OPCODES["silu"], 0, 0, -1, -1], [], [x], y=y, stream=stream)
        norm.forward(y, y=z, stream=stream)
        softmax.forward(z, y=w, stream=stream)
    x.copy_(torch.randn_like(x))
    graph.replay()
    silu = torch.nn.functional.silu(x)
    expected = torch.softmax(silu * torch.rsqrt(silu.square().mean(-1, True) + 1e-5), -1)
    torch.testing.assert_close(w, expected)


@pytest.mark.parametrize("captured", [False, True])
def test_overlapping_launches_see_what_the_ones_before_wrote(
    module: Callable[[str], ModuleType], captured: bool
) -> None:
    ewise, reduction = module("ewise"), module("reduction")
    rows, n, rounds = 512, 4096, 24
    a, b = torch.zeros(2, rows, n, device="cuda")
    one, total = torch.ones(n, device="cuda"), torch.zeros(1, n, device="cuda")
    space = torch.empty(
        reduction.workspace(b, "sum", y=total), dtype=torch.uint8, device="cuda"
    )  # fmt: skip
    add = [OPCODES["add"], 0, 0, 1, -1]
    side = torch.cuda.Stream()

    def run_all() -> None:
        a.zero_()
        for k in range(rounds):
            stream = torch.cuda.current_stream().cuda_stream
            ewise.forward(add, [], [a, one], y=b, stream=stream)
            if k % 5 == 4:  # torch's kernel, and another stream's
                b.mul_(1)
                side.wait_stream(torch.cuda.current_stream())
                reduction.forward(b, "sum", y=total, workspace=space, stream=side.cuda_stream)
                torch.cuda.current_stream().wait_stream(side)
            else:
                reduction.forward(b, "sum", y=total, workspace=space, stream=stream)
            # exact in float32: every sum is rows * (k + 1)
            code = [OPCODES["const"], 0, 0, -1, -1, OPCODES["sub"], 0, 1, 2, -1]
            code += [OPCODES["add"], 0, 0, 3, -1]
            kernel = "ewise_chain_sm80" if k % 2 else ""
            ewise.forward(code, [rows * (k + 1.0)], [b, total], y=a, stream=stream, kernel=kernel)

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_all()
        for _ in range(3):
            graph.replay()
    else:
        run_all()
    assert torch.equal(a, torch.full_like(a, rounds))
