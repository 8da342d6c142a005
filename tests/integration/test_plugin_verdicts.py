"""What the gate found is about an artefact's bytes (decision 0027): others are compared before they
serve. And what a survived crash and a worker's log leave to see."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rm_abstract as rm

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "fault"))
from npu_support import Result, run, worker_pids  # noqa: E402

INPUTS = {"input": torch.linspace(-1, 1, 24).reshape(3, 8)}


def layers() -> torch.nn.Module:
    """Code of an installed package only: its verdicts are stored."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8), torch.nn.Tanh()
    )


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RM_BACKEND_PATH", str(TESTS / "python_plugins"))
    yield
    rm.shutdown()


def served(calls: int = 2) -> Result:
    with rm.init("small:0"):
        return run(calls=calls, model=layers(), inputs=INPUTS)


def entry(result: Result) -> dict[str, Any]:
    (model,) = result.report["models"]
    return dict(model["entries"][-1])


def refuse_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "refuse").touch()
    monkeypatch.setenv("SMALL_REFUSE_ONCE", str(folder / "refuse"))


def test_a_verdict_is_found_again_for_the_same_bytes() -> None:
    assert served().routed == 1
    again = served()
    assert again.right and entry(again)["parity"] == "stored verdict"


def test_what_is_compiled_after_a_refusal_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served().routed == 1
    refuse_once(tmp_path, monkeypatch)
    monkeypatch.setenv("SMALL_FAULT", "compile_wrong")
    found = served()
    assert found.right and found.routed == 0 and "RM501" in found.codes


def test_what_is_compiled_after_damage_is_compared(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served().routed == 1
    hit = 0
    for path in own_cache.rglob("*"):
        if path.is_file() and b"small" in (data := path.read_bytes()) and b"linear" in data:
            path.chmod(0o600)
            path.write_bytes(data.replace(b"linear", b"lineal"))
            hit += 1
    assert hit
    monkeypatch.setenv("SMALL_FAULT", "compile_wrong")
    found = served()
    assert found.right and found.routed == 0 and "RM501" in found.codes


@pytest.mark.parametrize("fault", ["compile_wrong", ""])
def test_what_is_compiled_again_while_it_serves_is_compared(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers().eval()
    with rm.init("small:0"), torch.no_grad():
        rm.accelerate(model)
        with rm.disabled():
            expected = model(**INPUTS)
        for _ in range(2):
            torch.testing.assert_close(model(**INPUTS), expected)
        refuse_once(tmp_path, monkeypatch)
        monkeypatch.setenv("SMALL_FAULT", fault)
        monkeypatch.setenv("SMALL_KIND", "2")
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)
        for _ in range(3):
            torch.testing.assert_close(model(**INPUTS), expected)
        report = rm.explain(model).to_dict()
    (seen,) = report["models"]
    codes = {reason["code"] for reason in seen["reasons"]}
    assert ("RM501" in codes) == bool(fault)
    if not fault:
        assert seen["entries"][-1]["calls"] == 2  # the first of the three compared it


def test_a_survived_crash_is_in_the_report() -> None:
    model = layers().eval()
    with rm.init("small:0"), torch.no_grad():
        rm.accelerate(model)
        expected = model(**INPUTS)
        model(**INPUTS)
        program = rm.explain(model).to_dict()
        assert not program["models"][0]["entries"][-1]["crashes"]
        for pid in worker_pids():
            os.kill(pid, signal.SIGSTOP)
        _end_while_running(model, expected)
        told = rm.explain(model)
    assert len(told.to_dict()["models"][0]["entries"][-1]["crashes"]) == 1
    assert "its worker crashed 1 times" in str(told)


def _end_while_running(model: torch.nn.Module, expected: torch.Tensor) -> None:
    """Kills the stopped workers while the call waits for them."""
    pids = worker_pids()
    timer = threading.Timer(0.3, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids])
    timer.start()
    torch.testing.assert_close(model(**INPUTS), expected)
    timer.join()


def test_what_workers_write_is_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RM_WORKER_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("SMALL_FAULT", "run_error")
    found = served()
    assert found.right and "RM307" in found.codes
    (log,) = (tmp_path / "logs").glob("small-*-execute.log")
    assert "the device said E77" in log.read_text() and "Traceback" in log.read_text()
    assert any(str(log) in line for line in found.warned), found.warned


def test_the_commands_see_plugins_of_the_search_path() -> None:
    assert "small:0" in rm.devices()
    assert "small" in {row["name"] for row in rm.backends()}
