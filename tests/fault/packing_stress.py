"""Ends, forks, changes weights and drops programs in the middle of background packing.

``packing_stress.py MODE COUNT SEED`` prints ``done COUNT``; a deadlock shows as a process that
never does. The program has weights that are packed and operators with Scalar arguments, whose
kernels need Python's lock to be prepared and released.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time

import torch

from rm_abstract import _core, device
from rm_abstract.capture.aten_args import encode_call

device.load_plugins()
LAYERS, WIDTH = 6, 512


def program_text() -> str:
    """LAYERS times a linear layer and a hardshrink."""
    hardshrink = torch.ops.aten.hardshrink.default
    _, attributes = encode_call(hardshrink, (torch.zeros(4, WIDTH), 0.25))
    schema_args = attributes["schema_args"].replace("\\", "\\\\").replace('"', '\\"')
    lines = ["rmir 1", "sym s0 [1,64]", f'input %0 "x" : f32[s0,{WIDTH}]']
    lines += [f'weight %{i + 1} "w{i}" : f32[{WIDTH},{WIDTH}]' for i in range(LAYERS)]
    value = 0
    for i in range(LAYERS):
        product, shrunk = LAYERS + 1 + 2 * i, LAYERS + 2 + 2 * i
        lines.append(f"%{product} = linear(%{value}, %{i + 1}) : f32[s0,{WIDTH}]")
        call = f'aten.hardshrink.default(%{product}) {{schema_args="{schema_args}"}}'
        lines.append(f"%{shrunk} = {call} : f32[s0,{WIDTH}]")
        value = shrunk
    return "\n".join([*lines, f"return %{value}", ""])


TEXT = program_text()
WEIGHTS = {f"w{i}": torch.randn(WIDTH, WIDTH) for i in range(LAYERS)}


def packing_program() -> _core.Program:
    """A program whose weights are being packed."""
    program = _core.Program(TEXT, WEIGHTS, ["cpu", "torch"], "", "later")
    for _ in range(2):
        program.run([torch.ones(3, WIDTH)])
    return program


def pause(rng: random.Random) -> None:
    time.sleep(rng.choice([0.0, 0.0005, 0.001, 0.002, 0.004, 0.008]))


def wait_for(child: int) -> None:
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise SystemExit(f"expected a child that ends with 0, got {status}")


def exit_while_packing(rng: random.Random) -> None:
    child = os.fork()
    if child == 0:
        program = packing_program()
        pause(rng)
        assert program is not None
        sys.exit(0)  # as a script ends: exit handlers, then the interpreter
    wait_for(child)


def fork_while_packing(rng: random.Random) -> None:
    program = packing_program()
    pause(rng)
    child = os.fork()
    if child == 0:
        # The child may go on with the program it inherited, in shapes old and new.
        for rows in (3, 5):
            program.run([torch.ones(rows, WIDTH)])
        os._exit(0)
    wait_for(child)


def update_while_packing(rng: random.Random) -> None:
    program = packing_program()
    pause(rng)
    program.update_weights({name: tensor.clone() for name, tensor in WEIGHTS.items()})
    program.run([torch.ones(3, WIDTH)])


def drop_while_packing(rng: random.Random) -> None:
    program = packing_program()
    pause(rng)
    del program
    gc.collect()


MODES = {
    "exit": exit_while_packing,
    "fork": fork_while_packing,
    "update": update_while_packing,
    "del": drop_while_packing,
}


def main() -> None:
    mode, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)  # threads of a pool do not survive a fork
    rng = random.Random(seed)
    for _ in range(count):
        MODES[mode](rng)
    print(f"done {count}", flush=True)


main()
