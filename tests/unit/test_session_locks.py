"""Whoever ends a session waits for threads that compile: they must get what they need meanwhile."""

from __future__ import annotations

import threading

import rm_abstract as rm
from rm_abstract import session


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
