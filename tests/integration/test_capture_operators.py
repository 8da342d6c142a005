"""Every mapped ATen operator, imported from a small function and run by the core, equals eager.

Shapes are symbolic: each function is captured once and run for two more shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rm_abstract as rm
from rm_abstract import _core, device
from rm_abstract.capture import decompositions
from rm_abstract.capture.export import capture
from rm_abstract.capture.outputs import builder
from rm_abstract.verification import parity

# pytest's log capture switches torch's structured trace on, which slows every capture down.
logging.getLogger("torch.__trace").disabled = True


class Wrapped(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def ints(*shape: int) -> torch.Tensor:
    return torch.randint(-9, 9, shape)


def two(a: int, b: int) -> tuple[torch.Tensor, ...]:
    return floats(a, b), floats(a, b)


def bools(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) > 0.5


def check(function: Callable[..., Any], make: Callable[[int, int], Any], native: bool) -> None:
    device.load_plugins()
    torch.manual_seed(5)
    module = Wrapped(function).eval()

    def inputs(a: int, b: int) -> tuple[torch.Tensor, ...]:
        made = make(a, b)
        return made if isinstance(made, tuple) else (made,)

    captured = capture(module, inputs(4, 6), {})
    text = _core.ir.run_passes(_core.ir.canonical(captured.ir))
    assert bool(captured.kept) != native, [k.op for k in captured.kept]
    program = _core.Program(text, {}, ["cpu", "torch"])
    built = builder(captured.output)
    fits = _core.ir.Signature(captured.ir).test()
    for sizes in ((4, 6), (3, 8), (7, 2)):
        tensors = inputs(*sizes)
        if sizes == (7, 2) and not fits([t.shape for t in tensors]):
            with pytest.raises(_core.CoreError, match=r"\[bind\] expected sizes with"):
                program.run(list(tensors))
            continue
        with torch.no_grad():
            expected = module(*tensors)
        results = built(program.run(list(tensors)), tensors)
        verdict = parity.compare(expected, results, parity.working_precision(tensors))
        assert verdict.passed, (sizes, verdict.detail)


UNARY = (
    "neg abs exp sin cos tanh erf sigmoid relu sign expm1 floor ceil round trunc square isnan "
    "reciprocal log1p sqrt log rsqrt logical_not"
).split()
PAIRS = {
    "floats": lambda a, b: (floats(a, b), floats(b)),
    "ints": lambda a, b: (ints(a, b), ints(a, 1)),
    "mixed": lambda a, b: (ints(a, b), floats(b)),
    "half": lambda a, b: (floats(a, b).bfloat16(), floats(a, b).bfloat16()),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    function = getattr(torch, name)
    positive = name in ("log1p", "sqrt", "log", "rsqrt")
    check(function, lambda a, b: floats(a, b).abs() + 0.1 if positive else floats(a, b), True)


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "maximum", "eq", "lt", "ge", "ne"])
def test_binary_promotes_like_torch(name: str, kind: str) -> None:
    check(getattr(torch, name), PAIRS[kind], True)


def nonzero(a: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    return ints(a, b), ints(a, b).abs() + 1


def matrix(a: int, b: int) -> torch.Tensor:
    return floats(a, b)


def cube(a: int, b: int) -> torch.Tensor:
    return floats(a, b, 8)


Case = tuple[Callable[..., Any], Callable[[int, int], Any]]
FUNCTIONS: dict[str, Case] = {
    "div of integers": (torch.div, nonzero),
    "floor division": (lambda x, y: torch.div(x, y, rounding_mode="floor"), nonzero),
    "truncated division of integers": (
        lambda x, y: torch.stack(
            [
                torch.div(x, y, rounding_mode="trunc"),
                torch.div(x, -3, rounding_mode="trunc"),
                torch.div(x.to(torch.int8), 2, rounding_mode="trunc").long(),
            ]
        ),
        nonzero,
    ),
    "truncated division": (lambda x: torch.div(x, 0.3, rounding_mode="trunc"), matrix),
    "remainder": (torch.remainder, nonzero),
    "a number and a half": (lambda x: x * 0.3 + 1, lambda a, b: floats(a, b).bfloat16()),
    "alpha": (lambda x, y: torch.add(x, y, alpha=2) - torch.sub(x, y, alpha=0.5), PAIRS["floats"]),
    "reversed": (lambda x: 1 - x, matrix),
    "powers": (lambda x: x**2 + x.abs() ** 1.5 + 2**x, matrix),
    "comparison with a number": (lambda x: (x > 0.5) & (x <= 2), matrix),
    "logical": (lambda x, y: torch.logical_or(x, y) ^ ~x, lambda a, b: (bools(a, b), bools(b))),
    "bitwise": (lambda x, y: (x & y) | ~x, PAIRS["ints"]),
    "where": (lambda x: torch.where(x > 0, x, 0.25), matrix),
    "masked fill": (lambda x: x.masked_fill(x < 0, float("-inf")), matrix),
    "clamp": (lambda x: x.clamp(-0.5, 0.7) + x.clamp(min=0.1), matrix),
    "addcmul": (lambda x: torch.addcmul(x, x, x, value=0.5), matrix),
    "leaky relu": (lambda x: F.leaky_relu(x, 0.2), matrix),
    "lerp": (lambda x: torch.lerp(x, x * 2, 0.3), matrix),
    "softplus": (F.softplus, matrix),
    "gelu": (lambda x: F.gelu(x) + F.gelu(x, approximate="tanh") + F.silu(x), matrix),
    "casts": (lambda x: (x.long().float() + x.bool(), x.to(torch.bfloat16), x.double()), matrix),
    "views": (lambda x: x.view(-1).reshape(x.shape).unsqueeze(1).squeeze(1).T.flatten(), matrix),
    "permute": (lambda x: x.permute(2, 0, 1).transpose(0, 2).movedim(0, 1), cube),
    "expand": (lambda x: x[:, None].expand(-1, 3, -1) + 1, matrix),
    "slices": (lambda x: (x[1:, -2:], x[:, ::2], x[-1], x[..., 3:100], x[:-1]), cube),
    "select and narrow": (lambda x: x.select(2, -1) + x.narrow(2, 1, 2).sum(2), cube),
    "split": (lambda x: torch.split(x, [3, 5], 2)[1] + x.chunk(8, 2)[0], cube),
    "unbind": (lambda x: x.unbind(2)[3], cube),
    "cat and stack": (lambda x: torch.cat([x, torch.stack([x[0], x[1]]).long()]), matrix),
    "repeat": (lambda x: x.repeat(2, 1, 3), matrix),
    "repeat interleave": (lambda x: x.repeat_interleave(3, 1), matrix),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 1), value=3.0), matrix),
    "crop": (lambda x: F.pad(x, (-1, 2)), matrix),
    "roll": (lambda x: eight(x).roll(3, 2), cube),
    "triangles": (lambda x: x.tril(-1) + x.triu(1), matrix),
    "writes to a slice": (lambda x: _written(x), matrix),
    "in place": (lambda x: (x + 1).add_(2).mul_(x), matrix),
    "arange": (
        lambda x: torch.arange(x.shape[1]) * 2 + torch.arange(3, 3 + x.shape[0])[:, None],
        matrix,
    ),
    "arange of floats": (lambda x: torch.arange(0, 2, 0.25) + x, cube),
    "full and like": (
        lambda x: torch.full(x.shape, 2.5) + torch.ones_like(x) + x.new_zeros(x.shape[1]),
        matrix,
    ),
    "a size as a number": (lambda x: x * x.shape[0] + x.shape[1], matrix),
    "sums": (lambda x: (x.sum(), x.sum(1), x.mean((0, 2)), x.mean(-1, keepdim=True)), cube),
    "sums of integers": (lambda x: (x.sum(1), (x > 0).sum(0), (x > 0).any(1), x.all()), ints),
    "extremes": (lambda x: (*x.max(1), x.amin((0, 2)), x.max(), x.argmax(2)), cube),
    "argmax of all": (lambda x: x.argmax(), matrix),
    "softmax": (lambda x: x.softmax(1) + x.log_softmax(0), matrix),
    "softmax in another type": (
        lambda x: x.softmax(-1, dtype=torch.float32).to(x.dtype),
        lambda a, b: floats(a, b).bfloat16(),
    ),
    "cumsum": (lambda x: x.cumsum(1) + (x > 0).cumsum(0), matrix),
    "cumsum to a narrow type": (lambda x: (x > 0).long().cumsum(0, dtype=torch.int32), matrix),
    "index_copy": (lambda x: x.index_copy(1, torch.tensor([1, 0]), x[:, :2] * 2), matrix),
    "slice from a bound": (lambda x: x + x[:1, max(0, 1 - 2 * x.shape[1]) :], matrix),
    "norm": (lambda x: F.normalize(x, dim=2), cube),
    "variance": (lambda x: x.var(2) + x.std(2, correction=0), cube),
    "sort": (lambda x: torch.sort(x, 1, descending=True), matrix),
    "topk": (lambda x: torch.topk(x, 3, 2), cube),
    "gather": (lambda x: x.gather(1, (x > 0).long()), matrix),
    "index": (
        lambda x: x[torch.tensor([1, 0, 1])] + x.index_select(2, torch.tensor([5]))[:3][:1],
        cube,
    ),
    "index with two tensors": (
        lambda x: x[torch.arange(2)[:, None], torch.arange(2)[None, :]],
        cube,
    ),
    "scatter": (lambda x: x.scatter(1, torch.zeros(1, 1, dtype=torch.long), 5.0), matrix),
    "einsum outer": (lambda x, y: torch.einsum("i,j->ij", x[:, 0], y[0]), two),
    "einsum outer, turned": (lambda x, y: torch.einsum("bi, bj -> jbi", x, y), two),
    "einsum scaled": (lambda x, y: torch.einsum("bi,->ib", x, y[0, 0]), two),
    "einsum over one": (lambda x, y: torch.einsum("bi,bi->bi", x, y[:1]), two),
    "matmul": (lambda x: x @ x.transpose(1, 2) @ x, cube),
    "matrix and vector": (lambda x: (x @ x[0], x[0] @ x.T, x[0] @ x[0]), matrix),
    "batched": (lambda x: torch.bmm(x, x.transpose(1, 2)), cube),
    "layer norm": (lambda x: F.layer_norm(x, (8,)), cube),
    "rms norm": (lambda x: F.rms_norm(x, (8,), eps=1e-6), cube),
    "attention": (
        lambda x: F.scaled_dot_product_attention(eight(x), x, x, is_causal=True),
        lambda a, b: floats(a, 2, b, 8),
    ),
    "attention with a mask": (
        lambda x: F.scaled_dot_product_attention(x, x, x, x @ x.transpose(2, 3) > -9, scale=0.3),
        lambda a, b: floats(a, 2, b, 8),
    ),
    "attention of rank 3": (lambda x: F.scaled_dot_product_attention(eight(x), x, x), cube),
    "batch norm": (
        lambda x: F.batch_norm(x, torch.arange(8.0), torch.arange(8.0) + 1),
        lambda a, b: floats(a, 8, b),
    ),
    "no grad region": (lambda x: _quiet(x) + 1, matrix),
    "functions": (
        lambda x: [f(x) for f in (torch.tan, torch.sinh, torch.cosh, torch.atan, torch.exp2)],
        matrix,
    ),
    "functions and their ends": (
        lambda x: [torch.asinh(x), torch.acosh(x), *(f(x * 0.5) for f in _ENDS)],
        lambda a, b: (
            torch.cat([floats(a, b), torch.tensor([[0.0, -0.0, 2, -2, 1e30, -1e30]])])
            if b == 6
            else floats(a, b)
        ),
    ),
    "functions in half": (
        lambda x: torch.sinh(x) + torch.atan(x),
        lambda a, b: floats(a, b).bfloat16(),
    ),
    "mirrored padding": (
        lambda x: (
            F.pad(x, (1, 0, 0, 1), mode="reflect"),
            F.pad(x, (1, 9), mode="replicate"),
            F.pad(x.mean() + torch.arange(12.0).view(1, 3, 4), (1, 2), mode="circular"),
        ),
        cube,
    ),
    "flip": (lambda x: x.flip(0, -1) + x.flip([]), cube),
    "diagonal": (lambda x: (x.diagonal(), x.diagonal(1, 2, 0), eight(x).diagonal(-1, 0, 2)), cube),
    "written at indices": (
        lambda x: x.index_put((torch.tensor([[0], [-1]]), torch.tensor([1, 0])), x[0, :2]),
        cube,
    ),
    "added at indices": (
        lambda x: (
            x.index_put((torch.tensor([0, 0, -1]),), torch.tensor(2.0), accumulate=True),
            x.index_add(1, torch.tensor([1, 1]), x[:, :2], alpha=0.5),
        ),
        cube,
    ),
    "written where": (lambda x: x.index_put((x > 0,), torch.tensor(9.0)), matrix),
    "argsort": (lambda x: x.argsort(1, descending=True) + x.argsort(0), matrix),
    "cosine similarity": (lambda x: F.cosine_similarity(x, x.flip(1) * (x > 0), dim=1), cube),
    "variance and mean": (
        lambda x: (*torch.var_mean(x, 1), *torch.std_mean(eight(x), -1, keepdim=True), x.std()),
        cube,
    ),
    "a number's place": (lambda x: x.sum().argmax() + x.argmin(), matrix),
    "sums in logarithms": (
        lambda x: torch.logsumexp(x, 1) + torch.logaddexp(x[:, 0], x[:, 1]),
        matrix,
    ),
    "contractions": (
        lambda x: torch.einsum("abi,abj->aij", x, x).sum((1, 2)) + torch.tensordot(x, x, 3),
        cube,
    ),
    "told apart": (
        lambda x: torch.nan_to_num(x / 0 * (x > 0)) + torch.isinf(1 / x.trunc()),
        matrix,
    ),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 1.0) + 1, cube),
    "shrinks": (lambda x: F.softshrink(x) + F.hardshrink(x) + F.softsign(x), matrix),
}
_ENDS = (torch.asin, torch.acos, torch.atanh)


def eight(x: torch.Tensor) -> torch.Tensor:
    """The last size as a constant, as a model's weights would make it."""
    torch._check(x.shape[-1] == 8)
    return x


def _written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 1:] = 0
    y[0] += 1
    return y


def _quiet(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return x * 2


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str) -> None:
    function, make = FUNCTIONS[name]
    check(function, make, True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cdist(x, x) + 1,
        lambda x: torch.nextafter(x, x + 1) + 1,
    ],
    ids=["cdist", "nextafter"],
)
def test_an_unmapped_operator_is_kept_for_the_bridge(function: Callable[..., Any]) -> None:
    check(function, cube, False)


def test_a_decomposition_that_asks_for_a_size_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def after(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x + 1e-7 if x.shape[0] == 4 else x * 0  # 4: that of the capture

    table = {torch.ops.aten.nextafter.default: after}
    monkeypatch.setattr(decompositions, "_table", lambda: table)
    check(lambda x: torch.nextafter(x, x * 2) + 1, matrix, native=False)


def test_an_operator_of_a_library_runs_on_the_bridge() -> None:
    @torch.library.custom_op("rm_abstract_test::halve", mutates_args=())
    def halve(x: torch.Tensor, by: int) -> torch.Tensor:
        return x / (2 * by)

    halve.register_fake(lambda x, by: torch.empty_like(x))
    check(lambda x: halve(x.relu(), 3) + 1, matrix, native=False)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "tanh", "sigmoid"])
def test_an_activation_has_the_same_bits_within_a_product_and_alone(name: str) -> None:
    activation = {
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
    }[name]

    class Activated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64, bias=False)
            self.linear.weight.data.copy_(torch.eye(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return activation(self.linear(x))

    model, x = Activated().eval(), torch.linspace(-14, 14, 64 * 64).reshape(64, 64)
    fused, alone = (rm.compile(model, options={"optimization_level": level}) for level in (1, 0))
    with torch.no_grad():
        results = [executable(x) for executable in (fused, alone) for _ in range(2)]
        kernels = [
            executable.explain().models[0]["entries"][0]["kernels"] for executable in (fused, alone)
        ]
    assert not any("ewise" in kernel for kernel in kernels[0]), kernels
    assert any("ewise" in kernel for kernel in kernels[1]), kernels
    assert torch.equal(results[1], results[3])
    torch.testing.assert_close(results[1], activation(x), rtol=1e-5, atol=1e-6)
