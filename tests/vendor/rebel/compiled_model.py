"""`RBLNCompiledModel` and the file it is saved as.

The vendor's format is not public; this one is a zip of JSON and a program of torch.export.
"""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rebel import faults
from rebel.core.exception import RBLNRuntimeError

if TYPE_CHECKING:
    from rebel.runtime import Runtime

VERSION = "0.12.0"


@dataclass(frozen=True)
class Input:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class RBLNCompiledModel:
    """Source: docs.rbln.ai 0.12: what compile_from_* gives, or read from a `.rbln` file by its
    path; TypeError for what is no path."""

    def __init__(self, compiled_model: str | os.PathLike[str]) -> None:
        if not isinstance(compiled_model, (str, os.PathLike)):
            raise TypeError(f"expected a path, got {type(compiled_model).__name__}")
        path = Path(compiled_model)
        if not path.is_file():  # text: public logs
            raise RBLNRuntimeError("LOADING_FILE_NOT_FOUND: The specified file does not exist.")
        try:
            with zipfile.ZipFile(path) as archive:
                self._meta = json.loads(archive.read("meta.json"))
                self._program = archive.read("program.pt2")
        except (zipfile.BadZipFile, KeyError, ValueError) as error:
            # docs.rbln.ai, error codes: LOADING_ is the stage of reading the file.
            raise RBLNRuntimeError(f"LOADING_INVALID_FILE: {error}") from error

    @classmethod
    def _of(cls, program: Any, meta: dict[str, Any]) -> RBLNCompiledModel:
        made = cls.__new__(cls)
        data = io.BytesIO()
        torch.export.save(program, data)
        made._program, made._meta = data.getvalue(), {"version": VERSION, **meta}
        return made

    def _inputs(self) -> list[Input]:
        return [Input(n, tuple(s), getattr(torch, d)) for n, s, d in self._meta["inputs"]]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Source: docs.rbln.ai: writes the `.rbln` file."""
        meta = dict(self._meta)
        if faults.happens("version_skew"):
            meta["version"] = "0.1.0"
        if faults.happens("compile_garbage"):
            Path(path).write_bytes(b"\x7fRBLN not whole")
            return
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(zipfile.ZipInfo("meta.json"), json.dumps(meta).encode())
            archive.writestr(zipfile.ZipInfo("program.pt2"), self._program)

    def create_runtime(self, *, device: int = 0, tensor_type: str = "np") -> Runtime:
        """Source: docs.rbln.ai."""
        from rebel.runtime import Runtime

        return Runtime(self, tensor_type=tensor_type, device=device)

    # ---- memory on the device: optimum-rbln's modeling_attention_utils.py asks and sets it -------

    def get_alloc_per_chiplet_by_key(self) -> dict[str, list[list[int]]]:
        """Bytes by kind, a node, a chiplet; DramTensor are the tensors that stay."""
        stay = sum(sum(map(sum, rows)) for rows in self.exp_get_dram_tensor_sizes().values())
        return {"Weight": [[self._meta["weights"]]], "DramTensor": [[stay]]}

    def get_alloc_per_node_by_key(self) -> dict[str, list[int]]:
        return {
            key: [sum(row) for row in rows]
            for key, rows in self.get_alloc_per_chiplet_by_key().items()
        }

    def exp_get_dram_tensor_sizes(self) -> dict[str, list[list[int]]]:
        """Bytes of each tensor that stays, a node, a chiplet."""
        width = {one.name: one.dtype.itemsize for one in self._inputs()}
        return {
            name: [[math.prod(shape) * width[name]]] for name, shape in self._meta["static"].items()
        }

    def exp_multiply_buffer_size(self, factors: dict[str, int]) -> None:
        """So many times the blocks, after compiling."""
        for name, factor in factors.items():
            first, *others = self._meta["static"][name]
            self._meta["static"][name] = [first * factor, *others]

    def exp_rescale_buffer_size(self, ratios: dict[str, tuple[int, int]]) -> None:
        """target / current times the blocks."""
        for name, (target, current) in ratios.items():
            first, *others = self._meta["static"][name]
            self._meta["static"][name] = [first * target // current, *others]
