"""hook="all": modules that nothing else caught are caught when they are called."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import rm_abstract as rm


def unpickled() -> nn.Module:
    stream = io.BytesIO()
    torch.save(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.fixture
def everything(monkeypatch):
    before = nn.Module.__call__
    monkeypatch.setenv("RM_HOOK", "all")
    rm.init("cpu")
    yield
    rm.shutdown()
    assert nn.Module.__call__ is before


def called(model: nn.Module, times: int = 3) -> int:
    x = torch.randn(2, 8)
    with torch.no_grad():
        with rm.disabled():
            expected = model(x)
        for _ in range(times):
            torch.testing.assert_close(model(x), expected)
    report = rm.explain(model)
    return report.routed if report.models else -1


def test_a_module_nobody_prepared_is_served_at_its_root_only(everything):
    model = unpickled()
    assert called(model) == 2
    caught = [row["model"] for row in rm.explain().models if row["caught_by"] == "call"]
    assert caught == ["Sequential"]  # and none of its parts
    assert rm.explain(model).models[0]["caught_by"] == "call"
    assert "__call__" in str(rm.patches())


def test_a_module_in_training_is_left_alone_and_caught_later(everything):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model(torch.randn(2, 8))
    assert rm.explain().models == []
    model.training = False
    for part in model.modules():
        part.training = False
    assert called(model) == 2


def test_torch_compile_goes_through_it(everything):
    model = unpickled()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), compiled(x))


def test_without_the_option_such_a_module_is_not_caught():
    with rm.init("cpu"):
        assert called(unpickled()) == -1


def test_it_works_when_torch_is_imported_after_init(tmp_path):
    script = (
        "import rm_abstract as rm; rm.init('cpu'); import torch, copy\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())\n"
        "for part in model.modules(): part.training = False\n"
        "with torch.no_grad(): [model(torch.ones(2, 8)) for _ in range(3)]\n"
        "print(rm.explain().routed)"
    )
    env = {**os.environ, "RM_HOOK": "all"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "2", done.stderr
