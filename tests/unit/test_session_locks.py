"""Whoever ends a session waits for threads that compile: they must get what they need meanwhile."""

from __future__ import annotations

import os
import threading

import rm_abstract as rm
from rm_abstract import session
from rm_abstract.base.tracing import ONE_AT_A_TIME


def test_a_thread_that_compiles_gets_its_services_while_the_session_is_being_ended() -> None:
    with rm.init("cpu", fallback="allow") as active:
        made = threading.Event()

        def compile_something() -> None:
            context = active.engine_context(None)  # type: ignore[arg-type]
            context.open_cache()
            context.kernel_checks()
            context.workers("sim", b"")
            made.set()

        with session.lock():  # as shutdown() does while it waits
            thread = threading.Thread(target=compile_something, daemon=True)
            thread.start()
            in_time = made.wait(60)
        thread.join()
        assert in_time


def test_a_child_does_not_wait_for_a_capture_of_its_parent() -> None:
    with ONE_AT_A_TIME:
        child = os.fork()
        if child == 0:
            os._exit(0 if ONE_AT_A_TIME.acquire(timeout=5) else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert not ONE_AT_A_TIME.locked()
