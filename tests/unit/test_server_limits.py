"""Limits of time around what mostly waits for nothing."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("fastapi", reason="the group `serve` is not installed")
from rm_abstract.server.limits import within


def test_work_that_waits_for_nothing_sets_no_timer() -> None:
    async def work() -> None:
        done.append(1)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_at = None  # what timers are set by
        await within(1.0, work())

    done: list[int] = []
    asyncio.run(main())
    assert done == [1]


def test_work_that_waits_goes_on_to_its_end() -> None:
    async def work() -> None:
        for number in range(3):
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            done.append(number)

    done: list[int] = []
    asyncio.run(within(10.0, work()))
    assert done == [0, 1, 2]


def test_work_that_waits_too_long_is_cancelled_with_a_timeout() -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(60)
        finally:
            ended.append(1)

    ended: list[int] = []
    with pytest.raises(TimeoutError):
        asyncio.run(within(0.01, work()))
    assert ended == [1]


def test_errors_of_the_work_are_raised_before_and_behind_its_first_wait() -> None:
    async def work(waits: bool) -> None:
        if waits:
            await asyncio.sleep(0)
        raise ValueError("of the work")

    for waits in (False, True):
        with pytest.raises(ValueError, match="of the work"):
            asyncio.run(within(1.0, work(waits)))


def test_a_cancellation_reaches_the_work_and_its_answer_counts() -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            heard.append(1)
            await asyncio.sleep(0.001)
            heard.append(2)
            raise

    async def main() -> None:
        task = asyncio.ensure_future(within(60.0, work()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    heard: list[int] = []
    asyncio.run(main())
    assert heard == [1, 2]
