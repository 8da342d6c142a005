"""docs/kernels.md is what docs/kernels_run.tsv says, and no row is left out of it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType


def generator(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_kernels", repository / "docs/gen_kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_kernels_is_current(repository: Path):
    script = repository / "docs" / "gen_kernels.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_newer_run_replaces_an_older_one_and_a_missing_library_does_not(repository: Path):
    gen = generator(repository)
    ran = ("gemm_x", "gemm", "avx2", "P", "4", "passed")
    absent = ("gemm_x", "gemm", "avx2", "P", "0", "not run: no library")
    failed = ("gemm_x", "gemm", "avx2", "P", "5", "FAILED")
    assert gen.merged([ran], [absent]) == [ran]
    assert gen.merged([absent], [ran]) == [ran]
    assert gen.merged([ran], [failed]) == [failed]
    assert "**FAILED**: `gemm_x` with avx2 on P." in gen.page([failed])
    assert "never ran on hardware: `gemm_x`" in gen.page([absent])
