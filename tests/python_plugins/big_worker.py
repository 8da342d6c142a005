"""The worker's side of rm_backend_big.py."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from small_worker import Loaded

from rm_abstract.worker.python_backend import Program
from rm_abstract.worker.tensors import Tensor

PIECE = os.urandom(1 << 20)


def removed_slowly(*given: Any, **named: Any) -> None:
    time.sleep(60)


class Worker:
    def __init__(self, device: int) -> None:
        self._folder: str | None = None

    def compile(
        self,
        program: Program,
        options: Mapping[str, str],
        progress: Callable[[float, str], None],
    ) -> Path:
        if self._folder is not None:
            shutil.rmtree(self._folder)
        self._folder = tempfile.mkdtemp(prefix="rm-big-")
        is_folder = os.environ["BIG_FORM"] == "folder"
        path = Path(self._folder, "parts" if is_folder else "program.big")
        file = path
        if is_folder:
            path.mkdir()
            (path / "inner").mkdir()
            (path / "program.rmir").write_bytes(program.code)
            file = path / "inner" / "weights.bin"
        with file.open("wb") as out:
            if not is_folder:
                out.write(len(program.code).to_bytes(8, "little") + program.code)
            for _ in range(int(os.environ["BIG_MIB"])):
                out.write(PIECE)
        return path

    def load(self, artefact: Path, weights: Mapping[str, Tensor]) -> Loaded:
        least = int(os.environ["BIG_MIB"]) << 20
        if artefact.is_dir():
            code = (artefact / "program.rmir").read_bytes()
            size = (artefact / "inner" / "weights.bin").stat().st_size
        else:
            assert artefact.name == "program.big"
            with artefact.open("rb") as file:
                code = file.read(int.from_bytes(file.read(8), "little"))
            size = artefact.stat().st_size
        assert size >= least, f"{size} bytes of {least}"
        print(f"big: loaded {artefact}", file=sys.stderr, flush=True)
        if os.environ.get("BIG_END") == "slow":
            shutil.rmtree = removed_slowly
        arrays = {name: tensor.numpy() for name, tensor in weights.items()}
        return Loaded(code.decode(), arrays, 1.0)
