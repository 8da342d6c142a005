"""Weights changed in ways that a generator draws, and swapped while other threads are served."""

from __future__ import annotations

import os

import pytest
from weight_walks import Walked, walk

HEAVY = os.environ.get("RM_HEAVY") == "1"


def judge(results: list[Walked]) -> None:
    findings = [line for result in results for line in result.findings]
    calls, routed = sum(r.calls for r in results), sum(r.routed for r in results)
    edits = sum(r.edits for r in results)
    print(f"{edits} edits, {calls} calls, {routed} by programs, {len(findings)} findings")
    assert not findings, "\n".join(findings)
    assert routed > calls / 5, f"{routed} of {calls} calls were served: that says little"


def test_weights_changed_at_random_are_computed_with() -> None:
    judge([walk(number, 12) for number in range(4)])


@pytest.mark.timeout(5400)
@pytest.mark.skipif(not HEAVY, reason="takes many minutes: RM_HEAVY=1")
def test_weights_changed_two_thousand_times_are_computed_with(seed: int) -> None:
    judge([walk(4 * seed + number, 25) for number in range(80)])
