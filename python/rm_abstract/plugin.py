"""A backend whose SDK is Python: what a vendor writes (docs/plugin_guide.md).

Two pieces. A `PythonPlugin`, found in the user's process, says what the device is: it imports
nothing of the SDK. A worker class, named by text and imported in the worker only, compiles, loads
and executes. Needs neither torch nor the compiled core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Device:
    """One device as it can be seen without the SDK (device nodes, sysfs)."""

    name: str
    arch: str
    memory_bytes: int = 0
    numerics: str = "fp32"  # or bf16: what it computes in


@dataclass(frozen=True)
class TensorType:
    dtype: str  # "f32", as in the program's text
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """One operator of a program, with the sizes it has there. ``operands`` has None for an optional
    one that is absent; ``attributes`` are those of docs/operators.md: numbers, texts, lists."""

    operator: str
    attributes: Mapping[str, Any]
    operands: Sequence[TensorType | None]
    results: Sequence[TensorType]


MOST_EXECUTIONS = 8  # Lanes::kMost of src/worker/lanes.hpp
SAMPLES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def no_fingerprint() -> str:
    return ""


@dataclass(frozen=True)
class PythonPlugin:
    """The user's side of a backend; the rest is in its worker class.

    ``worker`` is "module:Class"; a module beside a plugin file in RM_BACKEND_PATH is found there.
    ``why_not(operator, dtypes)`` gives the reason an operator stays on the host, "" when the device
    has it; ``why_not_node(node)``, asked about those that remain, sees shapes and attributes too: a
    node it refuses runs on the host, and the rest of its part stays. ``packages`` are the
    distributions whose versions change artefacts, looked up in the worker's interpreter;
    ``fingerprint()`` adds what else does (a driver's version in sysfs).
    ``options`` are the plugin's own: compile_options={"zeta": {"level": 3}} reaches compile() as
    options["zeta.level"], "3", and is in the key. ``states``: the worker class has `make_state`,
    and programs may keep tensors on the device between runs (keys and values). ``generator`` is
    the "module:Class" (`Generator`) of a runtime that runs whole generations; ``samples`` are the
    fields of GenerationConfig it can do besides greedy decoding, of `SAMPLES`. Where the worker's
    interpreter lacks one of ``generator_packages``, the core runs the loop. ``executions``: how
    many programs of a worker may run at once, each in a thread of its own (1 to 8).
    """

    name: str
    version: str
    worker: str
    devices: Callable[[], Sequence[Device]]
    why_not: Callable[[str, Sequence[str]], str]
    packages: Sequence[str] = ()
    fingerprint: Callable[[], str] = no_fingerprint
    program_format: str = "rm.ir/1"  # or onnx
    embeds_weights: bool = False
    score: int = 1
    properties: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()
    states: bool = False
    generator: str = ""
    samples: Sequence[str] = ()
    generator_packages: Sequence[str] = ()
    why_not_node: Callable[[Node], str] | None = None
    executions: int = 1

    def __post_init__(self) -> None:
        if not (self.name.isidentifier() and self.name == self.name.lower()):
            raise ValueError(f"[plugin] expected a lower-case identifier as name, got {self.name}")
        if self.program_format not in ("rm.ir/1", "onnx"):
            raise ValueError(
                f"[plugin] expected program_format rm.ir/1 or onnx, got {self.program_format!r}"
            )
        if self.states and self.program_format != "rm.ir/1":
            raise ValueError(
                f"[plugin] expected rm.ir/1 with states, got {self.program_format}: ONNX has none"
            )
        if not 1 <= self.executions <= MOST_EXECUTIONS:
            raise ValueError(
                f"[plugin] expected executions of 1 to {MOST_EXECUTIONS}, got {self.executions}"
            )
        if wrong := [name for name in self.samples if name not in SAMPLES]:
            raise ValueError(f"[plugin] expected samples of {', '.join(SAMPLES)}, got {wrong}")
        if wrong := [name for name in self.options if not name.isidentifier()]:
            raise ValueError(f"[plugin] expected identifiers as options, got {wrong}")


class Failure(Exception):
    """What a worker class raises to say what kind of failure it is; any other exception is RM301
    in compile, RM307 in load and execute.

    ``code`` is a reason: RM301 compiler failed, RM302 gave up, RM304 not supported, RM305 out of
    memory, RM307 failed while executing, RM308 executing took too long, RM401 the vendor's
    software is missing, RM403 versions do not fit, RM407 device lost, RM602 damaged artefact.
    """

    _RM_CODES: Mapping[str, int] = {
        "RM301": 13, "RM302": 4, "RM304": 12, "RM305": 8, "RM307": 13, "RM308": 4, "RM401": 5,
        "RM403": 9, "RM407": 14, "RM602": 15,
    }  # fmt: skip

    def __init__(self, message: str, code: str = "RM301") -> None:
        if code not in self._RM_CODES:
            raise ValueError(f"[plugin] expected one of {', '.join(self._RM_CODES)}, got {code!r}")
        super().__init__(message)
        self.code, self.rm_code = code, self._RM_CODES[code]


class Executable(Protocol):
    """A loaded program; ``inputs`` and ``outputs`` are `worker.tensors.Tensor`s in order. One that
    has states is also given those, in the order of `Program.states`, and updates them in place. It
    is not called while it runs; others are where the plugin has several ``executions``."""

    def execute(self, inputs: Sequence[Any], outputs: Sequence[Any], states: Any = ...) -> None: ...


Region = tuple[slice, ...]  # one slice(start, stop) per axis


class State(Protocol):
    """A tensor on the device, all zeros when it is made. `Tensor`s are contiguous host memory of
    the region's shape. A method ``copy(region, source, source_region)`` is used where there is one;
    else copies go through host memory."""

    def read(self, region: Region, into: Any) -> None: ...

    def write(self, region: Region, value: Any) -> None: ...


@dataclass(frozen=True)
class GenerateRequest:
    """One generation, as transformers resolved it: the rows of a batch."""

    prompts: Sequence[Sequence[int]]  # without padding
    max_new_tokens: int
    stop_tokens: Sequence[int]  # a row ends with one of these: the frame sees to it
    sampling: Mapping[str, float]  # empty: greedy; else fields of the plugin's ``samples``
    seeds: Sequence[int]  # one a row where it samples


class Generator(Protocol):
    """The class a vendor writes for a runtime with a loop of its own: made once a model,
    ``Generator(device, folder, options)``, in a process of its own, called from one thread.

    ``folder`` has the live model as transformers saves it (config.json, *.safetensors) and is gone
    when the constructor returns. ``options`` are the plugin's own, and "cache_folder": where it may
    keep compiled programs, "" where it may not. Raises NotImplementedError for an architecture it
    does not have.
    """

    max_tokens: int  # the most tokens of a row, prompt included

    def generate(self, request: GenerateRequest) -> Iterator[Any]:
        """Yields one token for every row, a step at a time, or (tokens, log probabilities). Rows
        that ended get anything. Closed (GeneratorExit) when nobody wants more."""


class Worker(Protocol):
    """The class a vendor writes: made once a device, ``Worker(index)``, called from one thread at
    a time (programs run beside it). ``progress(fraction, stage)`` is called often: it raises when
    the user gave up."""

    def compile(
        self,
        program: Any,  # worker.python_backend.Program
        options: Mapping[str, str],
        progress: Callable[[float, str], None],
    ) -> bytes | Path:
        """The artefact: bytes, or the path of a file or a folder, which may go afterwards."""

    def load(self, artefact: Any, weights: Mapping[str, Any]) -> Executable:
        """``artefact``: what compile() gave; a path is that of a copy of this process' own, which
        goes with the executable."""

    def make_state(self, port: Any) -> State:
        """Of a plugin with ``states``: zeros of a port's dtype and shape. No call may follow that
        uses it once nobody holds it."""
