"""The barriers of small steps on any machine with a compiler and CUDA's headers, without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from test_alias_rule import HERE, OPS, cuda_headers

SOURCES = [HERE / "small_barriers.cpp", OPS / "small_steps" / "reader.cpp"]


def test_parts_that_no_barrier_separates_share_nothing(tmp_path: Path, seed: int) -> None:
    compiler, headers = shutil.which("c++"), cuda_headers()
    if compiler is None or headers is None:
        pytest.skip("no C++ compiler or no CUDA headers")
    program = tmp_path / "small_barriers"
    include = HERE.parents[1] / "include"
    subprocess.run(
        [compiler, "-std=c++20", "-O1", f"-I{OPS}", f"-I{include}", f"-isystem{headers}",
         *map(str, SOURCES), "-o", str(program)],
        check=True,
    )  # fmt: skip
    done = subprocess.run([program, str(seed)], capture_output=True, text=True, check=False)
    read, barriers, apart, split, wrong, first = map(int, done.stdout.split())
    assert wrong == 0, f"seed {seed}: {wrong} of {read} programs, the first is number {first}"
    assert read > 1000 and barriers > read and apart > read and split > 5  # else little was asked
