"""The worker's side of a plugin in Python: calls the vendor's class for the C++ frame.

The frame (src/worker) owns the process, its supervision and the shared memory; here are only the
conversions, so a vendor's class sees programs, tensors and exceptions, never the wire.
"""

from __future__ import annotations

import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rm_abstract import plugin as public
from rm_abstract.worker import artefact_files, artefact_header, ports
from rm_abstract.worker.python_plugins import Found, fingerprint, source_digest
from rm_abstract.worker.python_states import Copy, StateSet, copy_states
from rm_abstract.worker.tensors import Tensor

Rows = list[tuple[str, str, list[int], memoryview, bytes]]
Types = list[tuple[str, str, list[int]]]
Region = tuple[int, int, int, int, list[int]]
_LONGEST_TEXT = 8000  # characters of an error's text


@dataclass(frozen=True)
class Program:
    """What a worker class compiles: ``code`` in the plugin's ``program_format``, and the weights
    by the names the program uses."""

    format: str
    code: bytes
    weights: Mapping[str, Tensor]

    @property
    def text(self) -> str:
        """The program in rm.ir/1."""
        return self.code.decode()

    @property
    def inputs(self) -> list[ports.Port]:
        """Name, element type and shape of each input; ``example()`` is a tensor of them."""
        return self._ports[0]

    @property
    def outputs(self) -> list[ports.Port]:
        """The same of each output."""
        return self._ports[1]

    @property
    def states(self) -> list[ports.Port]:
        """What stays on the device between runs; not among the inputs, nor the outputs."""
        return self._ports[2]

    @property
    def _ports(self) -> tuple[list[ports.Port], list[ports.Port], list[ports.Port]]:
        return ports.of_onnx(self.code) if self.format == "onnx" else ports.of_text(self.text)

    def torch(self, weights: Mapping[str, Any] | None = None) -> Any:
        """An nn.Module of a program in rm.ir/1: forward(*inputs, *states) -> tuple of the outputs
        and the states' new content. ``weights``: torch tensors in place of the mapped ones."""
        from rm_abstract.worker.ir_to_torch import ir_to_torch, states_last

        if weights is None:
            weights = {n: t.torch() for n, t in self.weights.items()}
        module = ir_to_torch(self.text, weights)
        return states_last(module) if module.program.donated else module

    def onnx(self) -> Any:
        """An onnx.ModelProto of a program in ONNX, with the weights in it."""
        from rm_abstract.worker.onnx_weights import with_weights

        return with_weights(self.code, self.weights)


class Cancelled(public.Failure):
    """Raised by progress() when the user gave up."""

    def __init__(self) -> None:
        super().__init__("[compile] expected to finish, got cancelled", "RM302")
        self.rm_code = 1  # RM_CANCELLED


@contextmanager
def _explained(doing: str, executing: bool = False) -> Iterator[None]:
    """Prints the whole traceback to the log the frame keeps; exceptions Python has for it get the
    reason that fits."""
    try:
        yield
    except Cancelled:
        raise
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        failed, late = ("RM307", "RM308") if executing else ("RM301", "RM302")
        if isinstance(error, public.Failure):
            code = error.code
            if executing:
                code = {"RM301": failed, "RM302": late}.get(code, code)
            raise public.Failure(_said(error), code) from error
        code, cause = failed, _failed_import(error)
        if isinstance(error, NotImplementedError):
            code = "RM304"
        elif cause is not None:
            code = "RM401"
        elif isinstance(error, MemoryError):
            code = "RM305"
        elif isinstance(error, TimeoutError):
            code = late
        said = f"[{doing}] {type(error).__name__}: {_said(error)}"
        if cause is not None and cause is not error:
            said += f" ({type(cause).__name__}: {_said(cause)})"
        raise public.Failure(said, code) from error


def _failed_import(error: BaseException | None) -> ImportError | None:
    """The import that failed, where that is what an error comes from: torch raises a RuntimeError
    for a vendor's extension that does not load."""
    for _ in range(16):  # an error may be its own cause
        if error is None or isinstance(error, ImportError):
            return error
        error = error.__cause__
    return None


def _said(error: BaseException) -> str:
    """An error's text as it can travel: of the SDK's, it may be any bytes of any length."""
    try:
        text = str(error)
    except Exception:  # its own code
        text = "an error that cannot be told as text"
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]} … ({len(text) - _LONGEST_TEXT} more characters in its log)"
    return text.encode("utf-8", "replace").decode("utf-8")


class Service:
    """What _core.worker.serve_python calls."""

    def __init__(self, found: Found) -> None:
        self._found, self._plugin = found, found.plugin
        self._fingerprint = fingerprint(found)
        self._targets = [device.arch for device in found.plugin.devices()]
        self.executions = found.plugin.executions
        self._workers: dict[int, public.Worker] = {}
        if found.folder:
            sys.path.insert(0, found.folder)
        module, _, name = found.plugin.worker.partition(":")
        self._class: Callable[[int], public.Worker]
        self._refusal: public.Failure | None = None  # told when the frame asks, not by a crash
        try:
            with _explained(f"{found.plugin.name} {found.plugin.worker} in {sys.executable}"):
                self._class = getattr(import_module(module), name)
        except public.Failure as failure:
            self._refusal = failure

    def describe(self) -> dict[str, Any]:
        if self._refusal is not None:
            raise self._refusal
        return {
            "pid": os.getpid(),
            "backend": self._plugin.name,
            "version": self._plugin.version,
            "build_id": source_digest(self._found.source),
            "fingerprint": self._fingerprint.encode(),
        }

    def _worker(self, device: int) -> public.Worker:
        if device not in self._workers:
            self._workers[device] = self._class(device)
        return self._workers[device]

    def compile(
        self,
        device: int,
        code: bytes,
        options: dict[str, str],
        constants: Rows,
        report: Callable[[float, str], bool],
    ) -> bytes | int:
        """The artefact, or a descriptor of frozen memory that holds it."""

        def progress(fraction: float, stage: str = "") -> None:
            if report(float(fraction), str(stage)):
                raise Cancelled

        with _explained(f"{self._plugin.name} compile"):
            program = Program(self._plugin.program_format, code, _tensors_by_name(constants))
            payload = self._worker(device).compile(program, options, progress)
            whose = (self._plugin.name, self._targets[device], self._fingerprint)
            if isinstance(payload, Path):
                return artefact_files.packed(
                    payload, lambda *rest: artefact_header.Header(*whose, *rest)
                )
            if not isinstance(payload, (bytes, bytearray)):
                raise TypeError(
                    f"expected compile() to give bytes or a Path, got {type(payload).__name__}"
                )
            return artefact_header.wrap(bytes(payload), *whose)

    def load(
        self,
        device: int,
        artefact: memoryview,
        constants: Rows,
        inputs: Rows,
        outputs: Rows,
        states: Types,
    ) -> Callable[[StateSet | None], None]:
        with _explained(f"{self._plugin.name} load", executing=True):
            header, payload = artefact_header.unwrap(
                artefact, self._plugin.name, self._targets[device], self._fingerprint
            )
            given_back: bytes | Path
            if header.form == artefact_header.BYTES:
                given_back = bytes(payload)
            else:
                given_back = artefact_files.unpacked(header, payload)
            try:
                loaded = self._worker(device).load(given_back, _tensors_by_name(constants))
            except BaseException:
                if isinstance(given_back, Path):
                    artefact_files.remove(given_back)
                raise
        given, wanted, kept = _tensors(inputs), _tensors(outputs), _ports(states)

        def run(held: StateSet | None) -> None:
            with _explained(f"{self._plugin.name} execute", executing=True):
                if not kept:
                    loaded.execute(given, wanted)
                    return
                if held is None:
                    raise ValueError("expected states, got none")
                loaded.execute(given, wanted, held.of(kept))

        if isinstance(given_back, Path):  # not with `loaded`, which may allow no weak references
            weakref.finalize(run, artefact_files.remove, given_back)
        return run

    def make_states(self, device: int, states: Types) -> StateSet:
        with _explained(f"{self._plugin.name} make_state", executing=True):
            return StateSet.made(_ports(states), self._worker(device).make_state)

    def copy_states(
        self, source: StateSet | None, target: StateSet | None, region: Region, host: Rows
    ) -> None:
        with _explained(f"{self._plugin.name} copy of states", executing=True):
            copy_states(source, target, Copy(*region), _tensors(host))


def _ports(states: Types) -> list[ports.Port]:
    return [ports.Port(name, dtype, tuple(dims)) for name, dtype, dims in states]


def _tensors(rows: Rows) -> list[Tensor]:
    return [
        Tensor(name, dtype, tuple(dims), data, digest) for name, dtype, dims, data, digest in rows
    ]


def _tensors_by_name(rows: Rows) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in _tensors(rows)}
