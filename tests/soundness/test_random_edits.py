"""Edits that a generator draws: what a served model gives, raises and leaves behind is what PyTorch
alone does. The short form draws the same few cases in every run; the long form (RM_HEAVY=1) draws
2000 by the run's seed and repeats each in a second process.
"""

from __future__ import annotations

import os

import pytest
from edit_cases import case_of
from edit_findings import Result, check, check_all

# Holder, path, edit, timing, mode of cases that once gave a stale result.
FOUND = [
    ("operators", "caught", "add", "call_in_thread", "no_grad"),
    ("metaclass", "direct", "meta", "after_some", "no_grad"),
    ("partial_method", "direct", "item", "after_some", "no_grad"),
    ("class_item", "direct", "item", "after_some", "no_grad"),
    ("bases", "direct", "bases", "after_some", "no_grad"),
]


def judge(result: Result) -> None:
    print(result)
    assert not result.findings, str(result)
    assert result.routed_calls, "nothing was served: the comparison says nothing"
    assert result.part_calls, "nothing was served in parts: the comparison says nothing of them"


def test_a_few_random_edits() -> None:
    judge(check_all(40, 2, second_process=False, size=40, jobs=1))


def test_what_was_found_once_stays_mended() -> None:
    result = check([case_of(i, *found) for i, found in enumerate(FOUND)], second_process=False)
    assert not result.findings, str(result)


@pytest.mark.timeout(5400)
@pytest.mark.skipif(os.environ.get("RM_HEAVY") != "1", reason="takes many minutes: RM_HEAVY=1")
def test_two_thousand_random_edits(seed: int) -> None:
    result = check_all(2000, seed, second_process=True)
    judge(result)
    assert result.controls_routed >= 0.9 * result.controls, str(result)
    assert result.parts_routed >= 0.9 * result.parts, str(result)
