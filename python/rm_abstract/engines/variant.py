"""One compiled capture: which sizes it serves, how it runs, how its output is rebuilt."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rm_abstract import _core
from rm_abstract.base.decline import Decline
from rm_abstract.base.entry_report import EntryReport
from rm_abstract.capture.outputs import NEW_CACHES, builder
from rm_abstract.engines.placement import core_of
from rm_abstract.engines.trial import Trial
from rm_abstract.guards import torch_state
from rm_abstract.verification.quantised import QuantisedWeight

RECORD_VERSION = 3
_TIMED_CALLS = 64  # of a program are timed, for the report; later ones pay nothing
NO_SAMPLE = 1 << 62
OUT_OF_RANGE = 11  # RM_OUT_OF_RANGE of rm_code
BAD_CALL = (3, OUT_OF_RANGE)  # RM_INVALID_ARGUMENT


class Program(Protocol):
    """What the core's compiled program offers (src/bindings/program_pybind.cpp)."""

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]: ...

    def update_weights(self, weights: dict[str, torch.Tensor], shared: Any = None) -> None: ...

    def report(self) -> dict[str, Any]: ...


@dataclass
class Record:
    """A capture as data: what a front record stores and a program is made from."""

    ir: str  # canonical text
    weights: list[str]
    output: list[Any]
    caches: list[Any]
    kept: dict[str, int]
    capture_ms: float = 0.0
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    repeated: list[list[int]] = field(default_factory=list)  # by output: axes of stride 0
    torch_state: dict[str, Any] = field(default_factory=dict)  # what forward read of it
    extended: bool = False  # layers were written that were not traced: stored when it has passed

    @functools.cached_property
    def signature(self) -> Any:
        """Sizes of the inputs, and what has to hold among them for this capture to be right."""
        return _core.ir.Signature(self.ir)

    @functools.cached_property
    def input_dims(self) -> list[list[str]]:
        """A number or an expression of symbols for each axis, by input."""
        found: list[list[str]] = self.signature.input_dims
        return found

    def to_json(self) -> bytes | None:
        """None when it holds tensors that only this process has."""
        if self.constants:
            return None
        fields = ["ir", "weights", "output", "caches", "kept"]
        fields += [name for name in ("repeated", "torch_state") if getattr(self, name)]
        return json.dumps(
            {"v": RECORD_VERSION, **{f: getattr(self, f) for f in fields}}, separators=(",", ":")
        ).encode()

    @functools.cached_property
    def read_values(self) -> list[int]:
        """Numbers of the inputs whose values this capture is for."""
        numbers = map(torch_state.valued, self.torch_state)
        return [number for number in numbers if number is not None]

    def asked_the_same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether forward would be told what it was told when it was captured."""
        read = self.torch_state
        return not read or read == torch_state.answers(list(read), tensors)

    @staticmethod
    def from_json(data: bytes) -> Record:
        """Raises ValueError or KeyError for anything but a record of this version."""
        values = json.loads(data)
        if values.pop("v") != RECORD_VERSION:
            raise ValueError("a record of another version")
        return Record(**values)


class Variant:
    """A record with its program. Immutable but for counters; `run` is thread safe."""

    def __init__(
        self,
        record: Record,
        program: Program,
        is_past: Sequence[bool],
        quantised: Sequence[QuantisedWeight] = (),
    ) -> None:
        self.record = record
        self.quantised = tuple(quantised)
        self.program = program
        self.serves: Callable[[Any], bool] = record.signature.test(is_past)
        self._build = builder(record.output)
        self._caches = [builder(c) for c in record.caches if c[0] not in NEW_CACHES and c[1] >= 0]
        self.report = EntryReport(signature="", engine="native", device="")
        self.trial: Trial | None = None  # until it has won against the original
        self.measured: tuple[float, float] | None = None  # by it, seconds: compiled, eager
        self.eager_s: float | None = None  # of the call that the gate compared with
        self.best_s: float | None = None  # a call, of the first ones that were served
        self.compares_kernels = False  # a set of kernels nobody compared raises NewKernels
        self.may_refuse = False  # it checks values: the original judges what it refuses
        self.standing: object = None  # what it was compared for; equal later: it still holds
        self._until_sample = NO_SAMPLE
        self.differed = 0  # comparisons in a row that failed
        self.timed = True  # its first calls are, for the report
        self.direct: Any = None  # _core.router.DirectProgram: its form that the router runs
        self._programs: Any = None  # the entry's, where `direct` is one
        self._plain = not record.caches and not record.torch_state and type(self) is Variant

    @property
    def until_sample(self) -> int:
        """Calls to serve before one is compared (verification)."""
        return self._until_sample if self.direct is None else int(self.direct.until_sample)

    @until_sample.setter
    def until_sample(self, calls: int) -> None:
        if self.direct is None:
            self._until_sample = calls
        else:
            self.direct.until_sample = calls

    def may_be_direct(self) -> bool:
        """Whether nothing of its calls is left to decide in Python, for calls of tensors alone."""
        return (
            self._plain
            and self.direct is None
            and self.trial is None
            and not (self.timed and self.report.calls < _TIMED_CALLS)
        )

    def make_direct(self, programs: Any, tensors: list[torch.Tensor]) -> None:
        """Lets the router run the program, where it is the core's, for calls like the one of
        `tensors`; `programs` are those of the entry (_core.router.DirectPrograms)."""
        program, unless = core_of(self.program)
        if program is None:
            self._plain = False
            return
        output = self.record.output
        direct = _core.router.DirectProgram(
            program,
            self.serves,
            tensors,
            output[1] if output[0] == "tensor" else -1,
            self._build,
            self.compares_kernels,
            self._until_sample,
            unless,
        )
        self.direct, self._programs = direct, programs
        programs.add(direct)

    def end_direct(self) -> None:
        """From now on Python runs it again."""
        direct, self.direct = self.direct, None
        if direct is not None:
            self._programs.remove(direct)
            self._until_sample = direct.until_sample
            self.report.calls += direct.take_calls()

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether this capture is right for a call of these tensors."""
        return self.serves([t.shape for t in tensors]) and self.record.asked_the_same(tensors)

    def run(
        self, tensors: list[torch.Tensor], leaves: Sequence[Any], only_compared: bool = False
    ) -> Any:
        """The module's output. Caches among `leaves` are updated last, after everything else.

        With `only_compared` raises _core.NewKernels, before anything is executed, where these sizes
        need a set of kernels whose results were never compared with the original's.
        """
        timed = self.timed and self.report.calls < _TIMED_CALLS
        start = time.perf_counter() if timed else None
        try:
            if only_compared and self.compares_kernels:
                native: Any = self.program
                results = native.run(tensors, True)
            else:
                results = self._execute(tensors, leaves)
        except _core.CoreError as error:
            if error.code in BAD_CALL:  # this call, not the artefact: the original judges it
                code = "RM120" if error.code == OUT_OF_RANGE else "RM104"
                raise Decline(error.reason or code, str(error)) from error
            raise
        if start is not None:
            took = time.perf_counter() - start
            self.best_s = took if self.best_s is None else min(self.best_s, took)
        self.report.calls += 1
        for commit in self._caches:
            commit(results, leaves)
        return self._build(results, leaves)

    def _execute(self, tensors: list[torch.Tensor], leaves: Sequence[Any]) -> list[Any]:
        return self.program.run(tensors)

    def output_number(self, name: str) -> int | None:
        """Which result of the program is this field of the output; None when it is no tensor."""
        structure = self.record.output
        if structure[0] not in ("class", "dict"):
            return None
        for key, value in structure[3 if structure[0] == "class" else 1 :]:
            if key == name and value[0] == "tensor":
                return int(value[1])
        return None

    def full_report(self) -> EntryReport:
        """The record for explain(), with the program's current figures."""
        now = self.program.report()
        report = self.report
        if self.direct is not None:
            report.calls += self.direct.take_calls()
        report.nodes = int(now.get("nodes", 0))
        report.native_nodes = int(now.get("native_nodes", 0))
        report.flops = float(now.get("flops", 0.0))
        report.native_flops = float(now.get("native_flops", 0.0))
        report.kernels = dict(now.get("kernels", {}))
        report.shapes = int(now.get("instances", 0))
        report.kept = dict(self.record.kept)
        report.capture_ms = self.record.capture_ms
        best = self.trial.best if self.trial is not None else None
        best = best or self.measured
        report.timed = "by turns" if best is not None else "first calls"
        compiled, eager = best or (self.best_s, self.eager_s)
        report.compiled_ms = None if compiled is None else compiled * 1e3
        report.eager_ms = None if eager is None else eager * 1e3
        return report
