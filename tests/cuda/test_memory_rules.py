"""Which tensors of a call may share memory: one rule in all modules, legal views included."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.cuda
Module = Callable[[str], ModuleType]
Call = Callable[[torch.Tensor], None]
R, N = 16, 64
SQUARE = (R, N)


def dense(*shape: int, t: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(t)


def room(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def ewise(m: ModuleType, x: torch.Tensor) -> Call:
    return lambda y: m.forward([4, 0, 0, -1, -1], [], [x], y=y)


def copy(m: ModuleType, x: torch.Tensor) -> Call:
    return lambda y: m.forward(x, y=y)


def softmax(m: ModuleType, x: torch.Tensor) -> Call:
    return lambda y: m.forward(x, y=y)


def softmax_backward(m: ModuleType, x: torch.Tensor) -> Call:
    dy = dense(*SQUARE)
    return lambda y: m.backward(dy, x, dx=y)


def norm(m: ModuleType, x: torch.Tensor) -> Call:
    return lambda y: m.forward(x, y=y)


def norm_sum(m: ModuleType, x: torch.Tensor) -> Call:
    r, y = dense(*SQUARE), dense(*SQUARE)
    return lambda s: m.forward(x, residual=r, y=y, sum=s)


def norm_backward(m: ModuleType, x: torch.Tensor) -> Call:
    dy = dense(*SQUARE)
    return lambda y: m.backward(dy, x, dx=y, workspace=room(m.backward_workspace(x)))


def cross_entropy_backward(m: ModuleType, x: torch.Tensor) -> Call:
    ids, f = torch.zeros(R, dtype=torch.int64, device="cuda"), dense(R)
    return lambda y: m.backward(f, x, ids, f, dlogits=y)


def gemv(m: ModuleType, x: torch.Tensor) -> Call:
    a, w = dense(R, 32), dense(N, 32)
    return lambda y: m.forward(a, w, None, None, x, y=y)


def gemm(m: ModuleType, x: torch.Tensor) -> Call:
    a, b = dense(R, 32), dense(32, N)
    return lambda y: m.forward(a, b, None, x, c=y)


def gemm_aux(m: ModuleType, x: torch.Tensor) -> Call:
    a, b, c = dense(R, 32), dense(32, N), dense(*SQUARE)
    return lambda y: m.forward(a, b, None, x, c=c, aux=y, activation="silu")


def gemm_backward(m: ModuleType, x: torch.Tensor) -> Call:
    dc, b = dense(R, 32), dense(N, 32)
    space = room(m.backward_workspace(dc, x, b))
    return lambda y: m.backward(dc, x, b, da=y, trans_b=False, workspace=space)


def sdpa(m: ModuleType, x: torch.Tensor) -> Call:
    k = dense(1, 1, 9, N)
    q = x.view(1, 1, R, N) if x.is_contiguous() else x[None, None]
    return lambda y: m.forward(q, k, k.clone(), o=y[None, None])


def rope(m: ModuleType, x: torch.Tensor) -> Call:
    table = dense(R, N)
    return lambda y: m.forward(x[None, None], table, table.clone(), y=y[None, None])


def embedding(m: ModuleType, x: torch.Tensor) -> Call:
    ids = torch.arange(R, device="cuda")
    return lambda y: m.forward(x, ids, y=y)


def reduction(m: ModuleType, x: torch.Tensor) -> Call:
    return lambda y: m.forward(x[:, None], "sum", y=y[:, None])


def conv2d(m: ModuleType, x: torch.Tensor) -> Call:
    w = torch.eye(R, device="cuda")[:, :, None, None].contiguous()
    return lambda y: m.forward(x[None, :, None], w, y=y[None, :, None], workspace=room(1 << 20))


def optim(m: ModuleType, x: torch.Tensor) -> Call:
    def call(y: torch.Tensor) -> None:
        if not x.is_contiguous() or not y.is_contiguous():
            raise m.InvalidArgument("in memory apart: steps take dense tensors alone")
        m.step([y], [x], kind="sgd", lr=0.0)

    return call


#: name, module, call with one result, whether that may be the operand itself
CASES: tuple[tuple[str, str, Callable[[ModuleType, torch.Tensor], Call], bool], ...] = (
    ("ewise", "ewise", ewise, True),
    ("copy", "copy", copy, True),
    ("softmax", "softmax", softmax, True),
    ("softmax backward", "softmax", softmax_backward, True),
    ("layernorm", "layernorm", norm, True),
    ("rmsnorm sum", "rmsnorm", norm_sum, True),
    ("layernorm backward", "layernorm", norm_backward, False),
    ("rmsnorm backward", "rmsnorm", norm_backward, False),
    ("cross_entropy backward", "cross_entropy", cross_entropy_backward, True),
    ("gemv", "gemv", gemv, True),
    ("gemm", "gemm", gemm, True),
    ("gemm aux", "gemm", gemm_aux, False),
    ("gemm backward", "gemm", gemm_backward, False),
    ("sdpa", "sdpa", sdpa, False),
    ("rope", "rope", rope, True),
    ("embedding", "embedding", embedding, False),
    ("reduction", "reduction", reduction, False),
    ("conv2d", "conv2d", conv2d, False),
    ("optim", "optim", optim, False),
)
IDS = [case[0] for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_result_may_be_its_operand_only_where_that_is_said(module: Module, case: Any) -> None:
    _, name, make, in_place = case
    m, x = module(name), dense(*SQUARE)
    call = make(m, x)
    if in_place:
        call(x)
    else:
        with pytest.raises(m.InvalidArgument, match="in memory apart from each other"):
            call(x)
    torch.cuda.synchronize()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_result_that_overlaps_an_operand_is_refused(module: Module, case: Any) -> None:
    _, name, make, _ = case
    m, memory = module(name), dense((R + 2) * N)
    x = memory[: R * N].view(R, N)
    for shift in (1, 8, N, N + 8):  # by elements, by vectors, by rows
        y = memory[shift : shift + R * N].view(R, N)
        with pytest.raises(m.InvalidArgument, match="in memory apart"):
            make(m, x)(y)
    before = memory.clone()
    torch.cuda.synchronize()
    assert torch.equal(memory, before)


@pytest.mark.parametrize("case", [c for c in CASES if c[0] != "optim"], ids=IDS[:-1])
def test_a_result_whose_rows_share_memory_is_refused(module: Module, case: Any) -> None:
    _, name, make, _ = case
    m, x, memory = module(name), dense(*SQUARE), dense(R * N)
    for strides in ((0, 1), (N - 1, 1), (8, 1)):
        y = memory.as_strided(SQUARE, strides)
        with pytest.raises(m.InvalidArgument):
            make(m, x)(y)


@pytest.mark.parametrize("case", [c for c in CASES if c[0] != "optim"], ids=IDS[:-1])
def test_views_of_one_buffer_that_share_no_byte_are_taken(module: Module, case: Any) -> None:
    """Halves of the columns, every other row, the rows behind: their address ranges may meet."""
    label, name, make, _ = case
    m = module(name)
    wide, tall = dense(R, 2 * N), dense(2 * R, N)
    pairs = [(wide[:, :N], wide[:, N:]), (wide[:, N:], wide[:, :N]), (tall[::2], tall[1::2]),
             (tall[:R], tall[R:])]  # fmt: skip
    for number, (x, y) in enumerate(pairs):
        if label == "embedding" and not y.is_contiguous():
            continue  # its result is dense
        if label == "conv2d" and number == 2:
            continue
        mine = make(m, x)
        before = x.clone()
        mine(y)
        torch.cuda.synchronize()
        assert torch.equal(x, before), f"{label}, pair {number}"


def test_gradients_of_attention_may_lie_in_one_buffer_but_not_on_each_other(
    module: Module,
) -> None:
    m = module("sdpa")
    q, k, v, o, g = (dense(2, 4, 24, 64, t=torch.bfloat16) for _ in range(5))
    lse = torch.zeros(2, 4, 24, device="cuda")
    space = room(m.backward_workspace(q, k))
    packed = torch.empty(2, 24, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    dq, dk, dv = (packed[:, :, i].transpose(1, 2) for i in range(3))
    m.backward(g, q, k, v, o, lse, dq=dq, dk=dk, dv=dv, workspace=space)
    for wrong in ({"dq": dq, "dk": dq, "dv": dv}, {"dq": dq, "dk": dk, "dv": q}):
        with pytest.raises(m.InvalidArgument, match="in memory apart from each other"):
            m.backward(g, q, k, v, o, lse, workspace=space, **wrong)


def test_caches_are_apart_from_what_is_appended_and_from_each_other(module: Module) -> None:
    m = module("kv_append")
    new, cache = dense(1, 2, 3, 8), dense(1, 2, 9, 8)
    at = torch.zeros(1, dtype=torch.int32, device="cuda")
    both = dense(1, 9, 2, 2, 8)
    m.forward(new, new, both[:, :, 0].transpose(1, 2), both[:, :, 1].transpose(1, 2), at)
    with pytest.raises(m.InvalidArgument, match="v_cache and k_cache in memory apart"):
        m.forward(new, new, cache, cache, at)
    with pytest.raises(m.InvalidArgument, match="k_cache and k in memory apart"):
        m.forward(cache[:, :, 2:5], new, cache, cache.clone(), at)
    with pytest.raises(m.InvalidArgument, match="k_cache with elements of its own"):
        m.forward(new, new, cache[:, :1].expand(1, 2, 9, 8), cache, at)


def test_a_workspace_is_apart_from_all_tensors(module: Module) -> None:
    m = module("layernorm")
    x, dx, w = dense(64, 256), dense(64, 256), dense(256)
    size = m.backward_workspace(x)
    memory = torch.empty(size + x.numel() * 4, dtype=torch.uint8, device="cuda")
    inside = memory[: x.numel() * 4].view(torch.float32).view(x.shape)
    with pytest.raises(m.InvalidArgument, match="dx and the workspace in memory apart"):
        m.backward(x, x.clone(), w, dx=inside, dweight=w.clone(), workspace=memory)
    with pytest.raises(m.InvalidArgument, match="the workspace and dy in memory apart"):
        m.backward(inside, x, w, dx=dx, dweight=w.clone(), workspace=memory)


def test_steps_of_many_tensors_find_the_two_that_share_memory(module: Module) -> None:
    m = module("optim")
    params, grads, memory = ([dense(100) for _ in range(50)] for _ in range(3))
    options = {"kind": "sgd", "lr": 0.1, "momentum": 0.9}
    m.step(params, grads, memory, (), **options)
    m.step(params, grads[:1] * 50, memory, (), **options)  # gradients may be the same
    for wrong in (params[49], params[3], grads[7], memory[11]):
        with pytest.raises(m.InvalidArgument, match="in memory apart from each other"):
            m.step(params, grads, [*memory[:20], wrong, *memory[21:]], (), **options)
