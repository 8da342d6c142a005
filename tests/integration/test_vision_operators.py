"""Convolutions, pools, norms and interpolation equal PyTorch's, run on our kernels alone, and leave
outputs laid out as eager lays them out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rm_abstract as rm
from rm_abstract import _core
from rm_abstract.capture import importer
from rm_abstract.capture.export import capture
from rm_abstract.capture.outputs import builder
from rm_abstract.verification import parity
from rm_abstract.worker.ir_to_torch import ir_to_torch

logging.getLogger("torch.__trace").disabled = True

Build = Callable[[], nn.Module]


class Apply(nn.Module):
    """A function of the input that follows a convolution, so that channels lie last."""

    def __init__(self, function: Callable[[torch.Tensor], Any], axes: int = 2) -> None:
        super().__init__()
        self.conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](4, 8, 3, padding=1)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.conv(x))


class Block(nn.Module):
    """Convolutions with batch norm, a residual and activations around them."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.two, self.norm2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, affine=False)
        self.activation = activation
        for norm in (self.norm, self.norm2):
            nn.init.uniform_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.norm(self.one(x)))
        return self.activation(self.norm2(self.two(y)) + x)


IMAGES = (torch.Size((2, 4, 12, 9)), torch.Size((3, 4, 12, 9)))
LINES = (torch.Size((2, 4, 12)), torch.Size((5, 4, 12)))
VOLUMES = (torch.Size((1, 4, 4, 6, 5)),)
MODULES: dict[str, tuple[Build, tuple[torch.Size, ...]]] = {
    "strides and groups": (lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), groups=2), IMAGES),
    "depthwise": (lambda: nn.Conv2d(4, 4, 5, padding=2, groups=4), IMAGES),
    "dilation": (lambda: nn.Conv2d(4, 4, 3, padding=2, dilation=2, bias=False), IMAGES),
    "same padding": (lambda: nn.Conv2d(4, 4, 4, padding="same", dilation=(1, 2)), IMAGES),
    "no batch": (lambda: nn.Conv2d(4, 4, 3), (torch.Size((4, 7, 8)),)),
    "one axis": (lambda: nn.Conv1d(4, 4, 3, padding=1, dilation=1), LINES),
    "three axes": (lambda: nn.Conv3d(4, 4, (1, 3, 3), padding=(0, 1, 1)), VOLUMES),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
        IMAGES,
    ),
    "transposed, one axis": (lambda: nn.ConvTranspose1d(4, 4, 4, stride=3), LINES),
    "relu block": (lambda: Block(nn.ReLU()), IMAGES),
    "silu block": (lambda: Block(nn.SiLU()), IMAGES),
    "hardswish block": (lambda: Block(nn.Hardswish()), IMAGES),
    "relu6 block": (lambda: Block(nn.ReLU6()), IMAGES),
    "hardsigmoid block": (lambda: Block(nn.Hardsigmoid()), IMAGES),
    "gelu block": (lambda: Block(nn.GELU()), IMAGES),
    "max pool": (lambda: Apply(nn.MaxPool2d(3, 2, 1)), IMAGES),
    "max pool, ceil": (lambda: Apply(nn.MaxPool2d(2, 2, ceil_mode=True)), IMAGES),
    "max pool, dilated": (lambda: Apply(nn.MaxPool2d((2, 3), 1, dilation=2)), IMAGES),
    "max pool, one axis": (lambda: Apply(nn.MaxPool1d(3, 2, 1), 1), LINES),
    "max pool, three axes": (lambda: Apply(nn.MaxPool3d(2), 3), VOLUMES),
    "avg pool": (lambda: Apply(nn.AvgPool2d(3, 2, 1)), IMAGES),
    "avg pool, ceil": (lambda: Apply(nn.AvgPool2d(2, 2, ceil_mode=True)), IMAGES),
    "avg pool, ceil and padding": (lambda: Apply(nn.AvgPool2d(3, 2, 1, ceil_mode=True)), IMAGES),
    "avg pool, inside": (lambda: Apply(nn.AvgPool2d(3, 2, 1, count_include_pad=False)), IMAGES),
    "avg pool, divisor": (lambda: Apply(nn.AvgPool2d(2, divisor_override=3)), IMAGES),
    "avg pool, three axes": (lambda: Apply(nn.AvgPool3d(2, 1), 3), VOLUMES),
    "global mean": (lambda: Apply(nn.AdaptiveAvgPool2d(1)), IMAGES),
    "global largest": (lambda: Apply(nn.AdaptiveMaxPool2d(1)), IMAGES),
    "adaptive mean": (lambda: Apply(nn.AdaptiveAvgPool2d((3, 3))), IMAGES),
    "group norm": (lambda: Apply(nn.GroupNorm(4, 8)), IMAGES),
    "group norm and silu": (lambda: Apply(nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU())), IMAGES),
    "group norm of lines": (lambda: nn.GroupNorm(2, 4), LINES),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), IMAGES),
    "nearest": (lambda: Apply(nn.Upsample(scale_factor=2)), IMAGES),
    "nearest, sized": (lambda: Apply(lambda x: F.interpolate(x, size=(5, 20))), IMAGES),
    "nearest, factor": (lambda: Apply(lambda x: F.interpolate(x, scale_factor=1.7)), IMAGES),
    "bilinear": (lambda: Apply(nn.Upsample(scale_factor=2, mode="bilinear")), IMAGES),
    "bilinear, corners": (
        lambda: Apply(nn.Upsample(size=(7, 20), mode="bilinear", align_corners=True)),
        IMAGES,
    ),
    "linear": (lambda: Apply(nn.Upsample(scale_factor=3, mode="linear"), 1), LINES),
    "trilinear": (lambda: Apply(nn.Upsample(scale_factor=2, mode="trilinear"), 3), VOLUMES),
    "pixel shuffle": (lambda: Apply(nn.PixelShuffle(2)), IMAGES),
    "pixel unshuffle": (lambda: Apply(nn.PixelUnshuffle(3)), IMAGES),
    "channel shuffle": (lambda: Apply(nn.ChannelShuffle(4)), IMAGES),
    "concatenation": (lambda: Apply(lambda x: torch.cat([x, x * 2, x[:, :3]], 1)), IMAGES),
    "to tokens": (lambda: Apply(lambda x: x.flatten(2).transpose(1, 2) + 1), IMAGES),
    "norm over channels": (
        lambda: Apply(lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2)),
        IMAGES,
    ),
    "gates": (lambda: Apply(lambda x: x * x.mean((2, 3), keepdim=True).sigmoid()), IMAGES),
}


@pytest.fixture(autouse=True)
def session() -> Iterator[Any]:
    torch.manual_seed(0)
    yield rm.init("cpu")
    rm.shutdown()


def check(module: nn.Module, inputs: list[torch.Tensor], precision: torch.dtype) -> None:
    module = module.eval().to(precision)
    rm.accelerate(module)
    for x in inputs:
        x = x.to(precision)
        with torch.no_grad():
            with rm.disabled():
                expected = module(x)
            for _ in range(2):
                given = module(x)
        verdict = parity.compare(expected, given, precision)
        assert verdict.passed, verdict.detail
    report = rm.explain()
    assert report.routed >= len(inputs) and report.native_share == 1.0, report


@pytest.mark.parametrize("name", MODULES)
def test_the_result_is_torchs_and_all_of_it_is_ours(name: str) -> None:
    build, shapes = MODULES[name]
    check(build(), [torch.randn(shape) for shape in shapes], torch.float32)


@pytest.mark.parametrize("name", MODULES)
def test_the_program_in_torch_for_vendors_compilers_gives_the_same(name: str) -> None:
    build, shapes = MODULES[name]
    module = build().eval()
    x = torch.randn(shapes[0])
    captured = capture(module, (x,), {})
    names = captured.input_dims[0]
    sizes = {s: x.shape[i] for i, s in enumerate(names) if s.isidentifier()}
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    weights = {n: state[n].detach() for n in captured.weights} | captured.constants
    text = _core.ir.substitute(captured.ir, sizes)
    with torch.no_grad():
        (given,) = ir_to_torch(text, weights)(x)
        expected = module(x)
    turned = builder(captured.output)([given], [x])
    torch.testing.assert_close(turned, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["strides and groups", "relu block", "group norm and silu"])
def test_half_precision_too(name: str) -> None:
    build, shapes = MODULES[name]
    check(build(), [torch.randn(shape) for shape in shapes], torch.bfloat16)


def test_images_with_channels_last_come_and_go_without_a_copy_of_layouts() -> None:
    x = torch.randn(IMAGES[0]).contiguous(memory_format=torch.channels_last)
    module = Block(nn.ReLU()).eval().to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = module(x)
        rm.accelerate(module)
        for _ in range(3):
            given = module(x)
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
    assert given.stride() == expected.stride()


def test_a_batch_norm_in_training_mode_inside_keeps_the_batchs_statistics() -> None:
    module = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, track_running_stats=False)).eval()
    rm.accelerate(module)
    for _ in range(3):
        x = torch.randn(IMAGES[0])
        with torch.no_grad():
            given = module(x)
            with rm.disabled():
                torch.testing.assert_close(given, module(x), rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_an_input_is_packed_at_every_call() -> None:
    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return F.conv2d(x, w, padding=1) + self.linear.bias.view(1, -1, 1, 1)

    module = Dynamic().eval()
    rm.accelerate(module)
    for _ in range(3):
        x, w = torch.randn(2, 4, 5, 5), torch.randn(4, 4, 3, 3)
        with torch.no_grad():
            given = module(x, w)
            with rm.disabled():
                torch.testing.assert_close(given, module(x, w), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("allowed", [True, False])
def test_on_a_gpu_convolutions_round_as_torch_lets_them_and_take_half_precision(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture alone: there is no GPU here."""

    def captured(dtype: torch.dtype) -> str:
        module = nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6)).eval().to(dtype)
        with torch.no_grad():
            return capture(module, (torch.randn(IMAGES[0]).to(dtype),), {}).ir

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
        assert "tf32" not in captured(torch.float32)
        assert "aten." in captured(torch.float16)
        monkeypatch.setattr(importer, "_lies_on_gpu", lambda ep: True)
        assert ("tf32=1" in captured(torch.float32)) is allowed
        half = captured(torch.float16)
    assert "conv(" in half and "group_norm(" in half
    assert "aten." not in half and "tf32" not in half
