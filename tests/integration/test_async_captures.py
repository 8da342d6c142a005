"""compile_mode="async": no call waits for a capture, and nothing is left behind or lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import rm_abstract as rm
from rm_abstract import session
from rm_abstract.engines import background

HERE = str(Path(__file__).parent)
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
WITHIN_S = 120.0  # a helper imports torch and transformers, on a machine that may be busy


def bert() -> BertModel:
    torch.manual_seed(0)
    return BertModel(BertConfig(intermediate_size=32, **SMALL)).eval()


def init() -> None:
    rm.init("cpu", compile_options={"compile_mode": "async"})


@pytest.fixture(autouse=True)
def ended():
    yield
    rm.shutdown()


@pytest.fixture
def slow(monkeypatch) -> None:
    """A helper that never answers."""
    monkeypatch.setenv("PYTHONPATH", HERE)
    monkeypatch.setattr(background, "PROGRAM", "slow_captures")


def reasons(model: nn.Module) -> dict[str, int]:
    (found,) = rm.explain(model).models
    return {row["code"]: row["calls"] for row in found["reasons"] if row["code"] != "RM108"}


def helper() -> subprocess.Popen[bytes]:
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end:
        captures = session.current()._captures
        if captures is not None and captures._process is not None:
            return captures._process
        time.sleep(0.01)
    pytest.fail("no helper was started")


def test_eager_serves_until_another_process_has_captured(monkeypatch):
    monkeypatch.setattr(torch.export, "export", lambda *a, **k: pytest.fail("captured here"))
    init()
    model, ids = bert(), torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        with rm.disabled():
            expected = model(ids).last_hidden_state
        end = time.monotonic() + WITHIN_S
        while not rm.explain(model).routed and time.monotonic() < end:
            torch.testing.assert_close(model(ids).last_hidden_state, expected)
            time.sleep(0.01)
        assert rm.explain(model).routed and set(reasons(model)) == {"RM112"}
        torch.testing.assert_close(model(ids).last_hidden_state, expected)
        longer = torch.arange(18).reshape(2, 9)  # the sizes are open
        before = rm.explain(model).routed
        model(longer)
        assert rm.explain(model).routed == before + 1


def test_code_of_the_script_itself_is_not_captured_elsewhere(slow):
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x).relu()

    init()
    model = rm.accelerate(Mine().eval())
    with torch.no_grad(), pytest.warns(rm.RoutingWarning, match="RM211"):
        for _ in range(3):
            model(torch.randn(2, 4))
    assert reasons(model)["RM211"] == 3
    assert session.current()._captures is None  # nothing was sent away


def test_a_helper_that_is_killed_leaves_the_calls_to_the_original(slow):
    init()
    model, ids = bert(), torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        model(ids)
        model(ids)
        assert reasons(model) == {"RM112": 2}
        helper().kill()
        end = time.monotonic() + WITHIN_S
        with pytest.warns(rm.RoutingWarning, match="RM211.*helper process ended"):
            while "RM211" not in reasons(model) and time.monotonic() < end:
                model(ids)
                time.sleep(0.01)


def test_shutdown_in_the_middle_ends_the_helper_at_once(slow):
    init()
    model = bert()
    with torch.no_grad():
        model(torch.arange(14).reshape(2, 7))
    process = helper()
    start = time.monotonic()
    rm.shutdown()
    assert process.poll() is not None and time.monotonic() - start < WITHIN_S / 4
    with torch.no_grad():
        model(torch.arange(14).reshape(2, 7))


def test_a_forked_child_runs_eager_and_the_parents_helper_goes_on(slow):
    init()
    model, ids = bert(), torch.arange(14).reshape(2, 7)
    torch.set_num_threads(1)
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        process = helper()
        child = os.fork()
        if child == 0:
            same = torch.equal(model(ids).last_hidden_state, expected)
            rm.shutdown()
            os._exit(0 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert process.poll() is None
        model(ids)
    assert reasons(model) == {"RM112": 2}


SCRIPT = """
import sys, time
import torch
from torch import nn
import rm_abstract as rm
from rm_abstract import session
from rm_abstract.engines import background
background.PROGRAM = "slow_captures"
rm.init("cpu", compile_options={"compile_mode": "async"})
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
with torch.no_grad():
    model(torch.randn(2, 4))
while session.current()._captures._process is None:
    time.sleep(0.01)
print(session.current()._captures._process.pid, flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("how", ["exit", "wait"])
def test_the_helper_ends_with_the_process_however_it_ends(how):
    command = [sys.executable, "-c", SCRIPT, how]
    env = {**os.environ, "PYTHONPATH": HERE}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        if how == "wait":
            assert alive(pid)
            process.send_signal(signal.SIGKILL)
        process.wait(WITHIN_S)
        assert process.returncode == (0 if how == "exit" else -signal.SIGKILL)
    end = time.monotonic() + WITHIN_S
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(pid)
