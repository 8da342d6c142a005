"""How often calls are compared under each value of `verify`."""

from __future__ import annotations

import pytest

from rm_abstract.verification.policy import SHARE, Policy


def test_samples_cost_no_more_than_their_share_of_the_time() -> None:
    policy = Policy.of("auto")
    for program_s, compared_s in [(4e-6, 5e-4), (1e-2, 3e-2), (1e-3, 1e-3)]:
        calls = [policy.next_sample(program_s, compared_s) for _ in range(200)]
        mean = sum(calls) / len(calls)
        assert compared_s <= 1.1 * SHARE * mean * program_s or mean >= 150
        assert min(calls) >= 150
    assert 10_000 < policy.next_sample(4e-6, 5e-4) < 50_000


@pytest.mark.parametrize(
    ("text", "first"), [("always", 0), ("7", 6), ("p=1", 0), ("off", None), ("first", None)]
)
def test_the_first_sample_is_where_the_option_says(text: str, first: int | None) -> None:
    calls = Policy.of(text).first_sample()
    assert calls == first if first is not None else calls > 1e15


def test_a_probability_is_kept_on_average() -> None:
    policy = Policy.of("p=0.02")
    drawn = [policy.first_sample() + 1 for _ in range(4000)]
    assert 40 < sum(drawn) / len(drawn) < 62
