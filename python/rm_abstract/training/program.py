"""One compiled step: the tensors it takes, in order, and what it changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import CompileError, from_core
from rm_abstract.capture.training import Forward
from rm_abstract.training.check import Trial
from rm_abstract.training.optimizers import Rule, state_names
from rm_abstract.training.place import Place
from rm_abstract.training.stored import Stored

# Logits of a loss from this size on (bytes) are made by pieces of their rows where that saves some.
SPLIT_BYTES = 32 << 20


@dataclass
class Tied:
    """A parameter under all names it has in the captured module."""

    tensor: torch.Tensor
    names: list[str]
    group: int


@dataclass(frozen=True)
class Wanted:
    """What a program does with the gradients of its forward."""

    rules: tuple[Rule, ...] = ()  # of the update, by group; without them there is none
    clip_norm: bool = False
    clip_value: bool = False
    scaled: bool = False  # gradients are those of the loss times an input
    micro_batches: int = 1  # more: they are added to sums of earlier ones


@dataclass
class StepProgram:
    """A program for one structure and one set of sizes of the batch."""

    program: Any
    text: str
    trained: list[Tied]  # those with a gradient
    frozen: list[str]  # weights that are only read, by name
    written: list[str]  # buffers that the forward updates, by name
    constants: dict[str, torch.Tensor]
    wanted: Wanted
    draws: int  # of random numbers a step
    hyper_columns: int  # numbers of a row of the input `hyper`
    half: bool = False  # it has values of half types
    runs: int = 0
    long_ways: int = 0  # runs that Python made since the step was settled
    checked: bool = False
    trial: Trial = field(default_factory=Trial)  # until it is
    gradients_of_frozen: list[bool] | None = None  # whether weights that are only read want one
    memory: list[int] = field(default_factory=list)  # addresses it was checked for
    spans: list[tuple[int, int]] = field(default_factory=list)  # of their bytes, sorted
    recomputed: list[dict[str, Any]] = field(default_factory=list)  # under a memory budget
    split: dict[str, int] = field(default_factory=dict)  # logits: pieces, bytes, piece_bytes

    @cached_property
    def state_names(self) -> list[tuple[str, ...]]:
        """Of the optimiser's state of a parameter, by group."""
        return [state_names(rule) for rule in self.wanted.rules]

    def run(
        self,
        batch: list[torch.Tensor],
        hyper: torch.Tensor,
        sums: list[torch.Tensor],
        donated: list[torch.Tensor],
        frozen: list[torch.Tensor],
    ) -> list[Any]:
        """The loss, then whether all gradients are finite when it was scaled, then their norm when
        they are clipped to one. ``batch``: the scale of the loss comes last. Updates ``donated``,
        or ``sums`` when it is no update.
        """
        numbers = [hyper] if self.wanted.rules else []
        return list(self.program.run([*batch, *numbers, *sums, *donated, *frozen]))


def program_of(text: str, place: Place, stored: Stored) -> Any:
    """A step after the passes, compiled. Weights are read where they lie: nothing is packed."""
    backends = place.backends()
    return _core.Program(
        text, {}, backends, "", packing="never", checks=stored.checks, device=place.index
    )


def compile_step_program(
    forward: Forward,
    parameters: list[Tied],
    wanted: Wanted,
    place: Place,
    stored: Stored,
    processes: tuple[int, list[list[int]]] = (0, []),
) -> StepProgram:
    """The whole step. Without an update the loss and the gradients only, by parameter.

    ``processes``: the number of an `Average` and its buckets, of places in ``parameters``, which
    must all have a gradient; without buckets nothing is averaged.

    Raises Decline when the step has no program, CompileError when making it failed.
    """
    trained, unused = parameters, set[str]()
    groups = [rule.as_dict() for rule in wanted.rules]
    try:
        forward_ir = _core.ir.run_forward_passes(forward.ir, place.on_gpu)
        while True:
            rows = [(t.names, t.group) for t in trained]
            made = _core.autograd.training_step(
                forward_ir,
                {},
                rows,
                groups,
                wanted.clip_norm,
                forward.written,
                bool(wanted.rules),
                wanted.clip_value,
                wanted.scaled,
                wanted.micro_batches,
                SPLIT_BYTES,
                place.gradient_operators,
                *processes,
            )
            if not made["unused"]:
                break
            if processes[1]:
                raise Decline("RM704", f"the loss does not reach {made['unused'][0]}")
            unused.update(made["unused"])  # they stay weights that are only read
            trained = [t for t in trained if t.names[0] not in unused]
        text = stored.optimised(made["text"])
        program = program_of(text, place, stored)
    except _core.CoreError as error:
        if error.reason.startswith("RM7"):
            raise Decline(error.reason, str(error)) from error
        raise from_core(error, CompileError) from error
    return StepProgram(
        program,
        text,
        trained,
        made["frozen"],
        forward.written,
        {name: place.there(t) for name, t in forward.constants.items()},
        wanted,
        forward.draws,
        made["hyper"][1],
        any(f": {dtype}[" in forward.ir for dtype in ("bf16", "f16")),
        split=made["split"],
    )
