"""Networks over images on a GPU: all operators by the plugin's kernels, results the original's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
rm = pytest.importorskip("rm_abstract")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("RM_WHEN_SLOWER", "compiled")  # what is tested is the program
    yield rm.init("gpu:0", fallback="error")
    rm.shutdown()


class Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, inner, 1, bias=False)
        self.two = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.three = nn.Conv2d(inner, out, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (inner, inner, out, out))
        self.side = nn.Conv2d(channels, out, 1, stride, bias=False)
        for norm in self.norms:
            nn.init.normal_(norm.running_mean, 0, 0.1)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)

    def forward(self, x: Any) -> Any:
        y = F.relu(self.norms[0](self.one(x)))
        y = F.relu(self.norms[1](self.two(y)))
        return F.relu(self.norms[2](self.three(y)) + self.norms[3](self.side(x)))


class Residual(nn.Module):
    """The parts of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3)
        self.blocks = nn.Sequential(Bottleneck(64, 64, 128, 1), Bottleneck(128, 64, 256, 2))
        self.head = nn.Linear(256, 10)

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class ResBlock(nn.Module):
    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, out)
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.side = nn.Conv2d(channels, out, 1)

    def forward(self, x: Any, t: Any) -> Any:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.side(x)


class Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(8, channels), nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Any) -> Any:
        n, c, h, w = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(y).view(n, h * w, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, h * w, c)
        return x + self.out(y).transpose(1, 2).reshape(n, c, h, w)


class Diffusion(nn.Module):
    """The parts of a diffusion UNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 64, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128))
        self.down1, self.down2 = ResBlock(64, 64, 128), ResBlock(64, 128, 128)
        self.shrink = nn.Conv2d(64, 64, 3, 2, 1)
        self.middle = Attention(128)
        self.grow = nn.Conv2d(128, 128, 3, padding=1)
        self.up = ResBlock(192, 64, 128)
        self.norm, self.last = nn.GroupNorm(8, 64), nn.Conv2d(64, 4, 3, padding=1)

    def forward(self, x: Any, step: Any) -> Any:
        angle = step[:, None] * torch.exp(torch.arange(32, device=x.device) * -0.3)
        t = self.time(torch.cat([angle.sin(), angle.cos()], 1).to(x.dtype))
        a = self.down1(self.first(x), t)
        b = self.middle(self.down2(self.shrink(a), t))
        b = self.grow(F.interpolate(b, scale_factor=2.0, mode="nearest"))
        y = self.up(torch.cat([b, a], 1), t)
        return self.last(F.silu(self.norm(y)))


MODELS: dict[str, Any] = {
    "residual": (Residual, lambda n: (torch.randn(n, 3, 64, 96),)),
    "diffusion": (Diffusion, lambda n: (torch.randn(n, 4, 16, 24), torch.arange(n).float() + 3)),
}
# Of float32 with tf32: products of 11 bits, twice.
TOLERANCES = {torch.float32: 5e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def served(name: str, dtype: Any, where: str) -> None:
    torch.manual_seed(0)
    build, inputs_of = MODELS[name]
    model = rm.accelerate(build().eval().to(where, dtype))

    def check(n: int) -> None:
        inputs = [t.to(where) for t in inputs_of(n)]
        inputs[0] = inputs[0].to(dtype)
        with torch.no_grad():
            with rm.disabled():
                expected = model(*inputs)
            for _ in range(4):  # recorded from the third on
                output = model(*inputs)
        assert output.dtype == dtype and output.device == expected.device
        scale = float(expected.float().abs().max())
        error = float((output.float() - expected.float()).abs().max())
        assert error <= TOLERANCES[dtype] * scale

    for n in (2, 1):
        check(n)
    report = rm.explain(model)
    (record,) = [r for r in report.to_dict()["models"] if r["routed"]]
    names = {kernel for entry in record["entries"] for kernel in entry["kernels"]}
    assert all(kernel.startswith("cuda/") for kernel in names), names
    assert any("conv2d" in kernel for kernel in names), names
    assert report.native_share == 1.0
    with torch.no_grad():  # weights that kernels have packed
        for weight in model.parameters():
            weight.mul_(1.1)
    check(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_image_models_are_served_by_the_plugins_kernels(name: str, dtype: Any) -> None:
    served(name, dtype, "cuda")


@pytest.mark.parametrize("name", MODELS)
def test_image_models_on_the_host_are_served_by_the_gpu(name: str) -> None:
    """Inputs and outputs cross; the original computes float32 without tf32."""
    served(name, torch.float32, "cpu")


def test_tf32_is_used_where_torch_may_use_it_and_nowhere_else() -> None:
    torch.manual_seed(0)
    model = rm.accelerate(nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU()).eval().cuda())
    x = torch.randn(2, 64, 20, 20, device="cuda")
    exact = F.relu(F.conv2d(x.double(), model[0].weight.double(), model[0].bias.double())).float()
    errors = {}
    before = torch.backends.cudnn.allow_tf32
    try:
        for allowed in (True, False, True):
            torch.backends.cudnn.allow_tf32 = allowed
            with torch.no_grad():
                for _ in range(3):
                    output = model(x)
            errors[allowed] = float((output - exact).abs().max() / exact.abs().max())
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert errors[False] < 1e-5 < errors[True] < 3e-3
    entries = [e for m in rm.explain().to_dict()["models"] for e in m["entries"]]
    assert any("conv2d" in kernel for entry in entries for kernel in entry["kernels"])


def test_bench_measures_every_kind_of_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small stand-ins for the models; the session is the benchmark's own."""
    from rm_abstract.bench import gpu

    rm.shutdown()
    case = gpu.Case("small", lambda n: (Residual(), (torch.randn(n, 3, 64, 64),)), 2, "bfloat16")
    measured = gpu.run_model(case, False, 5, 0.01)
    assert measured["native_share"] == 1.0 and measured["error"] < 5e-2
    assert measured["candidates"]["rm_abstract"]["median"] > 0
    monkeypatch.setitem(gpu._SHAPES, "small", (2, 64, 128, 4, 2, 1000, 16))
    monkeypatch.setitem(gpu.DECODERS, "small", ("small", "auto", 2, 12))
    decoded = gpu.run_decode("small", False, 5)
    assert decoded["candidates"]["rm_abstract"]["median"] > 0 and 0 < decoded["share"] < 1
    calls = gpu.run_dispatch(5, 0.01)
    assert calls["us"]["routed, 1 step"]["median"] > 0
    assert calls["steps"]["routed, many steps"] > 10
    for result in (measured, decoded):
        assert "rm_abstract" in gpu.markdown(result)
