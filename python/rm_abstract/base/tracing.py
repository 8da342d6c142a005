"""The lock around everything that torch traces for us."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

# torch.export and dynamo keep global state, and each puts back what it found: of two at once both
# may fail, and torch.compiler's flags can stay set, which turns every later call away (RM103).
ONE_AT_A_TIME = threading.Lock()
# A thread that traced when the process forked does not exist in the child.
os.register_at_fork(after_in_child=ONE_AT_A_TIME._at_fork_reinit)  # type: ignore[attr-defined]
_device_guard_kept = False


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Held while torch traces. No two threads are inside at once."""
    with ONE_AT_A_TIME:
        _keep_device_guard()
        yield


def _keep_device_guard() -> None:
    """Lets a thread that never ends be the first to use fake tensors.

    A torch that was built for CUDA, on a machine without a GPU, then puts a stand-in for the CUDA
    device guard into a variable of that thread, and all threads use it. When the thread has ended,
    the next fake tensor reads freed memory and the process dies (torch 2.11.0+cu130).
    """
    global _device_guard_kept
    import torch

    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if _device_guard_kept or ensure is None:
        return
    _device_guard_kept = True
    built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    if not built or torch.cuda.is_available():
        return
    if threading.current_thread() is threading.main_thread():
        ensure()
        return
    done = threading.Event()

    def keep() -> None:
        ensure()
        done.set()
        threading.Event().wait()  # for the rest of the process

    threading.Thread(target=keep, name="rm_abstract device guard", daemon=True).start()
    done.wait()
