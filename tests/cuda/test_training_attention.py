"""Attention's gradient in training steps on a GPU: one operator where kernels take the problem."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
rm = pytest.importorskip("rm_abstract")

from torch import nn  # noqa: E402 # torch is there from here on
from torch.nn import functional as F  # noqa: E402

pytestmark = pytest.mark.cuda

STRICT = {"fallback": "error"}


class Attends(nn.Module):
    """x -> attention of its projections under a mask of a kind."""

    def __init__(self, kind: str, heads: int, groups: int, size: int) -> None:
        super().__init__()
        self.kind, self.heads, self.groups, self.size = kind, heads, groups, size
        width = heads * size
        self.query = nn.Linear(width, width)
        self.both = nn.Linear(width, 2 * groups * size)
        self.out = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(heads, 1, 1))

    def mask(self, rows: int, device: Any) -> Any:
        if self.kind in ("none", "causal"):
            return None
        places = torch.arange(rows, device=device)
        far = (places[:, None] - places[None]).abs()
        if self.kind == "bool":
            return far < 9
        if self.kind == "added":
            return (-0.25 * far).to(self.query.weight.dtype)
        return -far * self.bias.exp()  # "trained": it wants a gradient

    def forward(self, x: Any) -> Any:
        batch, rows, _ = x.shape
        q = self.query(x).view(batch, rows, self.heads, self.size).transpose(1, 2)
        k, v = self.both(x).view(batch, rows, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        mask = self.mask(rows, x.device)
        if mask is not None and mask.is_floating_point():
            mask = mask.to(q.dtype)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=self.kind == "causal",
            enable_gqa=self.groups != self.heads,
            scale=0.2,
        )
        return self.out(y.transpose(1, 2).reshape(batch, rows, -1))


def _square(output: Any, target: Any) -> Any:
    return (output.float() - target).square().mean()


def _follow(model: Any, x: Any, y: Any, precision: str | None, bound: float) -> Any:
    """Gradients and losses of some steps against eager's; the kernels of the plan."""
    other = copy.deepcopy(model)
    optimizer, beside = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, other))
    how = {} if precision is None else {"precision": precision}
    step = rm.compile_step(model, _square, optimizer, options=STRICT, **how)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "", torch.float32)
    for i in range(8):
        beside.zero_grad()
        with torch.autocast("cuda", dtype, enabled=precision is not None):
            loss = _square(other(x), y)
        loss.backward()
        beside.step()
        assert float(step(x, y)) == pytest.approx(float(loss), rel=bound), i
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        difference = (p - q).abs().max().item()
        assert difference <= bound * q.abs().max().item() + bound * 0.01, name
    report = step.report()
    assert report["reasons"] == {} and report["compiled"] >= 5, report
    return report["programs"][0]["kernels"]


def _gradient_kernels(kernels: Any) -> list[str]:
    return [name for name in kernels if "sdpa_backward" in name]


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "added"])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 4, 64), (4, 2, 32), (2, 2, 24)])
def test_its_gradient_is_one_operator(kind: str, heads: int, groups: int, size: int) -> None:
    torch.manual_seed(0)
    model = Attends(kind, heads, groups, size).cuda()
    model.bias.requires_grad_(False)
    x, y = (torch.randn(3, 77, heads * size, device="cuda") for _ in range(2))
    kernels = _follow(model, x, y, None, 2e-4)
    whole = kind != "added"  # an added mask may close a row by a finite number
    assert bool(_gradient_kernels(kernels)) == whole, kernels
    assert any("softmax" in name for name in kernels) != whole


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["causal", "bool"])
def test_half_types_run_on_tensor_cores(kind: str, precision: str) -> None:
    torch.manual_seed(0)
    model = Attends(kind, 4, 4, 64).cuda()
    model.bias.requires_grad_(False)
    x, y = (torch.randn(2, 160, 256, device="cuda") for _ in range(2))
    kernels = _follow(model, x, y, precision, 0.02)
    assert _gradient_kernels(kernels) == ["cuda/sdpa_backward_wgmma_sm90a"], kernels


def test_a_mask_that_is_trained_gets_its_gradient() -> None:
    torch.manual_seed(0)
    model = Attends("trained", 4, 4, 16).cuda()
    x, y = (torch.randn(2, 33, 64, device="cuda") for _ in range(2))
    kernels = _follow(model, x, y, None, 2e-4)
    assert not _gradient_kernels(kernels)


@pytest.mark.parametrize("kind", ["causal", "trained"])  # by one operator, composed
def test_a_gradient_that_is_one_number_everywhere(kind: str) -> None:
    torch.manual_seed(0)
    model = Attends(kind, 2, 2, 16).cuda()
    model.bias.requires_grad_(kind == "trained")
    model.out = nn.Identity()
    x, y = torch.randn(2, 20, 32, device="cuda"), torch.zeros(1, device="cuda")
    other = copy.deepcopy(model)
    optimizer, beside = (torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, other))
    step = rm.compile_step(model, lambda o, t: o.sum() + t.sum(), optimizer, options=STRICT)
    for _ in range(4):
        beside.zero_grad()
        loss = other(x).sum()
        loss.backward()
        beside.step()
        assert float(step(x, y)) == pytest.approx(float(loss), rel=1e-3, abs=1e-3)
    whole = bool(_gradient_kernels(step.report()["programs"][0]["kernels"]))
    assert whole == (kind == "causal")
