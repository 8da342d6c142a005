"""Programs own the weights they read: swaps are safe, and nothing keeps old weights."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import torch

from rm_abstract import _core, device

device.load_plugins()

SERVE_AND_SWAP = """
import sys, threading, time
import torch
import rm_abstract
from torch import nn

rm_abstract.init("cpu", compile_options={"pack_weights": "never"})
WIDTH = 1024
model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).eval()
x = torch.ones(4, WIDTH)
stop = threading.Event()
served, failed = [0, 0], []

def serve(i):
    try:
        with torch.no_grad():
            while not stop.is_set():
                y = model(x)
                values = y.unique()
                # All elements of a weight are equal, so all results are, whichever weight it was.
                assert len(values) == 1 or served[i] == 0, values
                served[i] += 1
    except BaseException as error:
        failed.append(repr(error))

def weight(value):
    return nn.Parameter(torch.full((WIDTH, WIDTH), value), requires_grad=False)

model[0].weight = weight(1.0)
with torch.no_grad():
    for _ in range(4):
        model(x)  # compiled and compared
threads = [threading.Thread(target=serve, args=(i,)) for i in range(2)]
for t in threads: t.start()
wanted, swaps = int(sys.argv[1]), 0
while (swaps < wanted or sum(served) < wanted) and not failed:
    swaps += 1
    if swaps % 2:
        model[0].weight = weight(1.0 / swaps)
    else:
        model[0].weight.data = torch.full((WIDTH, WIDTH), 1.0 / swaps)  # another storage
    with torch.no_grad():
        y = model(x)
    assert torch.allclose(y, torch.full_like(y, WIDTH / swaps)), (swaps, y[0, 0])
    time.sleep(0.005)
stop.set()
for t in threads: t.join()
assert not failed, failed
print(rm_abstract.explain().routed)
"""


def test_weights_may_be_replaced_while_other_threads_serve(tmp_path: Path):
    swaps = 400 if os.environ.get("RM_HEAVY") == "1" else 20
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", SERVE_AND_SWAP, str(swaps)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) > 0, "no call was served"


def test_runs_and_swaps_of_one_program_in_many_threads():
    wide = TEXT.replace("8,8]", "512,512]").replace(",8]", ",512]")
    program = _core.Program(wide, {"w": torch.ones(512, 512)}, ["cpu"], "", "later")
    x, stop, failed, served = torch.ones(4, 512), threading.Event(), [], [0, 0]

    def serve(number: int) -> None:
        while not stop.is_set():
            values = program.run([x[: 1 + served[number] % 4]])[0].unique()
            if len(values) != 1 or values.item() not in (512, 1024):
                failed.append(values)
            served[number] += 1

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    swaps = 0
    while swaps < 100 or min(served) < 20:
        # Nobody but the program keeps the new tensor.
        program.update_weights({"w": torch.full((512, 512), 1.0 + swaps % 2)})
        swaps += 1
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed, failed[:3]


TEXT = """rmir 1
sym s0 [1,64]
input %0 "x" : f32[s0,8]
weight %1 "w" : f32[8,8]
%2 = linear(%0, %1) : f32[s0,8]
return %2
"""


def test_a_program_keeps_the_storage_it_was_given_and_drops_it_with_the_weights():
    weight = torch.full((8, 8), 2.0)
    address = weight.data_ptr()
    program = _core.Program(TEXT, {"w": weight}, ["cpu"])
    x = torch.ones(3, 8)
    assert (program.run([x])[0] == 16).all()
    weight.data = torch.full((8, 8), 5.0)  # the tensor is given other memory
    del weight
    others = [torch.full((8, 8), -1.0) for _ in range(64)]  # they would take freed memory
    assert (program.run([x])[0] == 16).all()
    assert all(other.data_ptr() != address for other in others)
    program.update_weights({"w": torch.full((8, 8), 3.0)})
    assert (program.run([x])[0] == 24).all()


def watched(value: float) -> tuple[torch.Tensor, weakref.ref[np.ndarray]]:
    """A tensor and a reference to the array whose memory it has."""
    array = np.full((8, 8), value, np.float32)
    return torch.from_numpy(array), weakref.ref(array)


def test_replaced_weights_are_freed_at_once():
    first, first_memory = watched(2)
    program = _core.Program(TEXT, {"w": first}, ["cpu"])
    del first
    assert (program.run([torch.ones(3, 8)])[0] == 16).all()
    second, second_memory = watched(3)
    assert first_memory() is not None
    program.update_weights({"w": second})
    assert first_memory() is None
    del second
    assert (program.run([torch.ones(3, 8)])[0] == 24).all()
    assert second_memory() is not None
    del program
    assert second_memory() is None


def test_old_weights_are_freed_while_new_ones_are_packed():
    first, first_memory = watched(2)
    program = _core.Program(TEXT, {"w": first}, ["cpu"], "", "later")
    del first
    for _ in range(2):
        program.run([torch.ones(3, 8)])  # packing is under way
    program.update_weights({"w": torch.ones(8, 8)})
    program.wait_for_packing()
    assert first_memory() is None
