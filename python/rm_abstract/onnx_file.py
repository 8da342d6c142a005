"""``rm.compile("model.onnx")``: an ONNX file as a compiled program.

The file is read by the core (src/onnx) and mapped here: weights that lie aligned in the file, or in
its files of external data, are used where they lie. The files must not change while it is used.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rm_abstract.base.errors import CompileError, ConfigError, ExecutionError, from_core

if TYPE_CHECKING:
    import torch

    from rm_abstract.session import Session

_OPTIONS = {"precision": "auto"}
_ALIGNED = 64  # bytes: what kernels may load at once


class OnnxExecutable:
    """Called with the graph's inputs, in order or by name; returns its outputs as a list.

    Inputs are torch tensors on the CPU or numpy arrays; outputs are numpy arrays when all inputs
    are. Raises ConfigError for other names, ExecutionError for other types or sizes.
    """

    def __init__(self, path: str | os.PathLike[str], session: Session) -> None:
        from rm_abstract import _core

        if session.device != "cpu":
            raise ConfigError(
                f"[compile] expected device cpu for an ONNX file, got {session.device}; "
                'try device="cpu"'
            )
        self.path = Path(path)
        self._session = session
        mapped = _map(self.path, str(self.path))
        try:
            made = _core.onnx.import_model(mapped.numpy())
            self.input_names: list[str] = list(made["inputs"])
            self.output_names: list[str] = list(made["outputs"])
            weights = _weights(self.path, mapped, made["weights"])
            self._program = _core.Program(
                self._optimised(made["text"]),
                weights,
                ["cpu"],
                session.settings.text("force_kernel"),
                checks=session.kernel_checks(),
            )
        except _core.CoreError as error:
            raise from_core(error, CompileError) from None

    @property
    def device(self) -> str:
        return self._session.device

    def _optimised(self, text: str) -> str:
        """The program after the passes, from the compile cache or made now."""
        from rm_abstract import _core

        cache = self._session.compile_cache()
        builder = cache.new_key("program")
        builder.set("program", text)
        builder.set("options", _OPTIONS)
        builder.set("backend", "onnx cpu")
        entry, _ = cache.get_or_compile(
            builder.finish(), lambda: {"rmir": _core.ir.run_passes(text, _OPTIONS).encode()}
        )
        return bytes(entry.section("rmir")).decode()

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        import torch

        from rm_abstract import _core

        given = self._in_order(args, kwargs)
        tensors = [x if isinstance(x, torch.Tensor) else torch.as_tensor(x) for x in given]
        try:
            results = list(self._program.run([t.detach() for t in tensors]))
        except _core.CoreError as error:
            raise from_core(error, ExecutionError) from None
        if given and not any(isinstance(x, torch.Tensor) for x in given):
            return [r.numpy() for r in results]
        return results

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        names = self.input_names[len(args) :]
        if len(args) > len(self.input_names) or set(names) != set(kwargs):
            raise ConfigError(
                f"[{self.path.name}] expected the inputs {self.input_names}, got {len(args)} by "
                f"position and {sorted(kwargs)} by name"
            )
        return [*args, *(kwargs[name] for name in names)]


def _map(path: Path, said: str) -> torch.Tensor:
    """The file's bytes, mapped privately."""
    import torch

    size = path.stat().st_size if path.is_file() else 0
    if size == 0:
        raise CompileError(
            f"[onnx] expected a file with content, got '{said}'; try another path", code="RM340"
        )
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _weights(
    path: Path, mapped: torch.Tensor, rows: list[dict[str, Any]]
) -> dict[str, torch.Tensor]:
    import torch

    from rm_abstract.worker.dtypes import DTYPES

    files: dict[str, torch.Tensor] = {"": mapped}
    out: dict[str, torch.Tensor] = {}
    for row in rows:
        dtype, shape, start = DTYPES[row["dtype"]], row["shape"], row["offset"]
        size = dtype.itemsize
        for d in shape:
            size *= d
        if row["decoded"]:
            piece = torch.frombuffer(bytearray(row["decoded"]), dtype=torch.uint8)
        else:
            where = row["location"]
            if where not in files:
                files[where] = _external(path, where, row["name"])
            piece = files[where][start : start + size]
            if piece.data_ptr() % _ALIGNED:
                piece = piece.clone()
        if piece.numel() != size:
            raise CompileError(
                f"[onnx] expected {size} bytes of '{row['name']}', got {piece.numel()}; "
                "try copying the file with its external data again",
                code="RM340",
            )
        out[row["name"]] = piece.view(dtype).reshape(shape)
    return out


def _external(path: Path, location: str, name: str) -> torch.Tensor:
    """A file of external data, which has to lie in the model's folder or below it."""
    folder = path.resolve().parent
    found = (folder / location.replace("\0", "/..")).resolve()
    if not found.is_relative_to(folder):
        raise CompileError(
            f"[onnx] expected the data of '{name}' beside the model, got '{location}'; "
            "try a path below the model's folder",
            code="RM340",
        )
    return _map(found, location)
