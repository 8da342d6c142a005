"""Programs that are slower than PyTorch: measured once, left, and told (decision 0011)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm
from rm_abstract.engines import trial

LOST, WON = (20e-6, 4e-6), (4e-6, 20e-6)


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    rm.init("cpu", compile_options={"when_slower": "eager"})
    yield
    rm.shutdown()


def run(model: nn.Module, times: int, size: int = 4) -> None:
    x = torch.randn(size, 8)
    with torch.no_grad():
        with rm.disabled():
            expected = model(x)
        for _ in range(times):
            torch.testing.assert_close(model(x), expected)


def router(model: nn.Module) -> Any:
    (found,) = (a for a in rm.session.current().routers() if a.module_ref() is model)
    return found


def measured(monkeypatch: pytest.MonkeyPatch, times: tuple[float, float]) -> list[Any]:
    """Every measurement runs both ways and gives these times."""
    made: list[Any] = []

    def measure(compiled: Any, eager: Any) -> tuple[float, float]:
        for _ in range(3):
            torch.testing.assert_close(compiled(), eager())
        made.append(times)
        return times

    monkeypatch.setattr(trial, "_measure", measure)
    return made


def test_a_simple_module_that_lost_is_left_alone_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = measured(monkeypatch, LOST)
    model = rm.accelerate(nn.Linear(8, 8).eval())
    run(model, 100)
    assert made == [LOST]
    assert "_compiled_call_impl" not in vars(model)
    report = rm.explain(model)
    assert report.models[0]["routed"] == trial.CALLS + 1  # measurements are no calls
    assert "RM111" in str(report) and "20.0 µs compiled, 4.0 µs eager" in str(report)
    model.eval()
    assert rm.accelerate(model) is model and "_compiled_call_impl" not in vars(model)
    rm.init("cpu", compile_options={"when_slower": "compiled"})
    assert router(model).in_place


def test_a_program_that_won_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = measured(monkeypatch, WON)
    model = rm.accelerate(nn.Linear(8, 8).eval())
    for size in (4, 5, 6):
        run(model, 60, size)
    assert made == [WON] and router(model).in_place
    assert rm.explain(model).models[0]["routed"] == 179


def test_a_larger_module_loses_only_the_shapes_it_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    made = measured(monkeypatch, (2e-3, 1e-3))
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(4)]
    model = rm.accelerate(nn.Sequential(*layers).eval())
    run(model, 40)
    routed = rm.explain(model).models[0]["routed"]
    monkeypatch.setattr(trial, "_measure", lambda compiled, eager: made.append(WON) or WON)
    run(model, 20, size=7)
    assert len(made) == 2 and router(model).in_place
    assert rm.explain(model).models[0]["routed"] == routed + 20
    run(model, 20)
    assert rm.explain(model).models[0]["routed"] == routed + 20


def test_long_calls_are_not_repeated() -> None:
    ran: list[str] = []

    def slow() -> None:
        ran.append("eager")
        end = trial.time.perf_counter() + 2 * trial._LONGEST_S
        while trial.time.perf_counter() < end:
            pass

    assert trial._measure(lambda: ran.append("compiled"), slow) is None
    assert ran == ["eager"]


def test_programs_stay_when_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    made = measured(monkeypatch, LOST)
    rm.init("cpu", compile_options={"when_slower": "compiled"})
    model = rm.accelerate(nn.Linear(8, 8).eval())
    run(model, 60)
    assert made == [] and router(model).route.stats()["routed"] == 59


class Clock:
    """Time that passes only by what runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(trial.time, "perf_counter", lambda: self.now)

    def lasting(self, seconds: float, name: str, seen: list[str]) -> Any:
        def call() -> str:
            self.now += seconds
            seen.append(name)
            return name

        return call


@pytest.mark.parametrize(("ours", "slower"), [(0.02, True), (0.0105, False)])
def test_long_calls_are_served_in_turn_and_none_is_run_twice(monkeypatch, ours, slower) -> None:
    clock, seen, original = Clock(monkeypatch), [], []
    compiled, eager = clock.lasting(ours, "ours", seen), clock.lasting(0.01, "eager", seen)
    measured, tensors = trial.Trial(), [torch.zeros(3)]
    calls = 40
    for number in range(calls):
        if measured.verdict(tensors, lambda: pytest.fail("a long call was repeated")):
            break
        measured.in_turn(tensors, compiled, eager, lambda: original.append(1))
        assert len(seen) == number + 1
    assert len(original) == seen.count("eager") == trial.TURNS
    assert (number < calls - 1) == slower and measured.won == (not slower)
    assert seen.count("ours") == (trial.LONG_CALLS + trial.TURNS if slower else calls - trial.TURNS)
    assert measured.eager_s == pytest.approx(0.01 if slower else 0.0)


def test_a_long_call_that_lost_while_weights_were_packed_wins_later(monkeypatch) -> None:
    clock, seen = Clock(monkeypatch), []
    slow, fast = clock.lasting(0.02, "ours", seen), clock.lasting(0.005, "ours", seen)
    eager = clock.lasting(0.01, "eager", seen)
    measured, tensors, lost = trial.Trial(), [torch.zeros(3)], 0
    for number in range(60):
        if measured.verdict(tensors, lambda: pytest.fail("a long call was repeated")):
            lost += 1
            continue
        measured.in_turn(tensors, slow if number < 20 else fast, eager, lambda: None)
    assert lost == trial.AGAIN - 1 and measured.won


def test_a_long_call_in_its_trial_gives_what_the_original_gives(monkeypatch) -> None:
    monkeypatch.setattr(trial, "_LONGEST_S", 0.0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(4)]
    model = rm.accelerate(nn.Sequential(*layers).eval())
    run(model, trial.LONG_CALLS + 2 * trial.TURNS + 1)
    found = rm.explain(model).models[0]
    assert found["first_calls"] == 1 + trial.TURNS
    assert found["routed"] + found["eager"] - _asked_for(found) == 15


def _asked_for(found: dict[str, Any]) -> int:
    return sum(r["calls"] for r in found["reasons"] if r["code"] == "RM108")
