"""Pools, group norms and interpolation in compiled steps: losses and parameters are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm

STRICT = {"fallback": "error"}
_BODIES: dict[str, Callable[[], nn.Module]] = {
    # Behind a relu many elements of a window are equal: zeros.
    "max pool": lambda: nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)),
    "max pool with overlap": lambda: nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
    "max pool over the edge": lambda: nn.MaxPool2d(3, 2, ceil_mode=True),
    "dilated max pool": lambda: nn.MaxPool2d(2, 1, dilation=2),
    "mean pool": lambda: nn.AvgPool2d(2),
    "mean pool with overlap": lambda: nn.AvgPool2d(3, 2, padding=1, count_include_pad=False),
    "mean pool over the edge": lambda: nn.AvgPool2d(3, 2, padding=1, ceil_mode=True),
    "adaptive mean": lambda: nn.AdaptiveAvgPool2d((2, 5)),
    "adaptive max": lambda: nn.AdaptiveMaxPool2d(1),
    "group norm": lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU()),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "nearest": lambda: nn.Upsample(scale_factor=2),
    "nearest, down": lambda: nn.Upsample(size=(7, 6)),
    "bilinear": lambda: nn.Upsample(scale_factor=1.5, mode="bilinear"),
    "bilinear corners": lambda: nn.Upsample(size=(5, 13), mode="bilinear", align_corners=True),
    "transposed convolution": lambda: nn.ConvTranspose2d(
        4, 6, 3, stride=2, padding=1, output_padding=1, groups=2
    ),
}


@pytest.mark.parametrize("name", _BODIES)
def test_the_layer_trains_as_in_eager(name: str) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), _BODIES[name](), nn.Flatten(), _Head())
    g = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(4, 3, 10, 10, generator=g), torch.randint(0, 5, (4,), generator=g))
        for _ in range(5)
    ]
    ours(batches[0][0])  # the head takes the size it meets
    theirs = copy.deepcopy(ours)
    a, b = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs))
    step = rm.compile_step(ours, F.cross_entropy, a, options=STRICT)
    for x, y in batches:
        b.zero_grad()
        wanted = F.cross_entropy(theirs(x), y)
        wanted.backward()
        b.step()
        assert float(step(x, y)) == pytest.approx(float(wanted.detach()), rel=1e-4)
    assert step.report()["compiled"] == 3
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-4, atol=2e-5)


class _Head(nn.LazyLinear):
    def __init__(self) -> None:
        super().__init__(5)
