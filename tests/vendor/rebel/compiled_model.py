"""`RBLNCompiledModel` and the file it is saved as.

The vendor's format is not public; this one is a zip of JSON and a program of torch.export.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rebel import faults
from rebel.core.exception import RBLNRuntimeError

if TYPE_CHECKING:
    from rebel.runtime import Runtime

_VERSION = "0.12.0"


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
                meta = json.loads(archive.read("meta.json"))
                program = archive.read("program.pt2")
        except (zipfile.BadZipFile, KeyError, ValueError) as error:
            # docs.rbln.ai, error codes: LOADING_ is the stage of reading the file.
            raise RBLNRuntimeError(f"LOADING_INVALID_FILE: {error}") from error
        inputs = [Input(n, tuple(s), getattr(torch, d)) for n, s, d in meta["inputs"]]
        self._fill(program, inputs, meta["static"], meta["npu"], meta["devices"], meta["wrong"])
        self._version = meta["version"]

    @classmethod
    def _of(
        cls,
        program: Any,
        inputs: Sequence[Input],
        static: Sequence[str],
        npu: str,
        devices: int,
        is_wrong: bool,
    ) -> RBLNCompiledModel:
        made = cls.__new__(cls)
        data = io.BytesIO()
        torch.export.save(program, data)
        made._fill(data.getvalue(), inputs, static, npu, devices, is_wrong)
        made._version = _VERSION
        return made

    def _fill(
        self,
        program: bytes,
        inputs: Sequence[Input],
        static: Sequence[str],
        npu: str,
        devices: int,
        is_wrong: bool,
    ) -> None:
        self._program, self._inputs, self._static = program, list(inputs), list(static)
        self._npu, self._devices, self._is_wrong = npu, devices, is_wrong

    def save(self, path: str | os.PathLike[str]) -> None:
        """Source: docs.rbln.ai: writes the `.rbln` file."""
        meta = {
            "version": "0.1.0" if faults.happens("version_skew") else self._version,
            "npu": self._npu,
            "devices": self._devices,
            "inputs": [(i.name, i.shape, str(i.dtype).partition(".")[2]) for i in self._inputs],
            "static": self._static,
            "wrong": self._is_wrong,
        }
        if faults.happens("compile_garbage"):
            Path(path).write_bytes(b"\x7fRBLN not whole")
            return
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in (
                ("meta.json", json.dumps(meta).encode()),
                ("program.pt2", self._program),
            ):
                archive.writestr(zipfile.ZipInfo(name), data)

    def create_runtime(self, *, device: int = 0, tensor_type: str = "np") -> Runtime:
        """Source: docs.rbln.ai."""
        from rebel.runtime import Runtime

        return Runtime(self, tensor_type=tensor_type, device=device)
