"""gemm and its gradients against float64: every kernel, epilogue, transposition, batch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from problems import (
    ACTIVATIONS,
    DTYPES,
    HOSTILE,
    assert_as_torch,
    assert_close,
    from_numpy,
    to_numpy,
    tolerance,
)

pytestmark = pytest.mark.cuda
KERNELS = ("", "gemm_cublaslt_library", "gemm_cublaslt_ewise", "gemm_tiled_any")
WGMMA = tuple(f"gemm_wgmma_{tile}_sm90a" for tile in
              ("256x2", "256", "128x2", "128", "128t", "128tx2", "64", "128k2", "128k4", "64k2",
               "64k4"))  # fmt: skip


def axis(rng: np.random.Generator, longest: int) -> int:
    n = int(np.exp(rng.uniform(0, np.log(longest))))
    return max(8, n // 8 * 8) if rng.random() < 0.6 else n


class Problem:
    """A random problem; `expected` is its float64 value."""

    def __init__(
        self, rng: np.random.Generator, t: torch.dtype, k: int, aligned: bool = False
    ) -> None:
        self.m, self.n, self.k = axis(rng, 500), axis(rng, 500), axis(rng, 1500)
        self.lead = [(), (3,), (2, 2)][int(rng.integers(0, 3))] if k % 3 == 0 else ()
        self.trans_a, self.trans_b = bool(rng.integers(0, 2)), bool(rng.integers(0, 2))
        shared = bool(self.lead) and bool(rng.integers(0, 2))
        pad = int(rng.integers(0, 2)) * 8
        lead_b = () if shared else self.lead
        self.a = self.make((*self.lead, self.m, self.k), self.trans_a, pad, t, aligned)
        self.b = self.make((*lead_b, self.k, self.n), self.trans_b, pad, t, aligned)
        kinds = ["none", "column", "row", "scalar"]
        self.kind = kinds[k % 4]
        sizes = {"column": self.n, "row": self.m, "scalar": 1}
        size = sizes.get(self.kind)
        self.bias = None if size is None else torch.randn(size, device="cuda").to(t)
        self.activation, self.function = ACTIVATIONS[(k // 4) % len(ACTIVATIONS)]
        self.scale = [1.0, 0.5][k % 2]
        shape = (*self.lead, self.m, self.n)
        self.residual = torch.randn(shape, device="cuda").to(t) if k % 5 < 2 else None
        self.aux = torch.empty(shape, device="cuda", dtype=t) if k % 7 < 3 else None
        self.c = torch.full(shape, float("nan"), device="cuda", dtype=t)

    @staticmethod
    def make(
        shape: tuple[int, ...], trans: bool, pad: int, t: torch.dtype, aligned: bool
    ) -> torch.Tensor:
        """Rows of a wider tensor; aligned: on 16 bytes, whatever their length."""
        stored = (*shape[:-2], shape[-1], shape[-2]) if trans else shape
        pad += -stored[-1] % 8 if aligned else 0
        wide = torch.randn(*stored[:-1], stored[-1] + pad, device="cuda").to(t)
        return wide[..., : stored[-1]]

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(op(a), op(b)) in float64."""
        a, b = self.a.double(), self.b.double()
        return (a.mT if self.trans_a else a), (b.mT if self.trans_b else b)

    def before(self, product: torch.Tensor) -> torch.Tensor:
        t = product * self.scale
        if self.bias is None:
            return t
        bias = self.bias.double()
        return t + (bias[:, None] if self.kind == "row" else bias)

    def options(self) -> dict[str, Any]:
        out = {"trans_a": self.trans_a, "trans_b": self.trans_b, "activation": self.activation}
        return out | {"bias_kind": self.kind, "scale": self.scale, "slope": 0.1}


def workspace(m: ModuleType) -> torch.Tensor:
    return torch.empty(m.workspace(), dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS + WGMMA)
def test_gemm_equals_float64(
    module: Callable[[str], ModuleType], dtype: str, kernel: str, seed: int
) -> None:
    m, rng = module("gemm"), np.random.default_rng(seed)
    torch.manual_seed(seed)
    if kernel in WGMMA and (dtype == "float32" or torch.cuda.get_device_capability()[0] != 9):
        pytest.skip("wgmma is for 16-bit floats on Hopper")
    space, ran = workspace(m), 0
    for k in range(120):
        p = Problem(rng, DTYPES[dtype], k, kernel in WGMMA)
        try:
            m.forward(p.a, p.b, p.bias, p.residual, c=p.c, aux=p.aux, workspace=space,
                      kernel=kernel, **p.options())  # fmt: skip
        except m.Unsupported:
            assert kernel.startswith("gemm_cublaslt") or p.activation == "tanh"
            continue
        ran += 1
        a, b = p.plain()
        before = p.before(a @ b)
        expected = p.function(before)
        if p.residual is not None:
            expected = expected + p.residual.double()
        scale = float((a.square() @ b.square()).sqrt().max()) + 1
        what = f"problem {k}, {p.m} x {p.n} x {p.k}, {p.lead}, {p.options()}, seed {seed}"
        # the pass of the ewise row reads a rounded product
        bound = tolerance(dtype, p.k, 3) + 16 * 2.0**-23
        assert_close(p.c, expected, bound, scale, what)
        if p.aux is not None:
            assert_close(p.aux, before, bound, scale, what + ", aux")
    assert ran >= (8 if kernel == "gemm_cublaslt_library" else 100)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hostile_values_become_what_torch_makes_of_them(
    module: Callable[[str], ModuleType], dtype: str
) -> None:
    m, t, ran = module("gemm"), DTYPES[dtype], 0
    values = torch.tensor((*HOSTILE, *[0.5] * (-len(HOSTILE) % 8)), device="cuda").to(t)
    a, b = torch.zeros(8, 8, device="cuda", dtype=t), torch.zeros(8, len(values), device="cuda")
    a[:, 0], b[0] = 1, values.float()
    b, c = b.to(t), torch.empty(8, len(values), device="cuda", dtype=t)
    for activation, function in ACTIVATIONS:
        for kernel, _ in m.kernels():
            try:
                m.forward(a, b, c=c, bias_kind="none", activation=activation, slope=0.1,
                          workspace=workspace(m), kernel=kernel)  # fmt: skip
            except m.Unsupported:
                continue
            ran += 1
            wanted = function(values).expand_as(c)
            assert_as_torch(c, wanted, f"{activation} by {kernel}, {dtype}")
    assert ran >= 2 * len(ACTIVATIONS)


@pytest.mark.parametrize("kernel", WGMMA)
def test_blocks_that_take_many_tiles_of_short_products_keep_them_apart(
    module: Callable[[str], ModuleType], kernel: str, seed: int
) -> None:
    m = module("gemm")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is Hopper's")
    torch.manual_seed(seed)
    rows, columns, space = 4096, 3008, workspace(m)
    bias = torch.randn(columns, device="cuda").bfloat16()
    for depth in (8, 64, 128, 192, 256, 320, 520):
        a, b = (torch.randn(n, depth, device="cuda").bfloat16() for n in (rows, columns))
        product = a.float() @ b.float().T
        for aux in (None, torch.empty(rows, columns, device="cuda").bfloat16()):
            c = torch.full((rows, columns), float("nan"), device="cuda").bfloat16()
            m.forward(a, b, bias, c=c, aux=aux, trans_b=True, activation="relu", workspace=space,
                      kernel=kernel)  # fmt: skip
            expected = torch.relu(product + bias.float())
            bound = tolerance("bfloat16", depth, 2)
            assert_close(c, expected, bound, depth**0.5, f"{kernel}, K {depth}, seed {seed}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_equal_float64(
    module: Callable[[str], ModuleType], dtype: str, seed: int
) -> None:
    check_gradients(module("gemm"), dtype, seed, 100)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_in_one_launch_equal_float64(
    module: Callable[[str], ModuleType], dtype: str, seed: int
) -> None:
    m = module("gemm")
    for number, (kernel, _) in enumerate(m.backward_kernels()):
        check_gradients(m, dtype, seed + number, 24, aligned=True, kernel=kernel)
    check_gradients(m, dtype, seed, 6, aligned=True, tune=True)


def check_gradients(
    m: ModuleType, dtype: str, seed: int, count: int, aligned: bool = False, **how: Any
) -> None:
    rng, t, ran = np.random.default_rng(seed), DTYPES[dtype], 0
    torch.manual_seed(seed)
    for k in range(count):
        p = Problem(rng, t, k, aligned)
        if p.trans_a and p.a.ndim != p.b.ndim:
            continue
        a, b = (x.double().requires_grad_() for x in (p.a, p.b))
        product = (a.mT if p.trans_a else a) @ (b.mT if p.trans_b else b)
        aux = p.before(product).detach().to(t)
        dc = torch.randn(p.c.shape, device="cuda").to(t)
        x = aux.double().requires_grad_()
        (dt,) = torch.autograd.grad(p.function(x), x, dc.double())
        wanted = list(torch.autograd.grad(product, (a, b), dt * p.scale))
        got = [torch.full(x.shape, float("nan"), device="cuda", dtype=t) for x in (p.a, p.b)]
        dbias = None
        if p.bias is not None:
            dbias = torch.full_like(p.bias, float("nan"))
            flat = dt.reshape(-1, *dt.shape[-2:])
            sums = {"column": lambda f: f.sum((0, 1)), "row": lambda f: f.sum((0, 2)),
                    "scalar": lambda f: f.sum().reshape(1)}  # fmt: skip
            wanted.append(sums[p.kind](flat))
            got.append(dbias)
        options = p.options()
        space = torch.empty(
            m.backward_workspace(dc, p.a, p.b, has_bias=dbias is not None, bias_kind=p.kind,
                                 activation=p.activation),
            dtype=torch.uint8, device="cuda",
        )  # fmt: skip
        try:
            m.backward(dc, p.a, p.b, aux if p.activation != "none" else None, da=got[0],
                       db=got[1], dbias=dbias, workspace=space, **options, **how)  # fmt: skip
        except m.Unsupported:
            assert how.get("kernel", "").endswith("sm90a")  # dt's rows do not lie on 16 bytes
            continue
        ran += 1
        rows = dt.numel() // p.n
        for name, mine, right, depth in zip(
            ("da", "db", "dbias"), got, wanted, (p.n, rows, dt.numel()), strict=False
        ):
            scale = float(right.abs().max()) + 1
            if name == "dbias":
                scale += float(dt.norm())  # a sum of rounded dt, which may cancel
            what = f"problem {k}, {name}, {p.m} x {p.n} x {p.k}, {options}, {how}, seed {seed}"
            assert_close(mine, right, tolerance(dtype, depth, 3) + 2.0**-18, scale, what)
    assert ran >= count // 4


def test_tf32_is_close_and_only_when_asked_for(module: Callable[[str], ModuleType]) -> None:
    m = module("gemm")
    torch.manual_seed(1)
    a, b = torch.randn(2, 256, 256, device="cuda")
    errors = []
    for tf32 in (False, True):
        c = torch.empty(256, 256, device="cuda")
        m.forward(a, b, c=c, tf32=tf32, workspace=workspace(m), kernel="gemm_cublaslt_library")
        errors.append(float((c - a.double() @ b.double()).abs().max()))
    assert errors[0] < 1e-4 < errors[1] < 0.2


def test_a_tuned_problem_gives_the_same_and_runs_in_a_graph(
    module: Callable[[str], ModuleType],
) -> None:
    m = module("gemm")
    torch.manual_seed(2)
    a, b = torch.randn(2, 512, 512, device="cuda").bfloat16()
    bias, c, space = torch.randn(512, device="cuda").bfloat16(), torch.empty_like(a), workspace(m)
    m.forward(a, b, bias, c=c, activation="silu", workspace=space, tune=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        m.forward(a, b, bias, c=c, activation="silu", workspace=space, tune=True,
                  stream=torch.cuda.current_stream().cuda_stream)  # fmt: skip
    c.fill_(float("nan"))
    graph.replay()
    expected = torch.nn.functional.silu(a.double() @ b.double() + bias.double())
    assert_close(c, expected, tolerance("bfloat16", 512, 3), 22.0, "tuned")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numpy_forms_give_what_the_dlpack_forms_give(
    module: Callable[[str], ModuleType], dtype: str
) -> None:
    m, t = module("gemm"), DTYPES[dtype]
    a, b, bias = torch.randn(24, 40).to(t), torch.randn(40, 16).to(t), torch.randn(16).to(t)
    c, aux = torch.empty(2, 24, 16, dtype=t, device="cuda")
    m.forward(*(x.cuda() for x in (a, b, bias)), c=c, aux=aux, activation="gelu",
              workspace=workspace(m))  # fmt: skip
    got, got_aux = m.forward_numpy(*map(to_numpy, (a, b, bias)), activation="gelu", return_aux=True)
    assert torch.equal(from_numpy(got), c.cpu()) and torch.equal(from_numpy(got_aux), aux.cpu())
    da, db, dbias = m.backward_numpy(
        *map(to_numpy, (c.cpu(), a, b, aux.cpu())), has_bias=True, activation="gelu"
    )
    assert da.shape == (24, 40) and db.shape == (40, 16) and dbias.shape == (16,)


def test_what_is_not_legal_is_named(module: Callable[[str], ModuleType]) -> None:
    m = module("gemm")
    a = np.ones((4, 6), "float32")
    with pytest.raises(m.InvalidArgument, match="trans_a, trans_b"):
        m.forward_numpy(a, a)
    with pytest.raises(m.InvalidArgument, match=r"bias dense \[6\]"):
        m.forward_numpy(a, np.ones((6, 6), "float32"), np.ones(4, "float32"))
    assert m.forward_numpy(a[:, :0], np.ones((0, 3), "float32")).tolist() == [[0.0] * 3] * 4
    assert m.forward_numpy(a[:0], np.ones((6, 3), "float32")).shape == (0, 3)
