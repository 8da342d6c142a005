"""The first use of fake tensors belongs to a thread that outlives every other user of them."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from rm_abstract.base import tracing

SCRIPT = """
import threading
import torch
from torch._subclasses import FakeTensorMode
from rm_abstract.base.tracing import tracing

def fake():
    with tracing(), FakeTensorMode():
        torch.ones(2)

for _ in range(20):
    thread = threading.Thread(target=fake)
    thread.start()
    thread.join()
kept = [bytearray(100) for _ in range(10000)]
fake()
print("alive")
"""


def test_fake_tensors_of_a_thread_that_ended_leave_the_process_alive() -> None:
    """Dies without the guard where torch is a CUDA build and the machine has no GPU."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-2000:]


@pytest.mark.parametrize("in_main", [True, False])
def test_the_device_guard_is_set_once_by_a_thread_that_stays(
    monkeypatch: pytest.MonkeyPatch, in_main: bool
) -> None:
    by: list[threading.Thread] = []
    ensure = "_ensureCUDADeviceGuardSet"
    monkeypatch.setattr(torch._C, ensure, lambda: by.append(threading.current_thread()), False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tracing, "_device_guard_kept", False)

    def trace() -> None:
        for _ in range(2):
            with tracing.tracing():
                pass

    thread = threading.Thread(target=trace)
    if in_main:
        trace()
    else:
        thread.start()
        thread.join()
    (first,) = by
    assert first.is_alive() and (first is threading.main_thread()) == in_main
