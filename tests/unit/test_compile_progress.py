"""The line that tells of a compilation takes whatever a vendor's compiler reports."""

from __future__ import annotations

import io

import pytest

from rm_abstract.engines.progress import Progress


@pytest.mark.parametrize(
    ("fraction", "shown"),
    [(0.5, "50 %"), (7.0, "100 %"), (float("inf"), "100 %"), (1e300, "100 %"),
     (-1.0, ""), (float("nan"), ""), (float("-inf"), "")],
)  # fmt: skip
def test_any_number_is_a_fraction(fraction: float, shown: str) -> None:
    stream = io.StringIO()
    with Progress("model", verbose=1, stream=stream) as progress:
        progress(fraction, "lowering")
    assert shown in stream.getvalue() and "Error" not in stream.getvalue()


def test_a_stage_cannot_steer_the_terminal() -> None:
    stream = io.StringIO()
    with Progress("model", verbose=1, stream=stream) as progress:
        progress(0.5, "\x1b[2J\r\n" + "x" * 10_000)
    (line,) = stream.getvalue().splitlines()
    assert "\x1b" not in line and len(line) < 200
