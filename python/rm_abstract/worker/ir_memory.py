"""What memory a program needs, from its text alone. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from rm_abstract.worker import ir_text
from rm_abstract.worker.tensors import SIZES


def bytes_of(kind: ir_text.Type) -> int:
    return prod(kind.shape) * SIZES[kind.dtype]


def weights(texts: Iterable[str]) -> int:
    """Bytes of the weights of programs; one that several of them use is counted once."""
    found = {}
    for text in texts:
        program = ir_text.parse(text)
        found.update({name: bytes_of(program.types[v]) for v, name in program.weights.items()})
    return sum(found.values())


def most_at_once(text: str) -> int:
    """The most bytes that are alive at a time besides weights, when nodes run in their order, each
    result in memory of its own and until its last use: what a plain runtime needs. A compiler
    that joins operators needs less."""
    program = ir_text.parse(text)
    last_use = {value: len(program.nodes) for value in program.outputs}
    for at, node in enumerate(program.nodes):
        for value in (*node.operands, *node.results):
            if value is not None:
                last_use[value] = max(last_use.get(value, 0), at)
    constant = program.weights.keys() | program.literals.keys()
    alive = {value: bytes_of(program.types[value]) for value in program.inputs}
    most = sum(alive.values())
    for at, node in enumerate(program.nodes):
        alive.update({value: bytes_of(program.types[value]) for value in node.results})
        most = max(most, sum(alive.values()))
        for value in {*node.operands, *node.results} - constant:
            if value is not None and last_use[value] <= at and value not in program.inputs:
                del alive[value]
    return most
