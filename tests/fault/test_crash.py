"""Processes that die, stop or run into limits while they publish."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fault_support import SOAK, objects

pytestmark = pytest.mark.timeout(7200 if SOAK else 300)

STEPS = ["open", "write", "fsync", "before_link", "after_link"]
KILLS = 2000 if SOAK else 40


def test_a_kill_at_any_step_of_a_publish_leaves_nothing_wrong(workers, preload, own_cache: Path):
    for round_ in range(KILLS // len(STEPS)):
        for step in STEPS:
            large = ["--large"] if round_ % 5 == 0 else []
            number = str(round_ % 7 if not large else 100)
            for entry in objects(own_cache):
                entry.unlink()
            killed = workers.run(number, *large, env=preload({"RM_KILL_AT": step}))
            what = f"round {round_}, {step}: {killed}"
            assert killed.returncode == -signal.SIGKILL, what
            assert len(objects(own_cache)) == (1 if step == "after_link" else 0), what
            after = workers.run(number, *large)
            expected = "disk" if step == "after_link" else "compiled"
            assert after.sources == [expected], f"{what}, then {after}"
            assert list((own_cache / "v1" / "tmp").iterdir()) == [], what  # no name is left


def test_kills_at_random_moments_are_never_followed_by_a_wrong_answer(
    workers, own_cache: Path, seed: int
):
    rng = random.Random(seed)
    numbers = "1,2,3,4,5,6"
    for _ in range(KILLS // 4):
        process = workers.start(numbers, "--repeat", "1000")
        process.stdout.readline()  # it is past its start-up and at work
        time.sleep(rng.uniform(0, 0.02))
        process.kill()
        killed = workers.finish(process)
        assert killed.returncode == -signal.SIGKILL, killed  # not a crash of its own
        assert "wrong" not in killed.sources, killed
        for entry in rng.sample(objects(own_cache), k=min(3, len(objects(own_cache)))):
            entry.unlink()
        after = workers.run(numbers)
        assert len(after.results) == 6 and "wrong" not in after.sources, after
    temporary = list((own_cache / "v1" / "tmp").iterdir())
    assert len(temporary) <= KILLS // 4  # last_miss records of killed writers; the reaper's limit


def test_the_lock_of_a_killed_holder_is_free_at_once(workers, own_cache: Path):
    holder = workers.start("1", "--compile-ms", "60000")
    wait_for(lambda: workers.compiles() == [1])
    waiter = workers.start("1")
    time.sleep(0.3)
    assert workers.compiles() == [1]  # it waits
    holder.kill()
    started = time.monotonic()
    assert workers.finish(waiter).sources == ["compiled"]
    assert time.monotonic() - started < 50  # the holder would have taken 60
    assert workers.compiles() == [1, 1]


def test_a_stopped_holder_is_waited_for_up_to_the_timeout_and_loses(workers, own_cache: Path):
    holder = workers.start("1", "--compile-ms", "3000", "--counters")
    wait_for(lambda: workers.compiles() == [1])
    holder.send_signal(signal.SIGSTOP)
    other = workers.run("1", "--counters", env={"RM_CACHE_LOCK_TIMEOUT": "1s"})
    assert other.sources == ["compiled"]
    assert other.counters["lock_timeout"] == 1
    holder.send_signal(signal.SIGCONT)
    ran = workers.finish(holder)
    assert ran.sources == ["compiled"]
    assert ran.counters["store_lost"] == 1


@pytest.mark.parametrize("step", ["open", "write", "fsync", "link"])
@pytest.mark.parametrize("code", ["ENOSPC", "EIO", "EROFS", "EDQUOT"])
def test_a_failing_store_is_counted_and_the_answer_is_right(
    workers, preload, own_cache: Path, step: str, code: str
):
    env = preload({"RM_FAIL_AT": step, "RM_FAIL_ERRNO": str(getattr(errno, code))})
    ran = workers.run("1,2", "--counters", env=env)
    assert ran.returncode == 0
    assert ran.sources == ["compiled", "compiled"]
    assert ran.counters[f"store_fail{{{code}}}"] == 2
    assert ran.stderr.count("not kept") == 1  # said once
    assert objects(own_cache) == []
    assert workers.run("1,2").sources == ["compiled", "compiled"]


@pytest.mark.parametrize("code", ["EOPNOTSUPP", "EISDIR"])
def test_a_file_system_without_unnamed_files_gets_named_ones(
    workers, preload, own_cache: Path, code: str
):
    env = preload({"RM_FAIL_AT": "open", "RM_FAIL_ERRNO": str(getattr(errno, code))})
    assert workers.run("1", env=env).sources == ["compiled"]
    assert workers.run("1").sources == ["disk"]
    assert list((own_cache / "v1" / "tmp").iterdir()) == []


def test_a_file_size_limit_neither_kills_nor_corrupts(workers, own_cache: Path):
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; a C++ host may not
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    ran = workers.run("100", "--large", "--counters", preexec_fn=limit)
    assert ran.returncode == 0
    assert ran.sources == ["compiled"]
    assert ran.counters["store_fail{EFBIG}"] == 1
    assert workers.run("100", "--large").sources == ["compiled"]


def test_a_full_file_system_is_survived(workers, tmp_path: Path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs privileges")
    try:
        env = {"RM_CACHE_DIR": str(small / "cache")}
        ran = workers.run("1,100,2", "--large", "--counters", env=env)
        assert ran.sources == ["compiled"] * 3
        assert ran.counters["store_fail{ENOSPC}"] == 3
        assert workers.run("1,2", env=env).sources == ["compiled", "compiled"]
        assert workers.run("1,2", env=env).sources == ["disk", "disk"]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def wait_for(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the worker did not get there"
        time.sleep(0.01)
