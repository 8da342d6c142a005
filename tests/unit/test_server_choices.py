"""A request's pieces of text when its jobs are faster than their reader."""

from __future__ import annotations

import asyncio
import threading

import pytest

pytest.importorskip("fastapi", reason="the group `serve` is not installed")
from rm_abstract.generation.jobs import End, Sampling, Token
from rm_abstract.server.choices import Bell, Choices, Wanted
from rm_abstract.server.errors import ApiError

WANTED = Wanted(limit=10_000, sampling=Sampling(), n=2)


class Letters:
    """A tokenizer: a token is a letter."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + i % 26) for i in ids)


class Engine:
    """Keeps the jobs for the test to drive."""

    def __init__(self) -> None:
        self.jobs, self.cancelled = [], []

    def submit(self, jobs) -> None:
        self.jobs += jobs

    def cancel(self, job) -> None:
        self.cancelled.append(job)


def made(engine) -> Choices:
    return Choices(engine, Letters(), [[1], [2]], WANTED)


def test_a_reader_that_is_behind_gets_fewer_pieces_and_all_of_the_text():
    async def read() -> list:
        engine = Engine()
        choices = made(engine)
        for i in range(1000):
            for job in engine.jobs:
                job.deliver(Token(i))
        for job in engine.jobs:
            job.deliver(End("length"))
        return [piece async for piece in choices.pieces()]

    pieces = asyncio.run(read())
    assert len(pieces) < 1000
    for index in range(4):
        mine = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in mine) == Letters().decode(range(1000))
        assert [t.id for piece in mine for t in piece.tokens] == list(range(1000))
        assert [piece.finish for piece in mine if piece.finish] == ["length"] and mine[-1].finish


def test_other_tasks_have_their_turn_while_a_reader_is_behind():
    async def read() -> tuple[int, int]:
        engine = Engine()
        choices, turns = made(engine), 0
        for i in range(1000):
            engine.jobs[0].deliver(Token(i))

        async def other() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task, pieces = asyncio.ensure_future(other()), 0
        async for piece in choices.pieces():
            pieces += len(piece.tokens)
            if pieces == 1000:
                break
        task.cancel()
        return turns, len(engine.jobs)

    turns, jobs = asyncio.run(read())
    assert turns >= 1000 // 32 and jobs == 4


def test_what_was_made_before_a_failure_is_given_out_first():
    async def read() -> list:
        engine, found = Engine(), []
        choices = made(engine)
        engine.jobs[1].deliver(Token(0))
        engine.jobs[1].deliver(End("error", "broken"))
        with pytest.raises(ApiError, match="broken"):
            async for piece in choices.pieces():
                found.append(piece)
        assert set(engine.cancelled) == {engine.jobs[0], engine.jobs[2], engine.jobs[3]}
        return found

    (piece,) = asyncio.run(read())
    assert (piece.index, piece.text, piece.finish) == (1, "a", None)


def test_no_event_of_several_threads_is_lost_or_stays_unread():
    async def read() -> list[int]:
        engine = Engine()
        choices = made(engine)

        def make(job) -> None:
            for i in range(5000):
                job.deliver(Token(i))
            job.deliver(End("length"))

        threads = [threading.Thread(target=make, args=(job,)) for job in engine.jobs]
        for thread in threads:
            thread.start()
        counts = [0] * 4
        async for piece in choices.pieces():
            counts[piece.index] += len(piece.tokens)
        return counts

    assert asyncio.run(asyncio.wait_for(read(), 120)) == [5000] * 4


def test_the_loop_is_woken_once_for_all_requests_that_have_news():
    async def read() -> tuple[int, list[list[int]]]:
        loop, engine, bell, woken = asyncio.get_running_loop(), Engine(), Bell(), 0
        requests = [
            Choices(engine, Letters(), [[1]], Wanted(100, Sampling()), bell) for _ in range(5)
        ]
        wake = loop.call_soon_threadsafe

        def counted(*args: object) -> asyncio.Handle:
            nonlocal woken
            woken += 1
            return wake(*args)

        loop.call_soon_threadsafe = counted
        found: list[list[int]] = [[] for _ in requests]

        async def take(number: int) -> None:
            async for piece in requests[number].pieces():
                found[number] += [token.id for token in piece.tokens]

        tasks = [asyncio.ensure_future(take(number)) for number in range(5)]
        for step in range(20):
            for job in engine.jobs:
                job.deliver(Token(step))
            while any(len(tokens) <= step for tokens in found):
                await asyncio.sleep(0)
        for job in engine.jobs:
            job.deliver(End("length"))
        await asyncio.gather(*tasks)
        return woken, found

    woken, found = asyncio.run(asyncio.wait_for(read(), 60))
    assert found == [list(range(20))] * 5
    assert woken == 21  # for every step, and for the ends
