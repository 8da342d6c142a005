"""Outputs that are views of an input or of each other: writing into one shows in the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rm_abstract as rm


@pytest.fixture(autouse=True)
def session() -> Iterator[Any]:
    torch.manual_seed(0)
    yield rm.init("cpu")
    rm.shutdown()


class Net(nn.Module):
    def __init__(self, outputs: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.outputs = outputs

    def forward(self, x: torch.Tensor) -> Any:
        return self.outputs(self, x, self.linear(x))


VIEWS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "view": lambda m, x, h: (x.view(-1), h),
    "rows and columns": lambda m, x, h: (x[1:], h, h[:, 0], h[..., 1:3]),
    "no dropout": lambda m, x, h: (F.dropout(x, 0.5, m.training), h),
    "no conversion": lambda m, x, h: (x.to(torch.float32), x.contiguous(), x.reshape(4, -1), h),
    "turned": lambda m, x, h: {"one": h, "two": h.t(), "three": h.t()[1].unsqueeze(0)},
    "cut in parts": lambda m, x, h: [*h.chunk(2, 1), h, *x.unbind(0)[:1]],
    "sizes of the batch": lambda m, x, h: (h, h.view(x.shape[0], 2, 2), h.expand(2, -1, -1)),
    "a view of a view": lambda m, x, h: (h[:, :2], h[:, :2][0], h),
    "itself": lambda m, x, h: (nn.Identity()(x), x.flatten(1), h, h),
}


def addresses(output: Any, x: torch.Tensor) -> list[tuple[int, int, tuple[int, ...]]]:
    """Which tensor each output shares memory with, where it begins there, and its strides."""
    values = list(output.values()) if isinstance(output, dict) else list(output)
    known = [t.untyped_storage().data_ptr() for t in (x, *values)]
    return [(known.index(t.untyped_storage().data_ptr()), t.storage_offset()) for t in values]


@pytest.mark.parametrize("outputs", VIEWS.values(), ids=VIEWS)
def test_views_among_outputs_and_inputs_stay_views(outputs: Callable[..., Any]) -> None:
    net = Net(outputs).eval()
    rm.accelerate(net)
    for size in (4, 4, 6, 4):
        x = torch.randn(size, 4)
        with torch.no_grad():
            with rm.disabled():
                expected = net(x)
            output = net(x)
        torch.testing.assert_close(output, expected)
        assert addresses(output, x) == addresses(expected, x)
    (router,) = rm.session.current().routers()
    assert router.route.stats()["routed"] >= 2, router.route.stats()  # a size may be a capture


LAYOUTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "transposed": lambda m, x, h: h.t(),
    "heads": lambda m, x, h: (h.view(x.shape[0], 2, 2).transpose(0, 1), h.sum(0)),
    "a sum of transposed": lambda m, x, h: h.t() + 1,
    "one row": lambda m, x, h: h[:1].t(),
}


@pytest.mark.parametrize("outputs", LAYOUTS.values(), ids=LAYOUTS)
def test_outputs_have_the_strides_that_eager_gives(outputs: Callable[..., Any]) -> None:
    net = rm.accelerate(Net(outputs).eval())
    for size in (4, 4, 6, 4):
        x = torch.randn(size, 4)
        with torch.no_grad():
            with rm.disabled():
                expected = net(x)
            output = net(x)
        torch.testing.assert_close(output, expected)
        for mine, theirs in zip(tensors(output), tensors(expected), strict=True):
            assert strides(mine) == strides(theirs)


def strides(tensor: torch.Tensor) -> list[int]:
    """Of the axes where they matter."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return list(output.values()) if isinstance(output, dict) else list(output)


@pytest.mark.parametrize("first", [torch.contiguous_format, torch.channels_last])
def test_images_with_channels_last_come_back_so(first: torch.memory_format) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    rm.accelerate(net.eval())
    for form in (first, torch.channels_last, torch.contiguous_format, first):
        x = torch.randn(2, 3, 8, 8).to(memory_format=form)
        with torch.no_grad():
            for _ in range(2):
                with rm.disabled():
                    expected = net(x)
                output = net(x)
                torch.testing.assert_close(output, expected)
                assert output.stride() == expected.stride()


@pytest.mark.parametrize(
    "outputs",
    [
        lambda m, x, h: (m.linear.bias, h),
        lambda m, x, h: (m.linear.weight[:2], h),
        lambda m, x, h: (h, h.view(x.shape[0], 2, 2)[:, 0]),
    ],
)
def test_views_that_cannot_be_taken_again_leave_the_module_eager(
    outputs: Callable[..., Any],
) -> None:
    net = Net(outputs).eval().requires_grad_(False)
    rm.accelerate(net)
    x = torch.randn(4, 4)
    with pytest.warns(rm.RoutingWarning, match="RM204"):
        for _ in range(3):
            first, second = net(x)
    assert first.untyped_storage().data_ptr() in (
        *(t.untyped_storage().data_ptr() for t in (second, net.linear.bias, net.linear.weight)),
    )
