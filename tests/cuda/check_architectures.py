"""Compiles the CUDA sources for every architecture the modules claim. Needs nvcc, no GPU.

    python tests/cuda/check_architectures.py              # sm_80, what has code for newer cards
    python tests/cuda/check_architectures.py --all        # every source for every architecture
    python tests/cuda/check_architectures.py --arch 89 gemv sdpa

A source that uses an instruction of sm_90 without a guard fails here: ptxas refuses it for sm_80.
Prints one line a source and ends with 1 where any failed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

OPS = Path(__file__).resolve().parents[2] / "backends" / "cuda" / "ops"
ARCHITECTURES = ("80", "86", "89", "90a", "100")
NEWER = re.compile(
    r"_sm90a?\.cuh|__CUDA_ARCH__|__CUDA_ARCH_FEAT|async_shim|launch_shim|cooperative_groups"
)
SLOW = ("sdpa/launcher.cu",)  # minutes; its guarded header is in no other source: --all takes it


def sources(folders: list[str], everything: bool) -> list[Path]:
    found = sorted(OPS.glob("*/*.cu"))
    if folders:
        found = [path for path in found if path.parent.name in folders]
    if everything or folders:
        return found
    return [
        path
        for path in found
        if NEWER.search(path.read_text()) and str(path.relative_to(OPS)) not in SLOW
    ]


def compile_one(nvcc: str, path: Path, arch: str) -> tuple[bool, str]:
    start = time.perf_counter()
    target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    done = subprocess.run(
        [nvcc, target, "-std=c++20", "-O1", "-cubin", "-o", "/dev/null", f"-I{OPS}", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    name = f"sm_{arch} {path.relative_to(OPS)} {time.perf_counter() - start:.0f} s"
    if done.returncode == 0:
        return True, f"ok     {name}"
    wrong = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line]
    return False, "\n    ".join([f"FAILED {name}", *wrong[:5]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", help="operators, all by default")
    parser.add_argument("--all", action="store_true", help="every source, every architecture")
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, default=[])
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.exit("nvcc was not found: nothing was compiled")
    architectures = given.arch or (ARCHITECTURES if given.all else ("80",))
    work = [(path, arch) for arch in architectures for path in sources(given.folders, given.all)]
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for good, line in pool.map(lambda item: compile_one(nvcc, *item), work):
            failed += not good
            print(line, flush=True)
    print(f"{len(work)} compiled, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
