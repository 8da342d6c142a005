"""When a device that failed is tried again."""

from __future__ import annotations

from rm_abstract.hooks.recovery import FIRST_S, LONGEST_S, Recovery


def test_pauses_double_until_the_device_has_served_for_longer() -> None:
    now = [100.0]
    recovery = Recovery(lambda: now[0])
    pauses = []
    for _ in range(9):  # it fails at every new try
        pauses.append(recovery.pause_s("RM303"))
        now[0] += pauses[-1] or 0.0
    assert pauses[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S] and pauses[-1] == LONGEST_S
    now[0] += 2 * LONGEST_S
    assert recovery.pause_s("RM407") == FIRST_S


def test_what_is_the_programs_own_fault_or_costs_a_time_out_is_not_tried_again() -> None:
    recovery = Recovery()
    assert [recovery.pause_s(code) for code in ("RM301", "RM307", "RM308", "RM309")] == [None] * 4
