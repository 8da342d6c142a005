"""`python -m rm_abstract.engines.capturing`: captures and compiles what its parent asks for.

Jobs come through standard input, answers go through standard output; what was made goes into the
compile cache. Invariant: it ends with its parent, whatever way that ends.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import IO

from rm_abstract.base.framing import read_frame, write_frame


class _Silent:
    """engines.context.Events of a process that serves no calls."""

    def failed(self, error: Exception) -> None: ...
    def served_by_original(self) -> None: ...
    def uncount(self, calls: int) -> None: ...
    def detach(self) -> None: ...
    def sources(self) -> None: ...


def carry_out(data: bytes) -> dict[str, str]:
    """{} when the program is in the cache, else {"code", "message"}."""
    from rm_abstract import session
    from rm_abstract.base.config import Settings
    from rm_abstract.base.decline import Decline
    from rm_abstract.base.errors import Error
    from rm_abstract.capture import budget
    from rm_abstract.engines import capture_job
    from rm_abstract.engines.native import create_engine
    from rm_abstract.guards import identity, sources

    # Nobody waits for this process: its captures have more time than those in a call.
    budget.FIRST_S, budget.SECOND_S, budget.WAIT_S = 60.0, 60.0, 300.0
    budget.SAY_AFTER_S = threading.TIMEOUT_MAX
    ours = None
    try:
        job = capture_job.unpack(data)
        # A session with its hooks in place: they are part of what a module means.
        ours = session.Session(Settings(job.settings).replaced("compile_mode", "sync"))
        ours.install()
        engine = create_engine(job.module, ours.engine_context(_Silent()))
        found = sources.of_module(job.module)
        other = identity.difference(job.identity, engine.artefacts.identity_of(job.module), found)
        if other:
            why = f"the module means something else in another process: {other}"
            return {"code": capture_job.NOT_POSSIBLE, "message": why}
        engine.artefacts.adopt(job.identity)
        engine.store(job.call, job.pattern)
    except (Error, Decline) as error:
        return {"code": error.code or capture_job.NOT_POSSIBLE, "message": str(error)}
    except Exception as error:  # a class that cannot be imported here, and the like
        message = f"{type(error).__name__}: {error}"
        return {"code": capture_job.NOT_POSSIBLE, "message": message}
    finally:
        if ours is not None:
            ours.close()
    return {}


def _read(stream: IO[bytes], jobs: queue.SimpleQueue[bytes]) -> None:
    while (data := read_frame(stream)) is not None:
        jobs.put(data)
    os._exit(0)  # the parent closed its end, or is gone


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what imported code prints is no answer
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(sys.stdin.buffer, jobs), daemon=True)
    reader.start()
    os.nice(5)  # the parent goes first where they share a processor
    import torch

    torch.set_num_threads(1)  # the parent computes meanwhile
    while True:
        write_frame(answers, json.dumps(carry_out(jobs.get())).encode())


if __name__ == "__main__":
    main()
