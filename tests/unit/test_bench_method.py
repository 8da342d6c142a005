"""The arithmetic of the benchmark method, on invented times."""

from __future__ import annotations

import pytest

from rm_abstract.bench.method import Estimate, Timing, bootstrap_interval, interleave


def test_the_interval_of_equal_values_is_that_value() -> None:
    assert bootstrap_interval([2.0] * 7) == (2.0, 2.0)


def test_the_interval_holds_the_median_and_stays_within_the_values() -> None:
    values = [1.0, 1.1, 1.2, 1.3, 5.0]
    low, high = bootstrap_interval(values)
    assert 1.0 <= low <= 1.2 <= high <= 5.0
    assert low < high


def test_an_interval_of_no_values_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_interval([])


def test_speedups_are_paired_by_round_so_that_drift_cancels() -> None:
    ours = Timing("ours", (1.0, 10.0, 100.0, 2.0, 3.0))
    eager = Timing("eager", (2.0, 20.0, 200.0, 4.0, 6.0))
    assert ours.speedup_over(eager) == Estimate(2.0, 2.0, 2.0)


def test_timings_of_different_runs_are_not_compared() -> None:
    with pytest.raises(ValueError, match="round counts"):
        Timing("a", (1.0,)).speedup_over(Timing("b", (1.0, 2.0)))


def test_candidates_take_turns_in_every_round() -> None:
    calls: list[str] = []
    candidates = {name: (lambda name=name: calls.append(name)) for name in ("a", "b", "c")}
    timings = interleave(candidates, rounds=5, round_seconds=0.0, warm_up_seconds=0.0)
    assert {len(timing.rounds) for timing in timings.values()} == {5}
    turns = calls[9:]  # after three warm-up calls each: one call to come back and three timed ones
    for start in range(0, len(turns), 12):
        blocks = [turns[start + offset : start + offset + 4] for offset in (0, 4, 8)]
        assert all(len(set(block)) == 1 for block in blocks)
        assert {block[0] for block in blocks} == {"a", "b", "c"}


def test_fewer_than_five_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 5 rounds"):
        interleave({"a": lambda: None}, rounds=4)
