"""How candidates are timed: interleaved rounds, medians, bootstrap intervals, paired ratios.

Machines drift; so candidates take turns (A B A B ...) and are only ever compared within a round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

RESAMPLES = 2000


def bootstrap_interval(
    values: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the median (Efron 1979)."""
    if not values:
        raise ValueError("[bench] expected at least one value, got none; time at least one round")
    draw = random.Random(seed)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    tail = (1.0 - confidence) / 2.0
    return medians[int(tail * RESAMPLES)], medians[min(RESAMPLES - 1, int((1 - tail) * RESAMPLES))]


@dataclass(frozen=True)
class Estimate:
    """A median over rounds with its 95 % interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        return cls(statistics.median(values), *bootstrap_interval(values))

    def scaled(self, factor: float) -> Estimate:
        return Estimate(self.median * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Timing:
    """Seconds a call of one candidate: one value a round, itself a median of that round's calls."""

    name: str
    rounds: tuple[float, ...]

    @property
    def estimate(self) -> Estimate:
        return Estimate.of(self.rounds)

    def speedup_over(self, other: Timing) -> Estimate:
        """How many times faster than `other`, paired by round."""
        if len(self.rounds) != len(other.rounds):
            raise ValueError("[bench] expected timings of the same run, got other round counts")
        pairs = zip(self.rounds, other.rounds, strict=True)
        return Estimate.of([theirs / ours for ours, theirs in pairs])


def time_calls(call: Callable[[], object], seconds: float) -> float:
    """Median seconds of as many calls as fit into `seconds`, at least three."""
    taken: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < deadline:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 7,
    round_seconds: float = 0.3,
    warm_up_seconds: float = 0.3,
) -> dict[str, Timing]:
    """Times all candidates in turns; the order is shuffled each round, so none is always first."""
    if rounds < 5:
        raise ValueError(f"[bench] expected at least 5 rounds, got {rounds}; medians need them")
    for call in candidates.values():
        time_calls(call, warm_up_seconds)
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    order, draw = list(candidates), random.Random(0)
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            call = candidates[name]
            call()  # brings this candidate's code, data and threads back after another's turn
            taken[name].append(time_calls(call, round_seconds))
    return {name: Timing(name, tuple(values)) for name, values in taken.items()}
