"""A worker is killed at random moments while several programs of it run: every call that waits
gives the right result (it is repeated in the next worker) or the typed error, none hangs, nothing
is left. RM_HEAVY=1: 200 kills."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from npu_support import worker_pids
from small_plugins import small_model, small_plugin
from test_worker_restarts import left

import rm_abstract as rm

HEAVY = os.environ.get("RM_HEAVY") == "1"
KILLS, ROUNDS = (150, 10) if HEAVY else (3, 1)
STRICT = "error:capture,compile,device,correctness"
LANES = 4
LIMIT_S = 60.0  # for a call that meets a kill, on a busy machine


class Caller(threading.Thread):
    """Calls one model until it is told to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(daemon=True)
        width = 8 + 8 * number  # programs of their own
        self.model = small_model(width)
        self.input = torch.randn(3, width)
        with torch.no_grad():
            self.expected = self.model(self.input)
        rm.accelerate(self.model)
        self.stopping = threading.Event()
        self.calls = 0
        self.longest = 0.0
        self.wrong: list[str] = []
        self.errors: list[rm.Error] = []

    def call(self) -> None:
        begun = time.monotonic()
        try:
            with torch.no_grad():
                got = self.model(self.input)
        except rm.Error as error:
            self.errors.append(error)
        except Exception as error:  # anything else is a finding
            self.wrong.append(repr(error))
        else:
            if not torch.allclose(got, self.expected, atol=1e-5):
                self.wrong.append(f"off by {(got - self.expected).abs().max()}")
        self.calls += 1
        self.longest = max(self.longest, time.monotonic() - begun)

    def run(self) -> None:
        while not self.stopping.is_set():
            self.call()

    @property
    def routed(self) -> int:
        return int(rm.explain(self.model).to_dict()["routed"])


def plugin(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """A plugin whose runs take some time, so that others run meanwhile; draws of moments."""
    small_plugin(name, LANES, "time.sleep(0.005)", folder, monkeypatch)
    return random.Random(f"{os.environ.get('RM_SEED', '1')} {name}")


def callers() -> list[Caller]:
    """A thread for each lane, with a model that is served."""
    torch.manual_seed(5)
    found = [Caller(number) for number in range(LANES)]
    for one in found:
        for _ in range(3):  # captured, compiled, compared; then served
            one.call()
    assert all(one.routed and not one.errors for one in found)
    return found


def kill() -> None:
    for pid in worker_pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stopped(running: list[Caller]) -> None:
    for one in running:
        one.stopping.set()
    for one in running:
        one.join(LIMIT_S)
    assert not any(one.is_alive() for one in running)
    assert max(one.longest for one in running) < LIMIT_S
    assert not any(one.wrong for one in running), [one.wrong for one in running]


@pytest.mark.timeout(4 * 3600 if HEAVY else 300)
def test_calls_that_run_together_are_repeated_in_the_next_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = plugin("together", tmp_path, monkeypatch)
    others = left()["children"]
    with rm.init("together:0", fallback=STRICT) as session:
        running = callers()
        before = left()
        for one in running:
            one.start()
        for _ in range(KILLS):
            counts = [one.calls for one in running]  # of the last worker: one kill a call
            until = time.monotonic() + LIMIT_S
            while not all(o.calls > c + 2 for o, c in zip(running, counts, strict=True)):
                assert time.monotonic() < until, "a call hangs"
                time.sleep(0.001)
            time.sleep(draws.random() * 0.02)
            kill()
        stopped(running)
        for one in running:
            one.call()  # nobody kills any more
            assert not one.wrong and not one.errors and one.routed >= one.calls - 1, one.errors
        (pool,) = session._workers.values()
        after, calls = left(), sum(one.calls for one in running)
        print(f"{KILLS} kills, {pool.starts} starts, {calls} calls, {before}, then {after}")
        assert pool.starts >= KILLS
        for name in ("descriptors", "mappings", "children"):
            assert after[name] <= before[name] + 2, (name, before, after)
    assert left()["children"] <= others


@pytest.mark.timeout(4 * 3600 if HEAVY else 300)
def test_kills_at_any_moment_of_a_restart_are_the_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is repeated once: one that meets two kills raises, and PyTorch serves its model."""
    draws = plugin("anymoment", tmp_path, monkeypatch)
    others, met = left()["children"], 0
    for _ in range(ROUNDS):
        with rm.init("anymoment:0", fallback=STRICT):
            running = callers()
            for one in running:
                one.start()
            for _ in range(5):
                time.sleep(draws.random())
                kill()
            stopped(running)
            for one in running:
                assert {error.code for error in one.errors} <= {"RM303"}, one.errors
                met += len(one.errors)
                one.errors.clear()
                one.call()
                assert not one.errors and not one.wrong
        assert left()["children"] <= others
    print(f"{5 * ROUNDS} kills, {met} errors")
