"""What goes wrong, by REBEL_FAULT. No function of `rebel`: the tests' switches.

compile_crash, compile_hang, compile_slow (REBEL_COMPILE_S seconds), compile_error, unsupported,
compile_garbage, compile_wrong: while compiling.
load_crash, load_hang, out_of_memory, version_skew: while a runtime is made.
run_crash, run_hang, run_error, device_lost, wrong_numbers: while a program runs.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def happens(name: str) -> bool:
    if os.environ.get("REBEL_FAULT") != name:
        return False
    once = os.environ.get("REBEL_FAULT_ONCE")
    if not once:
        return True
    if Path(once).exists():
        return False
    Path(once).touch()
    return True


def crash_or_hang(stage: str) -> None:
    """Source: public reports of librbln.so ending its process with SIGSEGV; hangs: public notes on
    devices wedged by killed processes."""
    if happens(f"{stage}_crash"):
        print(f"rebel: {stage} ends with a signal", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if happens(f"{stage}_hang"):
        time.sleep(3600)
