"""Gradients of norms in training steps on a GPU: one operator each."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
rm = pytest.importorskip("rm_abstract")

from torch import nn  # noqa: E402 # torch is there from here on

pytestmark = pytest.mark.cuda

STRICT = {"fallback": "error"}


class Normal(nn.Module):
    """x + linear(norm(x)) twice: what arrives at a norm's operand arrives from two sides."""

    def __init__(self, kind: str, width: int, weights: bool) -> None:
        super().__init__()
        make = nn.LayerNorm if kind == "layer" else nn.RMSNorm
        self.first, self.second = (
            make(width, eps=1e-5, elementwise_affine=weights) for _ in range(2)
        )
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        x = self.one(x)
        x = x + self.two(self.first(x))
        return self.second(x)


def _square(output: Any, target: Any) -> Any:
    return (output.float() - target).square().mean()


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("width", [768, 100, 7])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_train_as_in_eager(
    kind: str, width: int, weights: bool, precision: str | None
) -> None:
    torch.manual_seed(0)
    model = Normal(kind, width, weights).cuda()
    other = copy.deepcopy(model)
    optimizer, beside = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    how = {} if precision is None else {"precision": precision}
    step = rm.compile_step(model, _square, optimizer, options=STRICT, **how)
    x, y = (torch.randn(5, 33, width, device="cuda") for _ in range(2))
    bound = 2e-4 if precision is None else 0.02
    for i in range(8):
        beside.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision is not None):
            loss = _square(other(x), y)
        loss.backward()
        beside.step()
        assert float(step(x, y)) == pytest.approx(float(loss), rel=bound), i
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        difference = (p - q).abs().max().item()
        assert difference <= bound * q.abs().max().item() + bound * 0.05, name
    report = step.report()
    assert report["reasons"] == {} and report["compiled"] >= 5, report
    assert not any("rsqrt" in line for line in report["programs"][0]["kernels"])
    norms = {k: n for k, n in report["programs"][0]["kernels"].items() if "norm_" in k}
    assert sum(norms.values()) == 4, report["programs"][0]["kernels"]  # forward and backward
