"""One copy of a weight on the device for all programs that have it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

from rm_abstract.worker.shared_weights import SharedWeights
from rm_abstract.worker.tensors import Tensor


def weight(name: str, digest: bytes, shape: tuple[int, ...] = (2,)) -> Tensor:
    return Tensor(name, "f32", shape, memoryview(bytes(8)), digest)


def test_what_holds_the_same_is_made_once_and_goes_with_its_last_program() -> None:
    made: list[str] = []

    def upload(tensor: Tensor) -> str:
        made.append(tensor.name)
        return f"{tensor.name} on the device"

    shared = SharedWeights(upload)
    first, second = shared.of(weight("a", b"1")), shared.of(weight("b", b"1"))
    assert first is second and first.value == "a on the device" and made == ["a"]
    others = [shared.of(weight("a", b"2")), shared.of(weight("a", b"1", (1, 2)))]
    assert len(made) == 3 and all(one is not first for one in others)
    del first
    assert shared.of(weight("c", b"1")) is second and len(made) == 3
    del second
    gc.collect()
    assert shared.of(weight("d", b"1")).value == "d on the device"


def test_what_has_no_digest_is_nobody_elses() -> None:
    shared = SharedWeights(lambda tensor: object())
    assert shared.of(weight("a", b"")) is not shared.of(weight("a", b""))


LIMITED = """
import resource, torch
from rm_abstract import _core
block = _core.worker.Weights([(str(i), "f32", [1 << 20]) for i in range(16)])
pages = int(open("/proc/self/statm").read().split()[0])
room = pages * resource.getpagesize() + (1 << 20)  # for no thread's stack
resource.setrlimit(resource.RLIMIT_AS, (room, room))
block.digest()
print("digested")
"""


def test_digests_are_told_where_no_thread_can_be_started() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.stdout == "digested\n", done.stderr
