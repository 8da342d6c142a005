"""conv2d and its gradients against float64: every kernel, layout, epilogue, stride, group."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from problems import ACTIVATIONS, DTYPES, assert_close, from_numpy, to_numpy, tolerance

pytestmark = pytest.mark.cuda
F = torch.nn.functional
KERNELS = (
    "",
    "conv2d_warpgroup_sm90a",
    "conv2d_gemm_sm80",
    "conv2d_tiles_any",
    "conv2d_depthwise_any",
    "conv2d_naive_any",
)
BACKWARD_KERNELS = (
    "",
    "conv2d_warpgroup_sm90a",
    "conv2d_gemm_sm80",
    "conv2d_tiles_any",
    "conv2d_depthwise_any",
    "conv2d_naive_any",
)
HOSTILE: tuple[dict[str, Any], ...] = (
    {"n": 1, "c": 1, "o": 1, "image": (1, 1), "taps": (1, 1)},
    {"n": 2, "c": 8, "o": 8, "image": (3, 2), "taps": (5, 4), "padding": (2, 2)},
    {"n": 0, "c": 8, "o": 8, "image": (5, 5), "taps": (3, 3)},
    {"n": 2, "c": 40, "o": 40, "groups": 40, "image": (9, 7), "taps": (3, 3), "padding": (1, 1)},
    {"n": 1, "c": 16, "o": 200, "image": (1, 300), "taps": (1, 7), "stride": (1, 3)},
    {"n": 3, "c": 7, "o": 5, "image": (12, 11), "taps": (2, 3), "dilation": (4, 3)},
    {"n": 1, "c": 520, "o": 72, "image": (7, 7), "taps": (3, 3), "padding": (1, 1)},
    {"n": 2, "c": 24, "o": 48, "groups": 3, "image": (8, 8), "taps": (3, 3), "stride": (3, 2)},
    {"n": 1, "c": 6, "o": 12, "groups": 6, "image": (10, 10), "taps": (3, 3), "padding": (2, 2)},
    {"n": 2, "c": 128, "o": 136, "image": (9, 8), "taps": (3, 3), "padding": (1, 1)},
    {"n": 2, "c": 192, "o": 48, "groups": 3, "image": (8, 9), "taps": (2, 3), "padding": (0, 1)},
    {"n": 2, "c": 64, "o": 72, "image": (13, 12), "taps": (3, 3), "stride": (2, 2)},
    {"n": 2, "c": 3, "o": 64, "image": (21, 19), "taps": (7, 7), "stride": (2, 2)},
)


class Problem:
    """A random or hostile problem; values such that results have magnitude 1."""

    def __init__(self, rng: np.random.Generator, t: torch.dtype, k: int) -> None:
        chosen = HOSTILE[k // 8] if k % 8 == 0 and k // 8 < len(HOSTILE) else {}
        groups = 1 if chosen else int(rng.choice([1, 1, 1, 2, 4]))
        wide = [1, 3, 8, 8, 16, 24, 64]
        self.n = chosen.get("n", int(rng.integers(1, 4)))
        self.groups = chosen.get("groups", groups)
        self.c = chosen.get("c", groups * int(rng.choice(wide)))
        self.o = chosen.get("o", groups * int(rng.choice([*wide, 130])))
        self.taps = chosen.get("taps", tuple(int(v) for v in rng.integers(1, 5, 2)))
        self.stride = chosen.get("stride", tuple(int(v) for v in rng.integers(1, 4, 2)))
        dilation = (1, 1) if chosen else tuple(int(v) for v in rng.integers(1, 3, 2))
        self.dilation = chosen.get("dilation", dilation)
        self.padding = chosen.get("padding", tuple(int(v) for v in rng.integers(0, 3, 2)))
        reach = [d * (s - 1) + 1 - 2 * p for d, s, p in
                 zip(self.dilation, self.taps, self.padding, strict=True)]  # fmt: skip
        image = tuple(max(1, r) + int(rng.integers(0, 14)) for r in reach)
        self.image = chosen.get("image", image)
        self.depth = self.c // self.groups * self.taps[0] * self.taps[1]
        self.layouts = [torch.contiguous_format, torch.channels_last]
        self.last = bool(rng.integers(0, 2))
        self.x = self.lay(torch.randn(self.n, self.c, *self.image, device="cuda").to(t), rng)
        w = torch.randn(self.o, self.c // self.groups, *self.taps, device="cuda")
        self.w = self.lay((w / max(1, self.depth) ** 0.5).to(t), rng)
        self.activation, self.function = ACTIVATIONS[k % len(ACTIVATIONS)]
        self.bias = torch.randn(self.o, device="cuda").to(t) if k % 3 else None

    def lay(self, t: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        """Mostly the problem's layout, sometimes the other, sometimes with gaps."""
        last = self.last if rng.random() < 0.8 else not self.last
        if rng.random() < 0.2:
            big = torch.zeros(*t.shape[:2], t.shape[2] + 1, t.shape[3] + 3, device="cuda")
            big = big.to(t.dtype).contiguous(memory_format=self.layouts[last])
            big[:, :, 1:, 2:-1] = t
            return big[:, :, 1:, 2:-1]
        return t.contiguous(memory_format=self.layouts[last])

    def settings(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation,
                "groups": self.groups}  # fmt: skip

    def before(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """What the activation gets, in float64."""
        b = None if self.bias is None else self.bias.double()
        s = self.settings()
        if self.n == 0:
            shape = [
                (i + 2 * p - d * (t - 1) - 1) // st + 1
                for i, p, d, t, st in zip(self.image, self.padding, self.dilation, self.taps,
                                          self.stride, strict=True)
            ]  # fmt: skip
            return x.new_zeros(0, self.o, *shape) * (x.sum() + w.sum())
        return F.conv2d(x, w, b, s["stride"], s["padding"], s["dilation"], s["groups"])

    def __str__(self) -> str:
        return (f"x {tuple(self.x.shape)} {self.x.stride()}, w {tuple(self.w.shape)} "
                f"{self.w.stride()}, {self.settings()}, {self.activation}")  # fmt: skip


def space(size: int) -> torch.Tensor:
    return torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")  # NaNs, if read


def bound_of(dtype: str, depth: int, roundings: int) -> float:
    if dtype == "tf32":
        return tolerance("float32", depth, roundings) + 2.0**-9
    return tolerance(dtype, depth, roundings) + 2.0**-18


@pytest.mark.parametrize("dtype", [*DTYPES, "tf32"])
def test_every_kernel_equals_float64(
    module: Callable[[str], ModuleType], dtype: str, seed: int
) -> None:
    m, rng = module("conv2d"), np.random.default_rng(seed)
    torch.manual_seed(seed)
    t, tf32, ran = DTYPES.get(dtype, torch.float32), dtype == "tf32", dict.fromkeys(KERNELS, 0)
    for k in range(120):
        p = Problem(rng, t, k)
        wanted = p.before(p.x.double(), p.w.double())
        y = torch.empty(wanted.shape, device="cuda", dtype=t)
        y = y.contiguous(memory_format=p.layouts[p.last])
        residual = torch.randn_like(y) if k % 5 < 2 else None
        out = p.function(wanted)
        out = out if residual is None else out + residual.double()
        for kernel in KERNELS:
            y.fill_(float("nan"))
            aux = torch.full_like(y, float("nan")) if k % 7 < 3 else None
            options = p.settings() | {"tf32": tf32, "kernel": kernel}
            try:
                room = space(m.workspace(p.x, p.w, y=y, **options))
                m.forward(p.x, p.w, p.bias, residual, y=y, aux=aux, activation=p.activation,
                          slope=0.1, workspace=room, **options)  # fmt: skip
            except m.Unsupported:
                assert kernel.endswith(("_sm80", "_sm90a", "depthwise_any", "tiles_any"))
                continue
            ran[kernel] += 1
            what = f"problem {k}, {kernel}, {p}, seed {seed}"
            assert_close(y, out, bound_of(dtype, p.depth, 3), 5.0, what)
            if aux is not None:
                assert_close(aux, wanted, bound_of(dtype, p.depth, 3), 5.0, f"{what}, aux")
    for kernel, count in ran.items():
        tensor_cores = kernel.endswith(("_sm80", "_sm90a"))
        absent = dtype == "float32" if tensor_cores else "tiles" in kernel and "32" not in dtype
        least = 3 if "depthwise" in kernel else 1 if absent else 100
        assert count >= least, kernel


@pytest.mark.parametrize("dtype", [*DTYPES, "tf32"])
def test_gradients_equal_float64_autograd(
    module: Callable[[str], ModuleType], dtype: str, seed: int
) -> None:
    m, rng = module("conv2d"), np.random.default_rng(seed)
    torch.manual_seed(seed)
    t, tf32 = DTYPES.get(dtype, torch.float32), dtype == "tf32"
    ran = dict.fromkeys(BACKWARD_KERNELS, 0)
    for k in range(110):
        p = Problem(rng, t, k)
        x, w = p.x.double().requires_grad_(), p.w.double().requires_grad_()
        before = p.before(x, w)
        aux = before.detach().to(t).contiguous(memory_format=p.layouts[p.last])
        dy = torch.randn_like(aux)
        at = aux.double().requires_grad_()
        slope = torch.autograd.grad(p.function(at), at, dy.double())[0]
        # the slope times dy is rounded once before the products, here and there alike
        with_slope = p.activation != "none"
        dt = slope.to(t).double() if with_slope else dy.double()
        wanted = [*torch.autograd.grad(before, (x, w), dt), dt.sum((0, 2, 3))]
        places = max(1, dt.numel() // p.o)
        taps = p.taps[0] * p.taps[1] * p.o // p.groups
        # where its last bits differ the rounding may go the other way
        loose = 2 * tolerance("float32" if tf32 else dtype, 1) if with_slope else 0.0
        for kernel in BACKWARD_KERNELS:
            got = [torch.full_like(v, float("nan")) for v in (p.x, p.w)]
            got.append(torch.full((p.o,), float("nan"), device="cuda", dtype=t))
            options = p.settings() | {"activation": p.activation, "tf32": tf32, "kernel": kernel}
            try:
                size = m.backward_workspace(dy, p.x, p.w, **options)
                m.backward(dy, p.x, p.w, aux if with_slope else None, dx=got[0], dw=got[1],
                           dbias=got[2], slope=0.1, workspace=space(size), **options)  # fmt: skip
            except m.Unsupported:
                tensor_cores = kernel.endswith(("_sm80", "_sm90a")) and dtype == "float32"
                assert tensor_cores or kernel.endswith(("depthwise_any", "tiles_any"))
                continue
            ran[kernel] += 1
            for name, mine, right, depth in zip(
                ("dx", "dw", "dbias"), got, wanted, (taps, places, places), strict=True
            ):
                scale = float(right.abs().max()) + 1 if right.numel() else 1.0
                what = f"problem {k}, {name}, {kernel}, {p}, seed {seed}"
                assert_close(mine, right, bound_of(dtype, depth, 2) + loose, scale, what)
    for kernel, count in ran.items():
        tensor_cores = kernel.endswith(("_sm80", "_sm90a"))
        absent = dtype == "float32" if tensor_cores else "tiles" in kernel and "32" not in dtype
        assert count >= (1 if absent or "depthwise" in kernel else 100)


@pytest.mark.parametrize("dtype", DTYPES)
def test_depthwise_convolutions_in_vectors_equal_float64(
    module: Callable[[str], ModuleType], dtype: str, seed: int
) -> None:
    m, rng, t = module("conv2d"), np.random.default_rng(seed), DTYPES[dtype]
    torch.manual_seed(seed)
    for k in range(40):
        c = 8 * int(rng.choice([1, 2, 3, 5, 17, 32, 33, 70]))
        taps = [(3, 3), (1, 1), (5, 5), (7, 7), (2, 4), (3, 1)][k % 6]
        stride, dilation = (1 + int(rng.integers(0, 4)) // 3 for _ in "sd")
        padding = int(rng.integers(0, 3))
        image = [int(rng.integers(1, 20)) + dilation * (s - 1) + 1 for s in taps]
        x = torch.randn(int(rng.integers(1, 5)), c, *image, device="cuda").to(t)
        w = (torch.randn(c, 1, *taps, device="cuda") / (taps[0] * taps[1]) ** 0.5).to(t)
        x, bias = x.to(memory_format=torch.channels_last), torch.randn(c, device="cuda").to(t)
        options = {"stride": (stride, stride), "padding": (padding, padding),
                   "dilation": (dilation, dilation), "groups": c}  # fmt: skip
        wide = [v.double().requires_grad_() for v in (x, w)]
        wanted = F.conv2d(*wide, bias.double(), stride, padding, dilation, c)
        y = torch.full_like(wanted, float("nan"), dtype=t).to(memory_format=torch.channels_last)
        m.forward(x, w, bias, y=y, kernel="conv2d_depthwise_any", **options)
        what = f"problem {k}, {tuple(x.shape)}, {tuple(w.shape)}, {options}, seed {seed}"
        assert_close(y, wanted.detach(), bound_of(dtype, taps[0] * taps[1], 2), 5.0, what)
        dy = torch.randn_like(y)
        grads = torch.autograd.grad(wanted, wide, dy.double())
        got = [torch.full_like(v, float("nan")) for v in (x, w)]
        options["kernel"] = "conv2d_depthwise_any"
        room = space(m.backward_workspace(dy, x, w, **options))
        m.backward(dy, x, w, dx=got[0], dw=got[1], workspace=room, **options)
        places = dy.numel() // c
        for mine, right, depth in zip(got, grads, (taps[0] * taps[1], places), strict=True):
            scale = float(right.abs().max()) + 1
            assert_close(mine, right, bound_of(dtype, depth, 2), scale, what)


@pytest.mark.parametrize(
    "kernel", ["conv2d_warpgroup_sm90a", "conv2d_gemm_sm80", "conv2d_naive_any"]
)
def test_special_values_stay_where_torch_has_them(
    module: Callable[[str], ModuleType], kernel: str
) -> None:
    m = module("conv2d")
    torch.manual_seed(3)
    x, w = torch.randn(1, 8, 9, 9).bfloat16(), torch.randn(8, 8, 3, 3).bfloat16()
    x[0, 2, 4, 4], x[0, 1, 0, 8] = float("nan"), float("inf")
    y = from_numpy(m.forward_numpy(*map(to_numpy, (x, w)), padding=(1, 1), kernel=kernel))
    assert_close(y, F.conv2d(x.double(), w.double(), padding=1), 2.0**-7, 10.0, kernel)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numpy_forms_give_what_the_dlpack_forms_give(
    module: Callable[[str], ModuleType], dtype: str, layout: str
) -> None:
    m, t = module("conv2d"), DTYPES[dtype]
    torch.manual_seed(4)
    x, w = torch.randn(2, 16, 9, 8).to(t), torch.randn(24, 8, 3, 3).to(t)
    bias, options = torch.randn(24).to(t), {"padding": (1, 1), "groups": 2, "activation": "silu"}
    order = (0, 2, 3, 1) if layout == "nhwc" else (0, 1, 2, 3)
    back = (0, 3, 1, 2) if layout == "nhwc" else (0, 1, 2, 3)

    def host(v: torch.Tensor) -> np.ndarray:
        return to_numpy(v.permute(order))

    got, got_aux = m.forward_numpy(host(x), host(w), to_numpy(bias), return_aux=True, layout=layout,
                                   **options)  # fmt: skip
    y, aux = from_numpy(got).permute(back), from_numpy(got_aux).permute(back)
    wanted = F.conv2d(x.double(), w.double(), bias.double(), padding=1, groups=2)
    assert_close(aux, wanted, tolerance(dtype, 72, 3), 20.0, "aux")
    assert_close(y, F.silu(wanted), tolerance(dtype, 72, 3), 20.0, "y")
    dx, dw, dbias = m.backward_numpy(host(y), host(x), host(w), got_aux, has_bias=True,
                                     layout=layout, **options)  # fmt: skip
    on = [v.cuda().contiguous() for v in (y, x, w, aux)]
    out = torch.empty_like(on[1]), torch.empty_like(on[2]), torch.empty(24, device="cuda", dtype=t)
    m.backward(*on, dx=out[0], dw=out[1], dbias=out[2],
               workspace=space(m.backward_workspace(*on[:3], **options)), **options)  # fmt: skip
    for mine, right in zip((from_numpy(dx).permute(back), from_numpy(dw).permute(back),
                            from_numpy(dbias)), out, strict=True):  # fmt: skip
        bound = tolerance(dtype, 500, 3)
        assert_close(mine, right.cpu(), bound, float(right.abs().max()) + 1, layout)


def test_a_call_runs_in_a_graph_and_gives_the_same_bits(
    module: Callable[[str], ModuleType],
) -> None:
    m = module("conv2d")
    x = torch.randn(1, 256, 14, 14, device="cuda").bfloat16()
    w = torch.randn(256, 256, 3, 3, device="cuda").bfloat16()
    y, options = torch.empty_like(x), {"padding": (1, 1)}
    room = space(m.workspace(x, w, y=y, **options))
    m.forward(x, w, y=y, workspace=room, **options)
    first = y.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        m.forward(x, w, y=y, workspace=room, stream=torch.cuda.current_stream().cuda_stream,
                  **options)  # fmt: skip
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(first, y)


def test_dbias_of_an_image_without_channels_is_the_sum_of_dy(
    module: Callable[[str], ModuleType],
) -> None:
    m = module("conv2d")
    x, w = torch.empty(2, 0, 5, 5, device="cuda"), torch.empty(4, 0, 3, 3, device="cuda")
    dy, dbias = torch.randn(2, 4, 3, 3, device="cuda"), torch.full((4,), 7.0, device="cuda")
    room = space(m.backward_workspace(dy, x, w))
    m.backward(dy, x, w, dbias=dbias, workspace=room)
    assert torch.allclose(dbias, dy.sum((0, 2, 3)), atol=1e-5)


def test_what_is_not_legal_is_named(module: Callable[[str], ModuleType]) -> None:
    m = module("conv2d")
    x, w = np.ones((1, 4, 5, 5), "float32"), np.ones((2, 4, 3, 3), "float32")
    with pytest.raises(m.InvalidArgument, match=r"w \[O, C / groups, KH, KW\]"):
        m.forward_numpy(x, np.ones((2, 3, 3, 3), "float32"))
    with pytest.raises(m.InvalidArgument, match="at most the padded image"):
        m.forward_numpy(x, np.ones((2, 4, 7, 3), "float32"))
    with pytest.raises(m.InvalidArgument, match=r"bias dense \[2\]"):
        m.forward_numpy(x, w, np.ones(3, "float32"))
    with pytest.raises(m.InvalidArgument, match="stride, dilation >= 1"):
        m.forward_numpy(x, w, stride=(0, 1))
    with pytest.raises(m.InvalidArgument, match="nchw, nhwc"):
        m.forward_numpy(x, w, layout="chwn")
    with pytest.raises(m.Unsupported, match="without tf32"):
        m.forward_numpy(x, w, kernel="conv2d_gemm_sm80")
    assert m.forward_numpy(x[:0], w).shape == (0, 2, 3, 3)
    dx, dw, dbias = m.backward_numpy(np.ones((0, 2, 3, 3), "float32"), x[:0], w, has_bias=True)
    assert dx.shape == (0, 4, 5, 5) and not dw.any() and dbias.tolist() == [0.0, 0.0]
