"""Losses over classes in training steps on a GPU: logits, loss and gradient of rows at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
rm = pytest.importorskip("rm_abstract")

from torch import nn  # noqa: E402 # torch is there from here on
from torch.nn import functional as F  # noqa: E402

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(("rows", "classes"), [(40, 50), (300, 5003), (1536, 12345)])
def test_a_loss_over_classes_is_eagers(rows: int, classes: int, precision: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, classes)).cuda()
    other = copy.deepcopy(model)
    optimizer, beside = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, other))
    how: dict[str, Any] = {} if precision is None else {"precision": precision}
    step = rm.compile_step(model, F.cross_entropy, optimizer, options={"fallback": "error"}, **how)
    x = torch.randn(rows, 64, device="cuda")
    ids = torch.randint(0, classes, (rows,), device="cuda")
    ids[::7] = -100
    ids[1] = classes - 1
    bound = 2e-4 if precision is None else 0.02
    for i in range(6):
        beside.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision is not None):
            loss = F.cross_entropy(other(x), ids)
        loss.backward()
        beside.step()
        assert float(step(x, ids)) == pytest.approx(float(loss), rel=bound), i
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        difference = (p - q).abs().max().item()
        assert difference <= bound * q.abs().max().item() + bound * 0.05, name
    report = step.report()
    assert report["reasons"] == {} and report["compiled"] >= 4, report
    kernels = report["programs"][0]["kernels"]
    if rows * classes >= 1 << 16:  # others are steps of one small launch
        assert any("cross_entropy" in name for name in kernels), kernels
        assert not any("softmax" in name for name in kernels)
