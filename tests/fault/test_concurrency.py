"""Many processes and threads on one directory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from fault_support import HERE, SOAK
from fault_worker import content, is_right, key

from rm_abstract import _core

pytestmark = pytest.mark.timeout(7200 if SOAK else 300)

PROCESSES = 32
KEYS = 20


def test_32_processes_compile_each_of_20_keys_once(workers):
    numbers = list(range(KEYS))
    started = []
    for index in range(PROCESSES):
        turn = index * 7 % KEYS
        order = numbers[turn:] + numbers[:turn]
        started.append(workers.start(",".join(map(str, order)), "--compile-ms", "20"))
    for process in started:
        ran = workers.finish(process)
        assert ran.returncode == 0, ran.stderr
        assert len(ran.results) == KEYS
        assert "wrong" not in ran.sources
    assert sorted(workers.compiles()) == numbers


def test_a_second_process_misses_nothing(workers):
    workers.run("1,2,3")
    warm = workers.run("1,2,3", "--counters")
    assert warm.sources == ["disk"] * 3
    assert warm.counters["miss"] == 0
    assert warm.counters["compile"] == 0


def test_readers_against_a_thrashing_evictor_are_never_wrong(workers, own_cache: Path):
    numbers = ",".join(map(str, range(12)))
    readers = [workers.start(numbers, "--forever") for _ in range(16)]
    mapped = [workers.start("100,101", "--forever", "--large") for _ in range(2)]
    cache = _core.cache.CompileCache()
    evicted, end = 0, time.monotonic() + (60 if SOAK else 6)
    while time.monotonic() < end:
        evicted += cache.collect(max_size=40_000, min_age=-100)["evicted"]
    for process in readers + mapped:
        process.kill()
    results = [workers.finish(process) for process in readers + mapped]
    assert evicted > 20
    assert sum(len(ran.results) for ran in results) > 100
    assert all("wrong" not in ran.sources for ran in results)
    assert all("Traceback" not in ran.stderr for ran in results)


def test_threads_and_forks_together_neither_hang_nor_mix(own_cache: Path):
    program = textwrap.dedent("""
        import os, sys, threading
        sys.path.insert(0, sys.argv[1])
        from rm_abstract import _core
        from fault_worker import content, is_right, key

        cache = _core.cache.CompileCache()
        stop = threading.Event()

        def use(number):
            make = lambda: {"program": content(number, False), "log": f"made {number}"}
            entry, _ = cache.get_or_compile(key(number), make)
            return is_right(entry, number, False)

        def hammer(start):
            number = start
            while not stop.is_set():
                assert use(number % 40)
                number += 1

        threads = [threading.Thread(target=hammer, args=(i * 10,)) for i in range(4)]
        for thread in threads:
            thread.start()
        failures = 0
        for number in range(30):
            child = os.fork()
            if child == 0:
                os._exit(0 if use(1000 + number) and use(number) else 1)
            failures += os.waitpid(child, 0)[1] != 0
        stop.set()
        for thread in threads:
            thread.join()
        sys.exit(failures)
    """)
    command = [sys.executable, "-W", "ignore", "-c", program, str(HERE)]
    subprocess.run(command, check=True, timeout=120)


def test_many_threads_share_one_failing_compile_and_its_exception(own_cache: Path):
    cache = _core.cache.CompileCache()
    barrier = threading.Barrier(8)
    seen: list[BaseException] = []

    def fail() -> dict[str, bytes]:
        time.sleep(0.2)
        raise LookupError("no such operator")

    def ask() -> None:
        barrier.wait()
        try:
            cache.get_or_compile(key(1), fail)
        except LookupError as error:
            seen.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    good = {"program": content(1, False), "log": "made 1"}
    assert is_right(cache.get_or_compile(key(1), lambda: good)[0], 1, False)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_a_hit_does_not_wait_for_a_compile_of_another_key(own_cache: Path):
    cache = _core.cache.CompileCache()
    cache.publish(key(1), {"program": content(1, False), "log": "made 1"})
    compiling, finish = threading.Event(), threading.Event()

    def slow() -> dict[str, bytes]:
        compiling.set()
        finish.wait(30)
        return {"program": b""}

    thread = threading.Thread(target=lambda: cache.get_or_compile(key(2), slow))
    thread.start()
    compiling.wait(30)
    assert cache.lookup(key(1)) is not None
    assert not finish.is_set()
    finish.set()
    thread.join()
