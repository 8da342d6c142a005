"""The report outlives models and the session; a script that was never served is told so."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import torch
from torch import nn

import rm_abstract as rm


def served() -> nn.Module:
    model = rm.accelerate(nn.Sequential(nn.Linear(8, 8)).eval())
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 8))
    return model


def test_explain_after_shutdown_gives_the_report_of_the_session_that_ended():
    rm.init("cpu")
    model = served()
    before = rm.explain().to_dict()
    rm.shutdown()
    assert rm.explain().to_dict()["models"] == before["models"]
    assert rm.explain().routed == 2 and model is not None


def test_a_model_that_died_stays_in_the_report_once():
    with rm.init("cpu"):
        model = served()
        del model
        gc.collect()
        assert [m["routed"] for m in rm.explain().models] == [2]
    assert [m["routed"] for m in rm.explain().models] == [2]


SCRIPT = """
import torch
from torch import nn
import rm_abstract
rm_abstract.init("cpu")
class Printing(nn.Linear):
    def forward(self, x):
        print("", end="")
        return super().forward(x)
model = Printing(8, 8).eval()
with torch.no_grad():
    for _ in range(25):
        model(torch.ones(2, 8))
"""


def run(tmp_path, **environment: str) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_script_whose_model_was_never_served_ends_with_one_line(tmp_path):
    lines = [line for line in run(tmp_path).splitlines() if line.startswith("rm_abstract:")]
    assert len(lines) == 1
    assert "0 of 25 calls of Printing ran compiled, RM205: " in lines[0] and "prints" in lines[0]


def test_the_line_is_not_printed_where_fallbacks_are_allowed(tmp_path):
    assert "0 of 25" not in run(tmp_path, RM_FALLBACK="allow")
