"""Workers that crash again and again leave nothing: no process, descriptor, mapping, file or
memory. RM_HEAVY=1: 1,000 of them."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from npu_support import worker_pids
from small_plugins import PLUGINS, small_model

import rm_abstract as rm

HEAVY = os.environ.get("RM_HEAVY") == "1"
TIMES = 1000 if HEAVY else 12


def left() -> dict[str, int]:
    """What this process holds."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": sum("memfd" in line for line in maps),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(Path("/proc/self/task", str(os.getpid()), "children").read_text().split()),
        "files": len(os.listdir(tempfile.gettempdir())),
    }


def resident() -> int:
    """Bytes of this process's own memory, without what it maps of files."""
    (line,) = (s for s in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in s)
    return int(line.split()[1]) << 10


@pytest.mark.timeout(4 * 3600 if HEAVY else 300)
def test_crashes_and_restarts_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By turns it dies while it waits and while it runs."""
    monkeypatch.setenv("RM_BACKEND_PATH", str(PLUGINS))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    others = left()["children"]  # of tests before this one: the standard library keeps helpers
    torch.manual_seed(3)
    model = small_model(8)
    x = torch.randn(3, 8)
    with (
        rm.init("small:0", fallback="error:capture,compile,device,correctness") as session,
        torch.no_grad(),
    ):
        expected = model(x)
        rm.accelerate(model)
        # A stopped worker may have answered already: not every call meets a crash.
        for number in range(2 * TIMES):
            if number == 4:  # everything was made once
                before, memory = left(), resident()
            pids, waits = worker_pids(), number % 2 == 0
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if waits else signal.SIGSTOP)
            timer = end_soon([] if waits else pids)
            torch.testing.assert_close(model(x), expected)
            timer.join()
            (pool,) = session._workers.values()
            if pool.starts >= TIMES:
                break
        after, grown = left(), resident() - memory
        print(f"{pool.starts} starts in {number + 1} calls: {before}, then {after}, {grown} bytes")
        assert pool.starts >= TIMES
    assert left()["children"] <= others
    # The allocator and torch's pools may take a few more mappings and threads, not one a crash.
    assert {k: v for k, v in after.items() if v > before[k] + 2} == {}, (before, after)
    assert grown < 16 << 20


def end_soon(pids: list[int]) -> threading.Timer:
    """Kills stopped workers after the call that comes now has asked them."""

    def end() -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(0.02, end)
    timer.start()
    return timer
