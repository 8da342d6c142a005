"""Defects that were found in the modules by reading them and by random problems, one test each."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import product
from types import ModuleType

import pytest
import torch
from arena import Arena
from problems import assert_close, tolerance

pytestmark = pytest.mark.cuda
Module = Callable[[str], ModuleType]
F = torch.nn.functional


def room(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def hopper(m: ModuleType, prefix: str) -> list[str]:
    """Rows of the table that need Hopper's own instructions; elsewhere the test is skipped."""
    names = [name for name, _ in m.kernels() if name.startswith(prefix)]
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's")
    return names


@pytest.mark.parametrize("columns, pitch", [(3, 8), (6, 8), (12, 24), (127, 192), (333, 336)])
def test_wgmma_products_write_nothing_between_the_rows_of_a_pitched_result(
    module: Module, columns: int, pitch: int, seed: int
) -> None:
    m, arena = module("gemm"), Arena(8 << 20)
    torch.manual_seed(seed)
    for kernel in hopper(m, "gemm_wgmma"):
        arena.clear()
        a = arena.put(torch.randn(333, 64, device="cuda"), torch.bfloat16)
        b = arena.put(torch.randn(columns, 64, device="cuda"), torch.bfloat16)
        c = arena.result(arena.view((333, columns), torch.bfloat16, pitch=pitch))
        arena.freeze()
        try:
            m.forward(a, b, c=c, trans_b=True, kernel=kernel)
        except m.Unsupported:
            pytest.skip("this build has no wgmma")
        assert arena.changed() == [], f"{kernel} wrote outside c, seed {seed}"
        bound = tolerance("bfloat16", 64, 2)
        assert_close(c, a.double() @ b.double().T, bound, 8.0, f"{kernel}, seed {seed}")


def test_pair_products_write_nothing_between_the_rows_of_pitched_gradients(
    module: Module, seed: int
) -> None:
    m, arena = module("gemm"), Arena(64 << 20)
    torch.manual_seed(seed)
    for kernel, _ in m.backward_kernels():
        arena.clear()
        dc = arena.put(torch.randn(100, 128, device="cuda"), torch.float16, pitch=192)
        a = arena.put(torch.randn(100, 6, device="cuda"), torch.float16, pitch=8)
        b = arena.put(torch.randn(6, 128, device="cuda"), torch.float16, pitch=192)
        da = arena.result(arena.view((100, 6), torch.float16, pitch=8))
        db = arena.result(arena.view((6, 128), torch.float16, pitch=192))
        space = arena.workspace(m.backward_workspace(dc, a, b))
        arena.freeze()
        try:
            m.backward(dc, a, b, da=da, db=db, workspace=space, kernel=kernel)
        except m.Unsupported:
            continue
        assert arena.changed() == [], f"{kernel}, seed {seed}"
        bound = tolerance("float16", 128, 2)
        assert_close(da, dc.double() @ b.double().T, bound, 12.0, f"{kernel} da, seed {seed}")
        assert_close(db, a.double().T @ dc.double(), bound, 12.0, f"{kernel} db, seed {seed}")


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_of_norms_stay_in_the_workspace_they_asked_for(
    module: Module, name: str, dtype: torch.dtype, seed: int
) -> None:
    """dx of another pitch than x, dy and h of pitches of their own."""
    m, arena = module(name), Arena(192 << 20)
    torch.manual_seed(seed)
    cases = (
        ((5, 8192), 8192, 8256), ((5, 8192), 8256, 8192), ((160, 7, 128), 144, 128),
        ((160, 7, 128), 128, 144), ((3000, 768), 768, 776), ((300, 4096), 4104, 4096),
    )  # fmt: skip
    for (shape, h_pitch, dx_pitch), (kernel, _) in product(cases, m.backward_kernels()):
        arena.clear()
        h = arena.put(torch.randn(shape, device="cuda"), dtype, pitch=h_pitch)
        dy = arena.put(torch.randn(shape, device="cuda"), dtype)
        w = arena.put(torch.randn(shape[-1], device="cuda"), dtype)
        dx = arena.result(arena.view(shape, dtype, pitch=dx_pitch))
        dw = arena.result(arena.view(shape[-1:], dtype))
        db = arena.result(arena.view(shape[-1:], dtype)) if name == "layernorm" else None
        space = arena.workspace(m.backward_workspace(h))
        arena.freeze()
        what = f"{kernel} {shape}, pitches {h_pitch} and {dx_pitch}, seed {seed}"
        try:
            m.backward(dy, h, w, dx=dx, dweight=dw, dbias=db, workspace=space, kernel=kernel)
        except m.Unsupported:
            continue
        tensors = {"h": h, "dy": dy, "w": w, "dx": dx, "dw": dw, "space": space}
        assert [arena.where(at, tensors) for at in arena.changed()] == [], what
        leaves = [t.double().requires_grad_() for t in (h, w)]
        if name == "layernorm":
            y = F.layer_norm(leaves[0], shape[-1:], leaves[1], None, 1e-5)
        else:
            y = leaves[0] * torch.rsqrt(leaves[0].square().mean(-1, True) + 1e-5) * leaves[1]
        wanted = torch.autograd.grad(y, leaves, dy.double())
        kind, rows = str(dtype)[6:], dy.numel() // shape[-1]
        assert_close(dx, wanted[0], 4 * tolerance(kind, shape[-1]), 4.0, what)
        assert_close(dw, wanted[1], tolerance(kind, rows), 4 * rows**0.5, what + ", dweight")


@pytest.mark.parametrize("offset", [16, 64, 128])
def test_gradients_of_norms_drop_no_cache_line_in_front_of_a_workspace(
    module: Module, offset: int
) -> None:
    """Their last pass drops the workspace's lines from the L2 cache: lines of 128 bytes."""
    m, arena = module("layernorm"), Arena(4 << 20)
    h = arena.put(torch.randn(5, 8192, device="cuda"), torch.bfloat16)
    dy, w = (arena.put(v, torch.bfloat16) for v in (h * 2, h[0]))
    dx = arena.result(arena.view((5, 8192), torch.bfloat16, pitch=8256))
    dw = arena.result(arena.view((8192,), torch.bfloat16))
    space = arena.workspace(m.backward_workspace(h), offset)
    for kernel, _ in m.backward_kernels():
        arena.poison()
        arena.freeze()
        with pytest.raises(m.InvalidArgument, match="address is a multiple of 256"):
            m.backward(dy, h, w, dx=dx, dweight=dw, workspace=space, kernel=kernel)
        torch.cuda.synchronize()
        assert arena.changed() == [], kernel


def test_a_tuned_choice_is_not_used_for_a_residual_in_place(module: Module, seed: int) -> None:
    """The row that is fastest with a residual elsewhere may write the product over one in place."""
    m = module("gemm")
    torch.manual_seed(seed)
    a, b = torch.randn(2, 256, 256, device="cuda").bfloat16()
    start, c, space = (
        torch.randn(256, 256, device="cuda").bfloat16(),
        torch.empty_like(a),
        room(32 << 20),
    )
    for activation in ("silu", "gelu", "tanh", "none"):
        function = {"silu": F.silu, "gelu": F.gelu, "tanh": torch.tanh}.get(activation, lambda x: x)
        expected = function(a.double() @ b.double()) + start.double()
        m.forward(a, b, None, start, c=c, activation=activation, workspace=space, tune=True)
        in_place = start.clone()
        m.forward(
            a, b, None, in_place, c=in_place, activation=activation, workspace=space, tune=True
        )
        what = f"{activation}, seed {seed}"
        assert_close(c, expected, tolerance("bfloat16", 256, 3), 16.0, what)
        assert_close(in_place, expected, tolerance("bfloat16", 256, 3), 16.0, what + " in place")


@pytest.mark.parametrize("m_n_k", [(256, 256, 256), (64, 512, 320)])
def test_a_tuned_choice_is_not_used_at_other_addresses(
    module: Module, m_n_k: tuple[int, int, int], seed: int
) -> None:
    m, (rows, columns, depth) = module("gemm"), m_n_k
    torch.manual_seed(seed)
    space, wide = room(32 << 20), torch.randn(rows * depth + 8, device="cuda").bfloat16()
    b = torch.randn(depth, columns, device="cuda").bfloat16()
    c = torch.empty(rows, columns, device="cuda").bfloat16()
    for shift in (0, 1, 4):  # the first, aligned one is what is tuned and remembered
        a = wide[shift : shift + rows * depth].view(rows, depth)
        m.forward(a, b, c=c, workspace=space, tune=shift == 0)
        bound = tolerance("bfloat16", depth, 2)
        assert_close(c, a.double() @ b.double(), bound, depth**0.5, f"shift {shift}, seed {seed}")


@pytest.mark.parametrize("tune", [False, True])
def test_what_cublaslt_refuses_another_row_runs(module: Module, tune: bool, seed: int) -> None:
    m = module("gemm")
    torch.manual_seed(seed)
    space = room(32 << 20)
    for shift in range(1, 8):  # a bias on 2 bytes
        a, b = torch.randn(64, 64, device="cuda").half(), torch.randn(64, 64, device="cuda").half()
        bias = torch.randn(72, device="cuda").half()[shift : shift + 64]
        c = torch.empty(64, 64, device="cuda").half()
        m.forward(a, b, bias, c=c, activation="relu", workspace=space, tune=tune)
        expected = torch.relu(a.double() @ b.double() + bias.double())
        assert_close(c, expected, tolerance("float16", 64, 2), 8.0, f"shift {shift}, seed {seed}")
    for lead, rows, columns, depth in (
        (3, 17, 33, 9),
        (5, 7, 3, 129),
        (2, 1, 1, 65),
        (4, 31, 65, 3),
    ):
        a = torch.randn(lead, rows, depth, device="cuda").half()
        b = torch.randn(lead, depth, columns, device="cuda").half()
        c = torch.empty(lead, rows, columns, device="cuda").half()
        m.forward(a, b, c=c, workspace=space, tune=tune)
        what = f"{lead} x {rows} x {columns} x {depth}, seed {seed}"
        assert_close(c, a.double() @ b.double(), tolerance("float16", depth, 2), 8.0, what)


def test_a_small_workspace_leaves_a_product_its_other_rows(module: Module, seed: int) -> None:
    m = module("gemm")
    torch.manual_seed(seed)
    a, b = torch.randn(2, 1024, 1024, device="cuda").bfloat16()
    c = torch.empty_like(a)
    for size in (0, 256, 65536):
        m.forward(a, b, c=c, workspace=room(size) if size else None)
        bound = tolerance("bfloat16", 1024, 2)
        assert_close(c, a.double() @ b.double(), bound, 32.0, f"{size} bytes, seed {seed}")


def test_one_b_with_leading_axes_of_one_has_gradients(module: Module, seed: int) -> None:
    m = module("gemm")
    torch.manual_seed(seed)
    a, b = torch.randn(3, 16, 24, device="cuda"), torch.randn(1, 24, 40, device="cuda")
    dc, c = torch.randn(3, 16, 40, device="cuda"), torch.empty(3, 16, 40, device="cuda")
    m.forward(a, b, c=c)
    da, db = torch.empty_like(a), torch.empty_like(b)
    m.backward(dc, a, b, da=da, db=db, workspace=room(m.backward_workspace(dc, a, b)))
    assert_close(c, a.double() @ b.double(), 1e-5, 8.0, f"c, seed {seed}")
    assert_close(da, dc.double() @ b.double().mT, 1e-5, 8.0, f"da, seed {seed}")
    wanted = (a.double().mT @ dc.double()).sum(0, keepdim=True)
    assert_close(db, wanted, 1e-5, 16.0, f"db, seed {seed}")


def test_gradients_of_five_million_rows(module: Module, seed: int) -> None:
    """More shares of rows than a grid's second axis holds."""
    m, rows = module("gemm"), 5_000_000
    torch.manual_seed(seed)
    dc, aux = (torch.randn(rows, 8, device="cuda").half() for _ in range(2))
    a, b = torch.randn(rows, 8, device="cuda").half(), torch.randn(8, 8, device="cuda").half()
    da, dbias = torch.empty_like(a), torch.empty(8, device="cuda").half()
    space = room(m.backward_workspace(dc, a, b, has_bias=True, activation="relu"))
    m.backward(dc, a, b, aux, da=da, dbias=dbias, activation="relu", workspace=space)
    dt = dc.double() * (aux > 0)
    assert_close(da, dt @ b.double().T, tolerance("float16", 8, 3), 8.0, f"da, seed {seed}")
    scale = 4 * rows**0.5
    assert_close(dbias, dt.sum(0), tolerance("float16", rows), scale, f"dbias, seed {seed}")


@pytest.mark.parametrize("kind", ["row", "scalar"])
def test_bias_gradients_of_many_batches(module: Module, kind: str, seed: int) -> None:
    m = module("gemm")
    torch.manual_seed(seed)
    dc, a = torch.randn(300, 12, 40, device="cuda"), torch.randn(300, 12, 16, device="cuda")
    b = torch.randn(300, 16, 40, device="cuda")
    dbias = torch.empty(12 if kind == "row" else 1, device="cuda")
    space = room(m.backward_workspace(dc, a, b, has_bias=True, bias_kind=kind))
    m.backward(dc, a, b, dbias=dbias, bias_kind=kind, workspace=space)
    wanted = dc.double().sum((0, 2)) if kind == "row" else dc.double().sum().reshape(1)
    assert_close(dbias, wanted, 1e-5, 500.0, f"{kind}, seed {seed}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [640, 8192, 50_257])
def test_cross_entropy_of_rows_with_minus_infinity_far_below_zero(
    module: Module, dtype: torch.dtype, columns: int, seed: int
) -> None:
    m = module("cross_entropy")
    torch.manual_seed(seed)
    x = torch.randn(6, columns, device="cuda") - 150
    x[0, ::2] = -float("inf")  # every thread has some
    x[1, : columns // 2] = -float("inf")  # whole chunks
    x[2, 8:] = -float("inf")
    x[3, :] = -float("inf")
    x[3, columns - 1] = -120.0
    x[4] += 300
    x = x.to(dtype)
    target = torch.tensor([1, columns - 1, 3, columns - 1, 5, 7], device="cuda")
    for kernel in ("", *(name for name, _ in m.kernels())):
        loss, lse = torch.empty(2, 6, device="cuda")
        try:
            m.forward(x, target, loss=loss, lse=lse, workspace=room(m.forward_workspace(x)),
                      kernel=kernel)  # fmt: skip
        except m.Unsupported:
            continue
        what = f"{kernel or 'chosen'}, {dtype}, seed {seed}"
        assert_close(lse, torch.logsumexp(x.double(), -1), 1e-5, 8.0, what)
        wanted = F.cross_entropy(x.double(), target, reduction="none")
        assert_close(loss, wanted, 1e-5, 8.0, what + ", loss")


def test_workspaces_at_odd_addresses_are_refused_and_the_context_lives(module: Module) -> None:
    x = torch.randn(40, 640, device="cuda").bfloat16()
    w, ids = x[0].clone(), torch.arange(40, device="cuda")
    f = torch.empty(2, 40, device="cuda")

    def odd(size: int) -> torch.Tensor:
        return room(size + 256)[4 : 4 + max(size, 64)]

    q = torch.randn(1, 2, 1, 64, device="cuda").bfloat16()
    k, g = torch.randn(1, 2, 300, 64, device="cuda").bfloat16(), module("gemm")
    image, taps = torch.randn(1, 3, 9, 9, device="cuda"), torch.randn(4, 3, 3, 3, device="cuda")
    y, s, n, r = (
        torch.empty(1, 4, 7, 7, device="cuda"),
        module("sdpa"),
        module("layernorm"),
        module("reduction"),
    )
    e, c, v = module("cross_entropy"), module("embedding"), module("conv2d")
    out = torch.empty(1, 640, device="cuda").bfloat16()
    calls: dict[str, Callable[[], None]] = {
        "layernorm": lambda: n.backward(x, x.clone(), w, dx=torch.empty_like(x), dweight=w.clone(),
                                        workspace=odd(n.backward_workspace(x))),
        "cross_entropy": lambda: e.forward(x, ids, loss=f[0], lse=f[1],
                                           workspace=odd(e.forward_workspace(x))),
        "gemm": lambda: g.forward(x, x, c=torch.empty(40, 40, device="cuda").bfloat16(),
                                  trans_b=True, workspace=odd(g.workspace())),
        "sdpa": lambda: s.forward(q, k, k.clone(), o=torch.empty_like(q), workspace=odd(1 << 20)),
        "embedding": lambda: c.backward(x, ids, dtable=torch.empty_like(x),
                                        workspace=odd(c.backward_workspace(ids))),
        "reduction": lambda: r.forward(x, "sum", y=out, workspace=odd(1 << 20)),
        "conv2d": lambda: v.forward(image, taps, y=y, workspace=odd(1 << 20)),
    }  # fmt: skip
    for name, call in calls.items():
        with pytest.raises(module(name).InvalidArgument, match="address is a multiple of 256"):
            call()
    torch.cuda.synchronize()


@pytest.mark.parametrize("last", [False, True])
def test_the_documented_workspace_is_enough_for_gradients_of_any_layout(
    module: Module, last: bool, seed: int
) -> None:
    m = module("conv2d")
    torch.manual_seed(seed)
    formats = (torch.contiguous_format, torch.channels_last)
    for dtype, (c, o, stride) in product(
        (torch.bfloat16, torch.float32), ((64, 96, 1), (16, 24, 2), (3, 8, 1))
    ):
        x = torch.randn(2, c, 14, 14, device="cuda").to(dtype)
        x = x.contiguous(memory_format=formats[last])
        w = torch.randn(o, c, 3, 3, device="cuda").to(dtype).contiguous(memory_format=formats[last])
        size = 14 if stride == 1 else 7
        dy = torch.randn(2, o, size, size, device="cuda").to(dtype)
        dy = dy.contiguous(memory_format=formats[last])
        options = {"stride": (stride, stride), "padding": (1, 1)}
        space = room(m.backward_workspace(dy, x, w, **options))
        leaves = [t.double().requires_grad_() for t in (x, w)]
        y = F.conv2d(*leaves, None, (stride, stride), (1, 1))
        wanted = torch.autograd.grad(y, leaves, dy.double())
        for of_dx, of_dw in product(formats, formats):
            dx = torch.empty_like(x, memory_format=of_dx)
            dw = torch.empty_like(w, memory_format=of_dw)
            assert m.backward_workspace(dy, x, w, dx=dx, dw=dw, **options) <= space.numel()
            m.backward(dy, x, w, dx=dx, dw=dw, workspace=space, **options)
            what = f"{dtype} {c} {o} {stride} {of_dx} {of_dw}, seed {seed}"
            kind = str(dtype)[6:]
            assert_close(dx, wanted[0], tolerance(kind, 9 * o, 3), 8 * o**0.5, what)
            assert_close(dw, wanted[1], tolerance(kind, 400, 3), 100.0, what + ", dw")


def test_tables_of_rope_have_no_axis_more_than_x(module: Module) -> None:
    m = module("rope")
    x = torch.randn(2, 3, 5, 64, device="cuda")
    for shape in ((1, 1, 1, 5, 64), (1, 2, 3, 5, 64), (1, 1, 1, 1, 1, 64)):
        table = torch.ones(shape, device="cuda")
        with pytest.raises(m.InvalidArgument, match="broadcast to x's shape"):
            m.forward(x, table, table, y=torch.empty_like(x))


def test_ids_outside_the_table_raise_a_flag_on_the_device(module: Module) -> None:
    m = module("embedding")
    table, good = torch.randn(10, 24, device="cuda"), torch.tensor([1, 9, 0], device="cuda")
    flag, y = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.empty(3, 24, device="cuda")
    for bad in (10, -1):
        m.forward(table, good, y=y, out_of_range=flag)
        assert flag.item() == 0 and torch.equal(y, table[good])
        ids = torch.tensor([1, bad, 0], device="cuda")
        for kernel, _ in m.kernels():
            flag.zero_()
            m.forward(table, ids, y=y, out_of_range=flag, kernel=kernel)
            assert flag.item() == 1 and y[1].isnan().all() and not y[::2].isnan().any()
        flag.zero_()
        m.backward(y.nan_to_num(), ids, dtable=torch.empty_like(table), out_of_range=flag,
                   workspace=room(m.backward_workspace(ids)))  # fmt: skip
        assert flag.item() == 1
        flag.zero_()
        with pytest.raises(m.InvalidArgument, match=r"ids from 0 to 9, got one outside"):
            m.forward_numpy(table.cpu().numpy(), ids.cpu().numpy())
        with pytest.raises(m.InvalidArgument, match=r"ids from 0 to 9, got one outside"):
            m.backward_numpy(y.nan_to_num().cpu().numpy(), ids.cpu().numpy(), vocabulary=10)


def test_other_threads_run_while_a_product_is_tuned(module: Module) -> None:
    m = module("gemm")
    a, b = torch.randn(2, 1536, 1536, device="cuda").bfloat16()
    c, space, beats, stop = torch.empty_like(a), room(32 << 20), [0.0], threading.Event()

    def beat() -> None:
        while not stop.is_set():
            beats.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=beat)
    thread.start()
    start = time.perf_counter()
    m.forward(a, b, c=c, activation="gelu", workspace=space, tune=True)
    took = time.perf_counter() - start
    stop.set()
    thread.join()
    during = [t for t in beats if start < t < start + took]
    assert len(during) >= 0.2 * took / 0.001, f"{len(during)} beats in {took:.3f} s"


def in_a_process_of_its_own(path: str | None, code: str) -> str:
    """What `code` prints, with the module of softmax as m."""
    load = (
        "import importlib.util, numpy, torch\n"
        f"spec = importlib.util.spec_from_file_location('_ops_softmax', {path!r})\n"
        "m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)\n"
        "x, y = torch.randn(2, 4, 64, device='cuda'); torch.cuda.synchronize()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", load + code], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_an_error_of_an_earlier_call_is_not_reported_as_a_launchs(module: Module) -> None:
    """The earlier call fails since nothing may be allocated while a stream is captured."""
    out = in_a_process_of_its_own(
        module("softmax").__file__,
        "try:\n"
        "    with torch.cuda.graph(torch.cuda.CUDAGraph()):\n"
        "        m.forward_numpy(numpy.ones((2, 8), 'float32'))\n"
        "except RuntimeError as error: print('first:', type(error).__name__)\n"
        "for kernel, _ in m.kernels():\n"
        "    m.forward(x, y=y, kernel=kernel)\n"
        "    print(kernel, 'ran')\n",
    )
    assert "first:" in out and out.count(" ran") == 2, out


def test_a_fault_of_an_earlier_kernel_is_said_to_be_one(module: Module) -> None:
    out = in_a_process_of_its_own(
        module("softmax").__file__,
        "try:\n"
        "    x[torch.tensor([99], device='cuda')]; torch.cuda.synchronize()\n"
        "except RuntimeError: pass\n"
        "try: m.forward(x, y=y)\n"
        "except m.DeviceError as error: print(error)\n",
    )
    assert "a kernel that ran before this call failed" in out, out


def test_tf32_rounds_to_both_sides(module: Module, seed: int) -> None:
    """wgmma drops the bits that tf32 lacks. Sums of positive products showed it: all too small."""
    m = module("conv2d")
    torch.manual_seed(seed)
    x = torch.rand(2, 64, 16, 16, device="cuda").contiguous(memory_format=torch.channels_last)
    w = torch.rand(64, 64, 3, 3, device="cuda").contiguous(memory_format=torch.channels_last)
    exact = F.conv2d(x.double(), w.double(), padding=1)
    ran = 0
    for kernel in ("conv2d_warpgroup_sm90a", "conv2d_gemm_sm80"):
        y = torch.empty_like(x)
        options = {"padding": (1, 1), "tf32": True, "kernel": kernel}
        try:
            space = room(m.workspace(x, w, y=y, **options))
            m.forward(x, w, y=y, workspace=space, **options)
        except m.Unsupported:
            continue
        ran += 1
        mean = float(((y.double() - exact) / exact).mean())
        assert abs(mean) < 2.0**-15, f"{kernel} is off by {mean} on average, seed {seed}"
    assert ran > 0
