"""The engine of devices that compile whole programs of fixed shapes (NPUs).

A variant is a bucket of sizes, its program is compiled by the device's own compiler in a worker
process, and padding is proven harmless before a bucket serves other sizes than its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import CompileError, from_core
from rm_abstract.calls.call import CallSpec, FlatCall
from rm_abstract.calls.tensors import call_tensors
from rm_abstract.engines.buckets import Buckets, InputRole
from rm_abstract.engines.compiled_call import CompiledCall
from rm_abstract.engines.context import EngineContext
from rm_abstract.engines.device_call import DeviceCall, DeviceVariant
from rm_abstract.engines.device_compiler import DeviceCompiler
from rm_abstract.engines.device_program import DeviceProgram
from rm_abstract.engines.engine_module import EngineModule
from rm_abstract.engines.padding_gate import PaddingGate
from rm_abstract.engines.program_engine import ProgramEngine
from rm_abstract.engines.resident_program import ResidentProgram
from rm_abstract.engines.specializer import Specializer
from rm_abstract.engines.variant import Record, Variant
from rm_abstract.kv import kv_cache


def create_engine(module: torch.nn.Module, context: EngineContext) -> ProgramEngine:
    """The factory the engine registry calls."""
    own = EngineModule(module, context)
    return ProgramEngine(own, BucketCompiler(own))


class BucketCompiler:
    """Implements compiler.ProgramCompiler with the compiler of a device."""

    name = "whole_program"
    uses_core = False

    def __init__(self, module: EngineModule) -> None:
        self._module, settings = module, module.context.settings
        label = type(module.get()).__name__
        self.device = DeviceCompiler(module.context, module.artefacts, module.blocks, label)
        self._batches = settings.integers("batch_size")
        self._lengths = settings.integers("sequence_length")
        rounds = self.device.properties.get("numerics") == "bf16"
        self.gate = PaddingGate(module, rounds and settings.text("precision") == "bf16")

    def new_call(self, engine: Specializer, spec: CallSpec) -> CompiledCall:
        return DeviceCall(engine, spec, self._lengths)

    def admit(self, call: FlatCall) -> None:
        for leaf in call.leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
                raise Decline("RM119", f"a tensor on {leaf.device}: this device takes host memory")

    def compile(self, record: Record, call: FlatCall, past: Sequence[bool]) -> Variant:
        steps = any(map(kv_cache.is_device, call.leaves))
        if steps and not self.device.keeps_states:
            raise Decline("RM114", "a cache that this device cannot keep")
        shapes = [t.shape for t in call_tensors(call)]
        roles = _roles(call)
        buckets = Buckets(record.input_dims, roles, self._batches, self._lengths, steps)
        sizes = buckets.sizes_of(shapes)
        padded = record.ir not in self.gate.no_padding
        bucket = buckets.choose(sizes) if padded else buckets.exact(sizes)
        weights = self._module.weights.of(record)
        try:
            kind = ResidentProgram if steps else DeviceProgram
            program = kind(self.device, record, buckets, sizes, weights, bucket)
        except _core.CoreError as error:
            raise from_core(error, CompileError) from error
        variant = DeviceVariant(record, program, past)
        variant.say_bucket()
        variant.report.artefact = program.artefact
        variant.report.precision = self._module.artefacts.precision_said
        variant.report.cache = program.cache
        return variant


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
