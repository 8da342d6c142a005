"""A call structure of a device that compiles whole programs, and the buckets that serve it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.base.entry_report import EntryReport
from rm_abstract.calls.call import CallSpec, call_module
from rm_abstract.calls.explicit_masks import Explicit
from rm_abstract.engines.compiled_call import CompiledCall
from rm_abstract.engines.device_program import DeviceProgram, Remade
from rm_abstract.engines.device_step import DeviceStep, replaying
from rm_abstract.engines.resident_program import ResidentProgram
from rm_abstract.engines.specializer import Specializer
from rm_abstract.engines.variant import Record, Variant
from rm_abstract.kv import kv_cache


class DeviceVariant(Variant):
    """A bucket: serves what its program serves."""

    program: DeviceProgram

    def __init__(self, record: Record, program: DeviceProgram, is_past: Sequence[bool]) -> None:
        super().__init__(record, program, is_past)
        self.serves = program.serves

    def say_bucket(self) -> None:
        """The bucket in one line of the report: [2,16] [2,16], padded on the right."""
        program = self.program
        shapes = " ".join(
            "[" + ",".join(map(str, shape)) + "]"
            for shape in program.bucket.shapes(self.record.input_dims)[:4]
        )
        how = f"padded on the {program.side}" if program.is_short else "this shape only"
        self.report.signature = f"{shapes}, {how}"

    def _execute(self, tensors: list[torch.Tensor], leaves: Sequence[Any]) -> list[Any]:
        if isinstance(self.program, ResidentProgram):
            return self.program.run_step(tensors, device_cache(leaves))
        return self.program.run(tensors)

    def full_report(self) -> EntryReport:
        report = super().full_report()
        report.kept = dict(self.program.support.kept)
        report.crashes = list(self.program.crashes)
        return report


def device_cache(leaves: Sequence[Any]) -> Any:
    """The cache a step updates."""
    return next(leaf for leaf in leaves if kv_cache.is_device(leaf))


class DeviceCall(CompiledCall):
    """A call structure on a device: keys and values stay there (a DeviceCache) or are inputs and
    outputs of its programs, masks are explicit, and sizes outside the user's buckets stay eager
    without keeping the others from the device."""

    reads = staticmethod(kv_cache.read_types)
    max_variants = 64  # buckets: each costs a compile, a lookup tries a few of them

    def __init__(self, engine: Specializer, spec: CallSpec, lengths: list[int]) -> None:
        super().__init__(engine, spec)
        self._outside: dict[tuple[Any, ...], Decline] = {}
        self._given = spec
        self._explicit = Explicit.of(spec, engine.parameters)
        if self._explicit is not None:
            self.spec = self._explicit.spec
        self.step = step = DeviceStep.of(self.spec)
        if step is not None:
            step.lengths = lengths
            step.replay, step.changes = replaying(engine), engine.changes

    def decode_step(self, leaves: Sequence[Any]) -> None:
        """The core's loop runs programs of our own compiler."""

    def run(self, flat_inputs: tuple[Any, ...]) -> Any:
        if self._outside and (found := self._outside.get(_shape_key(flat_inputs))):
            raise found
        completed = self._complete(flat_inputs)
        self._remember(completed)
        try:
            return super().run(completed)
        except Remade:  # before anything of the user's changed
            self._drop_remade()
            return super().run(completed)

    def _drop_remade(self) -> None:
        """Variants whose artefact was made again are built from the cache and compared again."""
        with self.lock:
            for pattern, found in self.variants.items():
                self.variants[pattern] = [v for v in found if not _is_remade(v)]

    def _remember(self, completed: tuple[Any, ...]) -> None:
        if isinstance(self.step, DeviceStep):
            self.step.remember(completed)

    def _complete(self, flat_inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._explicit.complete(flat_inputs) if self._explicit else flat_inputs

    def original(self, flat_inputs: tuple[Any, ...]) -> Callable[[], Any]:
        given = self._explicit.original(flat_inputs) if self._explicit else flat_inputs
        module, names = self.engine.module(), self.engine.parameters.positional
        return lambda: call_module(module._call_impl, self._given, list(given), names)

    def _first(
        self,
        completed: tuple[Any, ...],
        run_eager: Callable[[], Any],
        raises: bool,
        containers: Sequence[tuple[str, Any]] = (),
    ) -> Any:
        self._remember(completed)
        try:
            return super()._first(completed, run_eager, raises, containers)
        except Remade:  # of a program from the cache, whose worker died just now
            self._drop_remade()
            return super()._first(completed, run_eager, raises, containers)
        except Decline as outside:
            if outside.code != "RM105" or not raises:
                raise
            return run_eager()
        finally:
            for pattern, refusal in list(self.refused.items()):
                if refusal.code == "RM105":
                    given = self._explicit.original(completed) if self._explicit else completed
                    self._outside[_shape_key(given)] = self.refused.pop(pattern)


def _is_remade(variant: Variant) -> bool:
    program = variant.program
    assert isinstance(program, DeviceProgram)
    return bool(program.compared) and program.compared != program.artefact


def _shape_key(flat_inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(t.shape for t in flat_inputs if isinstance(t, torch.Tensor))
