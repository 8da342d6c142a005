"""What makes programs of captures: all that tells one engine of programs from another.

`program_engine.py` does the rest for each of them: captures, records in the cache, weights, calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rm_abstract.calls.call import CallSpec, FlatCall
from rm_abstract.engines.compiled_call import CompiledCall
from rm_abstract.engines.gate import Gate
from rm_abstract.engines.specializer import Specializer
from rm_abstract.engines.variant import Record, Variant


class ProgramCompiler(Protocol):
    """The compiler of one module's programs."""

    name: str
    """The engine's, in options and reports."""

    uses_core: bool
    """Its programs are the core's: their steps can be traced, they are timed against the original,
    and another process can make them."""

    @property
    def gate(self) -> Gate:
        """Decides which of its programs serve."""

    def new_call(self, engine: Specializer, spec: CallSpec) -> CompiledCall:
        """What serves the calls of one structure."""

    def admit(self, call: FlatCall) -> None:
        """Raises Decline for a call that it never compiles."""

    def compile(self, record: Record, call: FlatCall, past: Sequence[bool]) -> Variant:
        """A program for calls like this one; ``past`` marks the inputs that are a cache's.

        Its report says `signature`, `artefact` and `precision`, and `cache` where the program has
        an entry of its own there. Raises Decline or CompileError.
        """
