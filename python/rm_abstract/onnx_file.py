"""``rm.compile("model.onnx")``: an ONNX file as a compiled program.

The file is read by the core (src/onnx) and mapped here: weights that lie aligned in the file, or in
its files of external data, are used where they lie. The files must not change while it is used.
"""

from __future__ import annotations

import collections
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rm_abstract.base.errors import CompileError, ConfigError, ExecutionError, from_core
from rm_abstract.report_page import Drawn

if TYPE_CHECKING:
    import torch

    from rm_abstract.session import Session

_OPTIONS = {"precision": "auto"}
_ALIGNED = 64  # bytes: what kernels may load at once
_PROGRAMS = 16  # kept of a file that needs one for each set of sizes or values


class OnnxExecutable:
    """Called with the graph's inputs, in order or by name; returns its outputs as a list.

    Inputs are torch tensors on the CPU or numpy arrays; outputs are numpy arrays when all inputs
    are. Raises ConfigError for other names, ExecutionError for other types or sizes.

    Where shapes depend on the values of inputs (axes, repeats, ...), or an operator needs sizes as
    numbers, a call makes the program for these values or sizes, and the last 16 are kept; such a
    call may raise CompileError. So does a call with a size of 0 or 1 that the file names, where the
    program for all sizes does not take it.
    """

    def __init__(self, source: str | os.PathLike[str] | bytes, session: Session) -> None:

        if session.device != "cpu":
            raise ConfigError(
                f"[compile] expected device cpu for an ONNX file, got {session.device}; "
                'try device="cpu"'
            )
        self._session = session
        if isinstance(source, bytes):  # a model in memory has no folder, so no external data
            self.path = Path("a model in memory")
            self._mapped = _held(source)
        else:
            self.path = Path(source)
            self._mapped = _map(self.path, str(self.path))
        self._values: set[str] = set()  # inputs whose values the program needs
        self._sizes = False
        self._programs: collections.OrderedDict[Any, _Made] = collections.OrderedDict()
        self._lock = threading.Lock()
        made = self._import({})
        self.input_names: list[str] = list(made["inputs"])
        self.output_names: list[str] = list(made["outputs"])
        self._ports = made["ports"]
        self._only = self._program(made) if self._is_whole(made) else None

    def _import(self, given: dict[str, Any]) -> dict[str, Any]:
        from rm_abstract import _core

        try:
            made: dict[str, Any] = _core.onnx.import_model(self._mapped.numpy(), given)
            return made
        except _core.CoreError as error:
            raise from_core(error, CompileError) from None

    def _is_whole(self, made: dict[str, Any]) -> bool:
        """Whether there is a program; takes over what another import has to be told."""
        self._values.update(made["needed_values"])
        self._sizes = self._sizes or made["needs_sizes"]
        return not made["needed_values"] and not made["needs_sizes"]

    def _program(self, made: dict[str, Any]) -> _Made:
        from rm_abstract import _core

        try:
            weights = _weights(self.path, self._mapped, made["weights"])
            program = _core.Program(
                self._optimised(made["text"]),
                weights,
                ["cpu"],
                self._session.settings.text("force_kernel"),
                checks=self._session.kernel_checks(),
            )
        except _core.CoreError as error:
            raise from_core(error, CompileError) from None
        return _Made(
            program,
            [k for k, name in enumerate(self.input_names) if name not in self._values],
            made["text"],
        )

    def _check(self, tensors: list[torch.Tensor]) -> None:
        from rm_abstract.worker.dtypes import DTYPES

        for name, (dtype, sizes), t in zip(self.input_names, self._ports, tensors, strict=True):
            fits = sizes is None or (
                len(sizes) == t.dim()
                and all(n in (-1, d) for n, d in zip(sizes, t.shape, strict=True))
            )
            if t.dtype != DTYPES[dtype] or t.device.type != "cpu" or not fits:
                raise ExecutionError(
                    f"[{self.path.name}] expected '{name}' as {dtype} of the sizes {sizes} (-1: "
                    f"any) on the CPU, got {t.dtype} {list(t.shape)} on {t.device}"
                )

    def _for(self, tensors: list[torch.Tensor]) -> _Made:
        """The program for these inputs: the only one, one of those kept, or made now."""
        if self._only is None:
            return self._for_these(tensors)
        # What it did not take before, it does not take now.
        return self._programs.get(self._key(tensors), self._only) if self._programs else self._only

    def _has_small_sizes(self, tensors: list[torch.Tensor]) -> bool:
        """Whether a size that the file names is 0 or 1, as no size of a program for all is: it has
        elements, and repeats along no axis of another operand."""
        return any(
            n == -1 and d < 2
            for (_, sizes), t in zip(self._ports, tensors, strict=True)
            for n, d in zip(sizes or (), t.shape, strict=False)
        )

    def _key(self, tensors: list[torch.Tensor]) -> Any:
        return tuple((tuple(t.shape), None) for t in tensors)

    def _for_these(self, tensors: list[torch.Tensor], sizes: bool = False) -> _Made:
        """The program for these values, and sizes where they are needed or wanted."""
        self._check(tensors)
        with self._lock:
            for _ in range(len(self.input_names) + 2):
                given = {
                    name: (list(t.shape), _bytes(t) if name in self._values else None)
                    for name, t in zip(self.input_names, tensors, strict=True)
                    if sizes or self._sizes or name in self._values
                }
                key = tuple((tuple(sizes), content) for sizes, content in given.values())
                if key in self._programs:
                    self._programs.move_to_end(key)
                    return self._programs[key]
                made = self._import(given)
                if self._is_whole(made):
                    self._programs[key] = self._program(made)
                    if len(self._programs) > _PROGRAMS:
                        self._programs.popitem(last=False)
                    return self._programs[key]
        raise CompileError(
            f"[onnx] expected an import that ends, got {self.path.name} that asks for more",
            code="RM342",
        )

    def drawn(self, batch: int, length: int, rounds: int = 10) -> Drawn:
        """Steps and times of a run, for report_page.page; open sizes are `batch` along the first
        axis and `length` along others, floats are random numbers and everything else is 0."""
        import torch

        from rm_abstract import _core
        from rm_abstract.worker.dtypes import DTYPES

        def size(axis: int) -> int:
            return length if axis else batch

        if self._only is None:
            types = [
                (dtype, [n if n >= 0 else size(axis) for axis, n in enumerate(sizes)])
                for dtype, sizes in self._ports
            ]
        else:
            types = _types(self._only.text, size)
        tensors = [
            torch.randn(shape).to(DTYPES[dtype])
            if DTYPES[dtype].is_floating_point
            else torch.zeros(shape, dtype=DTYPES[dtype])
            for dtype, shape in types
        ]
        made = self._for(tensors)
        try:
            steps = made.program.profile([tensors[k] for k in made.inputs], rounds)
        except _core.CoreError as error:
            raise from_core(error, ExecutionError) from None
        said = ", ".join(
            f"{name} {list(t.shape)}" for name, t in zip(self.input_names, tensors, strict=True)
        )
        return Drawn(f"{self.path.name}: {said}", made.text, steps)

    @property
    def waits_for(self) -> list[str]:
        """What a call has to say before there is a program: "sizes", "values of NAME"."""
        return ["sizes"] * self._sizes + [f"values of {name}" for name in sorted(self._values)]

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
        tensors = [x.detach() if isinstance(x, torch.Tensor) else _tensor(x) for x in given]
        made = self._for(tensors)
        try:
            results = list(made.program.run([tensors[k] for k in made.inputs]))
        except _core.CoreError as error:
            if made is not self._only or not self._has_small_sizes(tensors):
                raise from_core(error, ExecutionError) from None
            results = self._run_for_these(tensors)
        if given and not any(isinstance(x, torch.Tensor) for x in given):
            return [_array(r) for r in results]
        return results

    def _run_for_these(self, tensors: list[torch.Tensor]) -> list[Any]:
        from rm_abstract import _core

        made = self._for_these(tensors, sizes=True)
        try:
            return list(made.program.run([tensors[k] for k in made.inputs]))
        except _core.CoreError as error:
            raise from_core(error, ExecutionError) from None

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        names = self.input_names[len(args) :]
        if len(args) > len(self.input_names) or set(names) != set(kwargs):
            raise ConfigError(
                f"[{self.path.name}] expected the inputs {self.input_names}, got {len(args)} by "
                f"position and {sorted(kwargs)} by name"
            )
        return [*args, *(kwargs[name] for name in names)]


class _Made(NamedTuple):
    program: Any
    inputs: list[int]  # those whose values it was not made for
    text: str  # before the passes


_INPUT = re.compile(r'input %\d+ ".*" : (\w+)\[(.*?)\]')


def _types(text: str, size: Callable[[int], int]) -> list[tuple[str, list[int]]]:
    """Element types and shapes of a program's inputs; a symbol is the `size` of the axis where it
    stands first."""
    from rm_abstract import _core

    sizes: dict[str, int] = {}
    for _, dims in _INPUT.findall(text):
        for axis, dim in enumerate(dims.split(",")):
            for symbol in re.findall(r"\bs\d+\b", dim):
                sizes.setdefault(symbol, size(axis))
    static = _core.ir.substitute(text, sizes) if sizes else text
    return [
        (dtype, [int(dim) for dim in dims.split(",") if dim])
        for dtype, dims in _INPUT.findall(static)
    ]


def _bytes(tensor: torch.Tensor) -> bytes:
    import torch

    if not tensor.numel():  # its strides may be such that it cannot be read as bytes
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensor(x: Any) -> torch.Tensor:
    import torch

    if str(getattr(x, "dtype", "")) == "bfloat16":  # numpy has none of its own
        return torch.as_tensor(x.view("uint16").copy()).view(torch.bfloat16)
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[onnx] expected tensors or arrays of numbers: {error}") from None


def _array(x: torch.Tensor) -> Any:
    import torch

    if x.dtype != torch.bfloat16:
        return x.numpy()
    try:
        import ml_dtypes
    except ImportError:
        raise ConfigError(
            "[onnx] expected ml_dtypes for arrays of bfloat16, got none; try tensors as inputs"
        ) from None
    return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


def _held(content: bytes) -> torch.Tensor:
    import torch

    if not content:
        raise CompileError("[onnx] expected a model, got no bytes", code="RM340")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


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
    if not path.is_file():
        raise CompileError(
            f"[onnx] expected the data of '{name}' in the model, got {location!r} and {path}; "
            "try compiling the path of the file",
            code="RM340",
        )
    folder = path.resolve().parent
    found = (folder / location.replace("\0", "/..")).resolve()
    if not found.is_relative_to(folder):
        raise CompileError(
            f"[onnx] expected the data of '{name}' beside the model, got '{location}'; "
            "try a path below the model's folder",
            code="RM340",
        )
    return _map(found, location)
