"""Steps in bf16: what torch's autocast computes, within its rounding."""

from __future__ import annotations

import copy
import math
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm
from rm_abstract import _core
from rm_abstract.capture.training import widen_losses

STRICT = {"fallback": "error"}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 32)
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.second, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        q, k, v = (
            p.unflatten(2, (4, 8)).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.gelu(self.up(self.second(x)))))


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.SiLU()
        )
        self.head = nn.Linear(32, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = (ids[:, :, None] == ids[:, None, :]).float()[:, None, :8, :8]
        return self.head(self.body(x).flatten(1))[:, None].expand(-1, ids.shape[1], -1)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _batch(g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    ids = (torch.randint(0, 32, (8, 1), generator=g) + 3 * torch.arange(13)) % 32
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize("kind", [_Net, _Images])
@pytest.mark.parametrize("way", ["step", "loss"])
def test_losses_are_those_of_autocast(
    kind: type[nn.Module], way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """RM_HEAVY=1 takes 1,000 steps and prints how far the curves are apart."""
    heavy = os.environ.get("RM_HEAVY") == "1"
    steps = 1000 if heavy else 12
    torch.manual_seed(0)
    ours = kind()
    theirs = copy.deepcopy(ours)
    a, b = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (ours, theirs))
    if way == "step":
        step = rm.compile_step(ours, _loss, a, precision="bf16", options=STRICT)
    else:
        compiled = rm.compile_loss(ours, _loss, precision="bf16", options=STRICT)
    g = torch.Generator().manual_seed(1)
    curves: tuple[list[float], list[float]] = ([], [])
    for _ in range(steps):
        x, y = _batch(g)
        b.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            wanted = _loss(theirs(x), y)
        wanted.backward()
        b.step()
        if way == "step":
            mine = step(x, y)
        else:
            a.zero_grad()
            mine = compiled(x, y)
            mine.backward()
            a.step()
        curves[0].append(float(mine.detach()))
        curves[1].append(float(wanted.detach()))
    assert curves[0][:100] == pytest.approx(curves[1][:100], rel=1e-2)
    report = step.report() if way == "step" else compiled.report()
    assert report["compiled"] >= steps - 2
    assert curves[0][-1] < curves[0][0]
    if heavy:
        apart = [abs(m - w) / max(abs(w), 1e-3) for m, w in zip(*curves, strict=True)]
        with capsys.disabled():
            print(
                f"\n{kind.__name__} {way}, bf16: last eager {curves[1][-1]:.5f} compiled "
                f"{curves[0][-1]:.5f}; apart {max(apart[:100]):.1e} in 100 steps, "
                f"{max(apart):.1e} in {steps}"
            )


def test_a_region_of_autocast_in_the_loss_is_a_part_of_the_program() -> None:
    torch.manual_seed(0)
    ours = _Net()
    theirs = copy.deepcopy(ours)

    class Region(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(ids).float()

    a, b = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    step = rm.compile_step(Region(ours), _loss, a, options=STRICT)
    g = torch.Generator().manual_seed(1)
    for _ in range(6):
        x, y = _batch(g)
        b.zero_grad()
        wanted = _loss(Region(theirs)(x), y)
        wanted.backward()
        b.step()
        assert float(step(x, y)) == pytest.approx(float(wanted.detach()), rel=5e-3)
    assert step.report()["compiled"] == 4


@pytest.mark.parametrize("stop", ["detach", "no_grad"])
def test_gradients_that_stop_under_autocast_are_eagers(stop: str) -> None:
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if stop == "detach":
                return self.a(x) + self.b(x).detach()
            with torch.no_grad():
                y = self.b(x)
            return self.a(x) + y

    model = Stops()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = rm.compile_step(
        model, F.cross_entropy, optimizer, precision="bf16", options={"fallback": "allow"}
    )
    kept = model.b.weight.detach().clone()
    for _ in range(3):
        step(torch.randn(4, 6), torch.randint(0, 5, (4,)))
    report = step.report()
    assert report["compiled"] == 0 and "RM706" in report["reasons"]
    assert torch.equal(model.b.weight, kept)


class Rotated(nn.Module):
    """Values are turned by angles of their positions, which transformers makes without gradients
    and outside autocast: no gradient goes that way."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("speeds", torch.linspace(0.1, 1, 4))

    @torch.no_grad()
    def angles(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[0], device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            return (positions[:, None].float() * self.speeds).cos().to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(x)
        turn = self.angles(y)
        return (y * torch.cat((turn, turn), -1)).float()


def test_parts_that_take_no_gradient_may_switch_gradients_off_under_autocast() -> None:
    torch.manual_seed(0)
    ours = Rotated()
    theirs = copy.deepcopy(ours)
    a, b = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    step = rm.compile_step(ours, F.mse_loss, a, precision="bf16", options=STRICT)
    for i in range(5):
        x, y = torch.randn(6, 8), torch.randn(6, 8)
        b.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            wanted = F.mse_loss(theirs(x), y)
        wanted.backward()
        b.step()
        assert float(step(x, y)) == pytest.approx(float(wanted.detach()), rel=5e-3), i
    assert step.report()["compiled"] == 3  # one watched, one compared


def test_a_precision_that_is_not_offered_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="precision"):
        rm.compile_step(model, F.mse_loss, optimizer, precision="f16")
    with pytest.raises(ValueError, match="precision"):
        rm.compile_loss(model, F.mse_loss, precision="f32")


@pytest.mark.parametrize("op", ["gelu", "silu", "softplus"])
def test_a_gradient_of_a_half_type_is_rounded_once(op: str) -> None:
    text = (
        'rmir 1\ninput %0 "x" : bf16[64]\ninput %1 "w" : bf16[64]\n'
        f"%2 = {op}(%0) : bf16[64]\n%3 = mul(%2, %1) : bf16[64]\n%4 = cast(%3) : f32[64]\n"
        '%5 = reduce(%4) {axes=[0], keepdim=0, kind="sum"} : f32[]\nreturn %5\n'
    )
    x = torch.linspace(-4, 4, 64).bfloat16()
    w = torch.linspace(0.5, 2, 64).bfloat16()
    both = _core.autograd.differentiate(text, [0])
    _, ours = _core.autograd.evaluate(both, [x.double().tolist(), w.double().tolist()])
    exact = x.double().requires_grad_()
    y: Any = F.gelu(exact) if op == "gelu" else getattr(F, op)(exact)
    (slope,) = torch.autograd.grad((y * w.double()).sum(), exact)
    for mine, wanted in zip(ours, slope.tolist(), strict=True):
        assert math.isclose(mine, wanted, rel_tol=2**-8, abs_tol=2**-12)


def test_dropout_of_half_values_draws_in_the_program() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = rm.compile_step(model, F.cross_entropy, optimizer, precision="bf16", options=STRICT)
    x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
    losses = [float(step(x, y)) for _ in range(30)]
    assert step.report()["compiled"] == 30 - step.report()["eager"] >= 28
    assert losses[-1] < losses[0]


def test_losses_under_cuda_autocast_are_widened() -> None:
    # CUDA's autocast runs the parts of cross_entropy in float32, which a trace does not show.
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return F.cross_entropy(x, y) + F.cross_entropy(x.float(), y)

    given = (torch.randn(4, 8).bfloat16(), torch.randint(0, 8, (4,)))
    module = torch.export.export(Loss(), given, strict=False).graph_module
    region = next(n for n in module.graph.nodes if "wrap_with_autocast" in str(n.target))

    def casts() -> int:
        inner = getattr(module, str(region.args[4].target))
        losses = [n for n in inner.graph.nodes if "cross_entropy_loss" in str(n.target)]
        return sum("_to_copy" in str(n.args[0].target) for n in losses)

    found = casts()
    widen_losses(module)
    assert casts() == found  # the CPU's is in its list
    region.args = ("cuda", *region.args[1:])
    widen_losses(module)
    assert casts() == found + 1  # of the half one
    region.args = ("cuda", region.args[1], False, *region.args[3:])
    widen_losses(module)
    assert casts() == found + 1  # autocast is off there


def test_a_norm_whose_weight_autocast_leaves_in_f32() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(16, 32), nn.RMSNorm(32, eps=1e-5), nn.Linear(32, 4))
    theirs = copy.deepcopy(ours)
    a, b = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    step = rm.compile_step(ours, F.mse_loss, a, precision="bf16", options=STRICT)
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    for _ in range(4):
        b.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(theirs(x).float(), y)
        loss.backward()
        b.step()
        assert float(step(x, y)) == pytest.approx(float(loss), rel=0.02)
    assert step.report()["reasons"] == {}
