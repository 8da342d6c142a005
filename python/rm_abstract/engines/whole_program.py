"""The engine of devices that compile whole programs of fixed shapes (NPUs).

Everything around the program is the native engine's: capture, front records, weights, verdicts.
What differs: a variant is a bucket of sizes, its program is compiled by the device's own compiler
in a worker process, and padding is proven harmless before a bucket serves other sizes than its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.decline import Decline
from rm_abstract.base.entry_report import EntryReport
from rm_abstract.base.errors import CompileError, from_core
from rm_abstract.calls.call import FlatCall, call_module
from rm_abstract.calls.explicit_masks import Explicit
from rm_abstract.calls.tensors import call_tensors
from rm_abstract.engines.buckets import Buckets, InputRole
from rm_abstract.engines.call_parts import Pattern, snapshot
from rm_abstract.engines.compiled_call import CompiledCall
from rm_abstract.engines.context import EngineContext
from rm_abstract.engines.device_compiler import DeviceCompiler
from rm_abstract.engines.device_program import DeviceProgram, Remade
from rm_abstract.engines.device_step import DeviceStep, replaying
from rm_abstract.engines.module_weights import WeightVersions
from rm_abstract.engines.native import NativeEngine
from rm_abstract.engines.resident_program import ResidentProgram
from rm_abstract.engines.variant import Record, Variant
from rm_abstract.kv import kv_cache


def create_engine(module: torch.nn.Module, context: EngineContext) -> WholeProgramEngine:
    """The factory the engine registry calls."""
    return WholeProgramEngine(module, context)


class DeviceVariant(Variant):
    """A bucket: serves what its program serves."""

    program: DeviceProgram

    def __init__(self, record: Record, program: DeviceProgram, is_past: Sequence[bool]) -> None:
        super().__init__(record, program, is_past)
        self.serves = program.serves

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

    def __init__(self, engine: WholeProgramEngine, spec: Any) -> None:
        super().__init__(engine, spec)
        self._outside: dict[tuple[Any, ...], Decline] = {}
        self._given = spec
        self._explicit = Explicit.of(spec, engine.parameters)
        if self._explicit is not None:
            self.spec = self._explicit.spec
        self.step = step = DeviceStep.of(self.spec)
        if step is not None:
            step.lengths = engine.lengths
            step.replay = replaying(engine.module(), engine.parameters.names)

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


class WholeProgramEngine(NativeEngine):
    """Implements engines.base.Engine."""

    name = "whole_program"
    call_type = DeviceCall

    def __init__(self, module: torch.nn.Module, context: EngineContext) -> None:
        super().__init__(module, dataclasses.replace(context, captures=None))
        self.measures = False
        self._compiler = DeviceCompiler(context, self.artefacts, type(module).__name__)
        self._no_padding: set[str] = set()  # captures whose results padding changes
        self.lengths = context.settings.integers("sequence_length")

    def programs(self) -> list[tuple[str, Any]]:
        """None: what a device's own compiler made has no steps of ours."""
        return []

    def admit(self, call: FlatCall) -> None:
        for leaf in call.leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
                raise Decline("RM119", f"a tensor on {leaf.device}: this device takes host memory")

    def make_variant(self, call: FlatCall, pattern: Pattern, past: Sequence[bool]) -> Variant:
        variant = super().make_variant(call, pattern, past)
        assert isinstance(variant, DeviceVariant)
        variant.report.cache = variant.program.cache
        return variant

    def cached_variant(
        self, call: FlatCall, pattern: Pattern, past: Sequence[bool]
    ) -> Variant | None:
        variant = super().cached_variant(call, pattern, past)
        if isinstance(variant, DeviceVariant):
            variant.report.cache = variant.program.cache
        return variant

    def _compile(
        self, record: Record, call: FlatCall, past: Sequence[bool], started: float
    ) -> Variant:
        steps = any(map(kv_cache.is_device, call.leaves))
        if steps and not self._compiler.keeps_states:
            raise Decline("RM114", "a cache that this device cannot keep")
        shapes = [t.shape for t in call_tensors(call)]
        buckets = Buckets(
            record.input_dims,
            _roles(call),
            self._context.settings.integers("batch_size"),
            self.lengths,
            steps,
        )
        sizes = buckets.sizes_of(shapes)
        exact = buckets.exact(sizes)
        bucket = exact if record.ir in self._no_padding else buckets.choose(sizes)
        weights = self.module_weights.of(record)
        try:
            kind = ResidentProgram if steps else DeviceProgram
            program = kind(self._compiler, record, buckets, sizes, weights, bucket)
        except _core.CoreError as error:
            raise from_core(error, CompileError) from error
        variant = DeviceVariant(record, program, past)
        return self._reported(variant, _signature(record, program), program.artefact, started)

    # ---- the gate -----------------------------------------------------------------------------

    def trusted(self, variant: Variant) -> bool:
        """True when the gate passed one way of padding on these very weights before."""
        program = variant.program
        assert isinstance(program, DeviceProgram)
        weights = self.module_weights.of(variant.record)
        failed = ""
        for side in program.sides:
            program.side = side
            verdict = self.artefacts.verdict(program.artefact, weights)
            if verdict is None:
                program.side = program.sides[0]
                return False
            if verdict.get("passed") is True:
                program.compared = program.artefact
                variant.report.artefact = program.artefact
                variant.report.max_error = verdict.get("max_error")
                variant.report.parity = "stored verdict"
                return True
            failed = str(verdict.get("detail"))
        if program.is_short:
            return False  # the gate takes this very shape instead
        raise self._parity_error(f"{failed} (stored verdict)")

    def gate(
        self,
        variant: Variant,
        call: FlatCall,
        tensors: list[torch.Tensor],
        expected: Any,
        comparable: Callable[[Any], Any],
        versions: WeightVersions,
    ) -> None:
        """Compares the variant with eager, on every way to pad until one is right; a model that
        none suits is compiled for this very shape. Raises as `NativeEngine.gate` does."""
        program = variant.program
        assert isinstance(program, DeviceProgram)
        detail = program.compared = ""
        for side in program.sides:
            program.side = side
            detail = self._compare(variant, call, tensors, expected, comparable, versions)
            if not detail:
                program.compared = program.artefact
                return
        if program.is_short:
            self._no_padding.add(variant.record.ir)
            sizes = program.sizes_of([t.shape for t in tensors])
            try:
                program.become_exact(sizes)
            except _core.CoreError as error:
                raise from_core(error, CompileError) from error
            detail = self._compare(variant, call, tensors, expected, comparable, versions)
            if not detail:
                program.compared = program.artefact
                return
        raise self._parity_error(detail)

    def _compare(
        self,
        variant: Variant,
        call: FlatCall,
        tensors: list[torch.Tensor],
        expected: Any,
        comparable: Callable[[Any], Any],
        versions: WeightVersions,
    ) -> str:
        """Why the variant as it is padded now differs from eager; empty when it does not."""
        program, record = variant.program, variant.record
        assert isinstance(program, DeviceProgram)
        weights = self.module_weights.of(record)
        stored = self.artefacts.verdict(program.artefact, weights)
        if stored is not None and stored.get("passed") is not True:  # quarantined
            return f"{stored.get('detail')} (stored verdict)"
        trial = snapshot(call.spec, tuple(call.leaves))
        try:
            output = variant.run(tensors, trial.leaves)
            ran = program.artefact
            inert = not program.is_short or _padding_is_inert(program, call, tensors)
        except _core.CoreError as error:
            raise from_core(error, CompileError) from error
        verdict = self._verdict(variant, trial, tensors, comparable(expected), output, comparable)
        if verdict.passed and not inert:
            verdict.fail("the values of padding reach the results")
        if verdict.passed and program.artefact != ran:
            verdict.fail("it was made again while it was compared")
            return verdict.detail
        self._note(variant, program.artefact, verdict, versions)
        variant.report.signature = _signature(record, program)
        return verdict.detail

    def working_precision(self, record: Record, tensors: list[torch.Tensor]) -> torch.dtype:
        """The model's own, unless the user allowed the device's."""
        allowed = self._context.settings.text("precision") == "bf16"
        if allowed and self._compiler.properties.get("numerics") == "bf16":
            return torch.bfloat16
        return super().working_precision(record, tensors)


def _padding_is_inert(program: DeviceProgram, call: FlatCall, tensors: list[torch.Tensor]) -> bool:
    if not isinstance(program, ResidentProgram):
        return program.padding_is_inert(tensors)
    copy = device_cache(snapshot(call.spec, tuple(call.leaves)).leaves)
    return program.step_padding_is_inert(tensors, copy)


def _roles(call: FlatCall) -> list[InputRole]:
    leaves = iter(call.leaves)
    roles: list[InputRole] = []
    for name, spec in zip(call.spec.names, call.spec.specs, strict=True):
        for _ in range(_count(spec)):
            leaf = next(leaves)
            if isinstance(leaf, torch.Tensor):
                roles.append(InputRole(name))
            else:
                held = kv_cache.read(leaf)
                if isinstance(held, Decline):
                    raise held
                roles += [InputRole(name, is_past=True)] * len(held)
    return roles


def _count(spec: Any) -> int:
    """Leaves below one argument."""
    if spec[0] in ("tensor", "cache"):
        return 1
    if spec[0] in ("list", "tuple"):
        return sum(_count(s) for s in spec[1:])
    return sum(_count(s) for _, s in spec[1:]) if spec[0] == "dict" else 0


def _signature(record: Record, program: DeviceProgram) -> str:
    """The bucket in one line: inputs [2,16] [2,16], padded right."""
    shapes = " ".join(
        "[" + ",".join(map(str, shape)) + "]"
        for shape in program.bucket.shapes(record.input_dims)[:4]
    )
    return f"{shapes}, {f'padded on the {program.side}' if program.is_short else 'this shape only'}"
