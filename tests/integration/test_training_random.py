"""Training runs that a generator draws, with edits between the steps: every compiled step does what
eager does, or declines with a reason. The short form draws the same few runs every time; the long
form (RM_HEAVY=1) draws 400 by the run's seed.
"""

from __future__ import annotations

import os

import pytest
from step_cases import Case, case_of
from step_findings import run

STEPS = 12
FOUND = [  # what once differed
    Case(3, "mlp", "smoothed", ("",) * 6 + ("gradients_are_left_over", "")),
    Case(142, "residual", "weighted", ("",) * 6 + ("a_counter_is_a_number", "")),
]


def judge(cases: list[Case]) -> None:
    found, compiled = [], 0
    for case in cases:
        findings, report = run(case)
        compiled += report["compiled"]
        if findings:
            found.append(f"{case}: {findings}")
    assert not found, "\n".join(found)
    assert compiled >= 2 * len(cases), "hardly a step was compiled: the comparison says little"


def test_a_few_random_runs() -> None:
    judge([case_of(seed, STEPS) for seed in range(2)])


def test_what_was_found_once_stays_mended() -> None:
    judge(FOUND)


@pytest.mark.timeout(5400)
@pytest.mark.skipif(os.environ.get("RM_HEAVY") != "1", reason="takes many minutes: RM_HEAVY=1")
def test_many_random_runs(seed: int) -> None:
    judge([case_of(seed + i, STEPS) for i in range(400)])
