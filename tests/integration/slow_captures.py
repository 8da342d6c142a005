"""Stands in for the process that captures: takes a job and never answers."""

import sys
import threading
import time

from rm_abstract.base.framing import read_frame


def _wait_for_the_end() -> None:
    read_frame(sys.stdin.buffer)
    read_frame(sys.stdin.buffer)  # None: the parent is gone


reader = threading.Thread(target=_wait_for_the_end)
reader.start()
reader.join()
time.sleep(0)
