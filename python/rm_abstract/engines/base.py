"""What an engine must offer to the router, and the record it reports about each compiled entry.

An engine compiles the calls of one module. It must hold the module weakly, and must not import
torch before it is asked to do something.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable


class Decline(Exception):
    """A decision not to route, with its reason code; returned by ``signature_of``, or raised by
    ``first_call`` and ``Entry.run`` *before* anything was changed. Never shown to a user."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail


@dataclass
class EntryReport:
    """What one compiled entry is and what it cost; filled by the engine, read by ``explain()``."""

    signature: str
    engine: str
    device: str
    artefact: str = ""  # cache key of the plan
    cache: str = ""  # "hit", "miss" or "bypass: why"
    compile_ms: float = 0.0
    capture_ms: float = 0.0
    nodes: int = 0
    native_nodes: int = 0  # nodes run by kernels of our registry
    flops: float = 0.0
    native_flops: float = 0.0
    kernels: dict[str, int] = field(default_factory=dict)  # kernel name -> steps
    kept: dict[str, int] = field(default_factory=dict)  # operator kept on torch -> nodes
    parity: str = ""  # "passed", "failed: ...", "stored verdict"
    max_error: float | None = None
    calls: int = 0
    shapes: int = 0  # concrete shapes instantiated
    precision: str = ""  # of the weights of products: "int8, groups of 128"; empty: the model's own
    quantised: dict[str, int] = field(default_factory=dict)  # weights, bytes, bytes_before

    @property
    def native_share(self) -> float:
        return self.native_nodes / self.nodes if self.nodes else 0.0

    @property
    def native_flops_share(self) -> float | None:
        """None when operators were kept on torch: their FLOPs, so any share, are not known."""
        return 1.0 if self.nodes and self.native_nodes == self.nodes else None

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["native_share"] = self.native_share
        values["native_flops_share"] = self.native_flops_share
        return values


class Entry(Protocol):
    """One compiled signature. ``run`` gets the call's tensors and opaque objects as one tuple, in
    the order of ``flat_inputs`` below, and returns what the module would have returned.

    ``run`` sees every concrete shape of the signature; it may compile for a new one. Objects that
    are not tensors or plain values (a Cache) are told apart by type only: check their content and
    raise Decline. After anything was committed (a KV cache moved) raise only ``rm.ExecutionError``
    with ``committed=True``: nothing is replayed then.
    """

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


EngineFactory = Callable[[Any, Any], Engine]
"""(module, session) -> Engine; registered by name in ``rm_abstract.engines``."""
