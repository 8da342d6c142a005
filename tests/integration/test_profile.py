"""profile() and the times in explain()."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import rm_abstract as rm


@pytest.fixture(autouse=True)
def session():
    rm.init("cpu")
    yield
    rm.shutdown()


def served(times: int = 3) -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Softmax(-1)]
    model, x = rm.accelerate(nn.Sequential(*layers).eval()), torch.randn(32, 64)
    with torch.no_grad():
        for _ in range(times):
            model(x)
    return model, x


def settled(model: nn.Module, x: torch.Tensor, folder: Path) -> None:
    """Weights are packed by another thread behind the second call; then steps have other names."""
    last, since = set(), time.monotonic()
    while time.monotonic() - since < 0.5:
        with rm.profile(folder / "before.json") as profile:
            model(x)
        steps = {row["step"] for row in profile.steps()}
        if steps != last:
            last, since = steps, time.monotonic()
        time.sleep(0.01)


def test_every_run_in_the_block_is_there_with_all_its_steps_and_no_other(tmp_path):
    model, x = served()
    with torch.no_grad():
        settled(model, x, tmp_path)
        before = time.monotonic_ns()
        with rm.profile(tmp_path / "trace.json") as profile:
            expected = [model(x) for _ in range(5)]
        after = time.monotonic_ns()
        torch.testing.assert_close(model(x), expected[0])
    assert len(profile.runs) == 5 and profile.dropped == 0
    (entry,) = rm.explain(model).models[0]["entries"]
    assert all(len(run.steps) == len(run.times) >= entry["nodes"] for run in profile.runs)
    spent = sum(sum(run.times) for run in profile.runs)
    assert 0 < spent <= profile.seconds * 1e9
    assert all(before <= run.start and run.start + sum(run.times) <= after for run in profile.runs)
    assert {run.thread for run in profile.runs} == {threading.get_native_id()}
    rows = profile.steps()
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    assert {row["runs"] for row in rows} == {5} and any("gemm" in row["step"] for row in rows)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [event for event in events if event["cat"] == "step"]
    assert len(steps) == 5 * len(rows) and len(events) == len(steps) + 5
    runs = [event for event in events if event["cat"] == "run"]
    for run in runs:
        inside = [s for s in steps if run["ts"] <= s["ts"] < run["ts"] + run["dur"]]
        assert sum(s["dur"] for s in inside) == pytest.approx(run["dur"], rel=0.01)
    assert "5 runs" in str(profile) and "gemm" in str(profile)


def test_threads_are_told_apart():
    model, x = served()

    def call() -> None:
        with torch.no_grad():
            for _ in range(4):
                model(x)

    threads = [threading.Thread(target=call) for _ in range(3)]
    with rm.profile() as profile:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(profile.runs) == 12 and len({run.thread for run in profile.runs}) == 3


def test_a_block_that_ran_nothing_says_what_to_do():
    with rm.profile() as profile:
        pass
    assert not profile.runs and "call the model a few times before" in str(profile)
    with profile, pytest.raises(rm.Error), profile:
        pass


def test_explain_says_what_a_call_takes_without_and_with_us():
    model, _ = served(4)
    report = rm.explain(model)
    (entry,) = report.models[0]["entries"]
    assert entry["eager_ms"] > 0 and entry["compiled_ms"] > 0 and entry["timed"] == "first calls"
    assert "ms compiled; the first call, in PyTorch, took " in str(report)


def test_explain_says_so_where_both_were_measured_by_turns(monkeypatch):
    rm.shutdown()
    rm.init("cpu", compile_options={"when_slower": "eager"})
    from rm_abstract.engines import trial

    monkeypatch.setattr(trial, "_measure", lambda compiled, eager: (2e-6, 8e-6))
    model, _ = served(trial.CALLS + 10)
    assert "0.008 ms in PyTorch → 0.002 ms compiled (4.00x, measured in turns)" in str(
        rm.explain(model)
    )
