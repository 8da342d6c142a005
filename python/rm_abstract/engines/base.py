"""What an engine must offer to the router.

An engine compiles the calls of one module. It must hold the module weakly, and must not import
torch before it is asked to do something.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, runtime_checkable

from rm_abstract.base.decline import Decline
from rm_abstract.base.entry_report import EntryReport
from rm_abstract.engines.context import EngineContext


class Entry(Protocol):
    """One compiled signature. ``run`` gets the call's tensors and opaque objects as one tuple, in
    the order of ``flat_inputs`` below, and returns what the module would have returned.

    ``run`` sees every concrete shape of the signature; it may compile for a new one. Objects that
    are not tensors or plain values (a Cache) are told apart by type only: check their content and
    raise Decline. After anything was committed (a KV cache moved) raise only ``rm.ExecutionError``
    with ``committed=True``: nothing is replayed then.
    """

    direct: Any
    """``_core.router.DirectPrograms``: programs that the router runs itself for calls they fit;
    all others reach ``run``. None for an entry that has none."""

    def run(self, flat_inputs: tuple[Any, ...]) -> Any: ...

    def report(self) -> EntryReport: ...


RunEager = Callable[[], Any]


@runtime_checkable
class Engine(Protocol):
    """Compiles the calls of one module.

    ``flat_inputs`` of a call: its arguments bound to the parameters of ``forward`` in signature
    order (keywords that fall into ``**kwargs`` after them, in order of first appearance, then
    ``*args``), containers walked depth first in their own order, keeping tensors and opaque
    objects and dropping None, bool, int, float, str, dtype and dictionary keys (these are part of
    the signature by value).
    """

    name: str

    def signature_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | Decline:
        """The signature this call compiles under; cheap. A Decline keeps calls like it eager."""
        ...

    def first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], run_eager: RunEager) -> Any:
        """Serves the first call of a signature: compiles, gates with ``run_eager()`` (called at
        most once) and returns its output. Afterwards ``entry(signature)`` exists, or it raised."""
        ...

    def entry(self, signature: Hashable) -> Entry | None:
        """The entry of a signature; None when the parity gate refused it."""
        ...

    def weights(self) -> list[tuple[dict[str, Any], str, Any]]:
        """(owner dictionary, key, tensor) of every weight the entries use."""
        ...

    def invalidate(self, what: str, where: str) -> None:
        """The router saw a change: ``what`` is "weights" (same program, new values or pointers)
        or "structure" (capture again). Entries must not be used again before ``first_call``."""
        ...

    def reports(self) -> list[EntryReport]: ...

    def close(self) -> None:
        """Frees plans and device memory; the engine is not used again."""
        ...


@runtime_checkable
class Traceable(Protocol):
    """An engine whose programs say what their steps take."""

    def programs(self) -> list[tuple[str, Any]]:
        """(signature, program) of every program that serves calls; a program has start_trace()
        and take_trace() of the core's (src/bindings/program_pybind.cpp)."""
        ...

    def captured(self) -> dict[str, str]:
        """By signature: the capture that the program was made of, in the IR's text form."""
        ...


MOST_EARLIER = 3  # states of a module, beside the present one, whose programs are kept


@runtime_checkable
class Keeping(Protocol):
    """An engine that keeps what is compiled while its module is another one. States of the module
    have numbers; the router sees to it that one comes back only where its guard holds again."""

    def set_aside(self, number: int) -> bool:
        """The module's structure changed. False: nothing is kept, `invalidate` is to be called."""
        ...

    def take_back(self, number: int, present: int) -> bool:
        """The module is again what it was at `number`; what is compiled for it now is set aside as
        `present`. False: nothing of `number` is there any more, and nothing was changed."""
        ...

    def forget_aside(self, number: int) -> None:
        """The state of this number does not come back."""
        ...


EngineFactory = Callable[[Any, EngineContext], Engine]
"""(module, context) -> Engine; registered by name in ``rm_abstract.engines``."""
