"""What a piece of code may read, found in its bytecode without running it.

Attribute reads are found by name alone: a name that occurs nowhere in the code that forward reaches
is not read by it, whatever object it is an attribute of. Code that computes names is `dynamic`.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Ways to read an attribute or a variable without its name in the code.
_ANY_NAME = frozenset(
    {"vars", "__dict__", "__getattribute__", "attrgetter", "methodcaller", "globals", "eval"}
    | {"exec", "__import__", "import_module", "getmembers", "getattr_static"}
)
_NAMED = frozenset({"getattr", "hasattr", "setattr", "delattr"})  # the second argument is the name
_SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "RESUME"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_OUTSIDE = frozenset({"print", "open", "input", "exec", "eval", "breakpoint"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# Opcodes whose argument is a name, and by how many bits it is shifted there.
_SHIFTS = {
    "LOAD_GLOBAL": int(sys.version_info >= (3, 11)),
    "LOAD_NAME": 0,
    "LOAD_ATTR": int(sys.version_info >= (3, 12)),
    "LOAD_METHOD": 0,
    "IMPORT_NAME": 0,
}
_NAMING = {dis.opmap[name]: (name, bits) for name, bits in _SHIFTS.items() if name in dis.opmap}
_SKIPPED_OPCODES = frozenset(dis.opmap[name] for name in _SKIPPED if name in dis.opmap)
_EXTENDED = dis.EXTENDED_ARG


@dataclass(frozen=True)
class Reads:
    """The reads of a code object and of the functions defined inside it."""

    names: frozenset[str]  # attributes, global variables, and strings (getattr, a table's keys)
    chains: tuple[tuple[str, ...], ...]  # global variable, then the attributes read of it at once
    imports: tuple[str, ...]  # modules imported while the code runs
    dynamic: bool  # it may read any attribute
    passed_on: tuple[str, ...]  # builtins with effects that are not just called (map(print, ...))


@functools.lru_cache(maxsize=8192)
def reads_of(code: types.CodeType) -> Reads:
    names: set[str] = set()
    chains: dict[tuple[str, ...], None] = {}
    imports: dict[str, None] = {}
    passed_on: dict[str, None] = {}
    dynamic = False
    for inner in _codes(code):
        names.update(inner.co_names)
        names.update(_strings(inner.co_consts))
        found = _named(inner)
        chains.update(dict.fromkeys(_chains(found)))
        imports.update(dict.fromkeys(name for kind, name in found if kind == "IMPORT_NAME"))
        dynamic = dynamic or not _ANY_NAME.isdisjoint(inner.co_names)
        if (_NAMED | _OUTSIDE).isdisjoint(inner.co_names):
            continue  # dis takes ten times as long as the above
        instructions = [i for i in dis.get_instructions(inner) if i.opname not in _SKIPPED]
        computed = (_computes_a_name(instructions, i) for i in range(len(instructions)))
        dynamic = dynamic or any(computed)
        passed_on.update(dict.fromkeys(_passed_on(instructions)))
    return Reads(frozenset(names), tuple(chains), tuple(imports), dynamic, tuple(passed_on))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, frozenset)):
        for item in value:
            yield from _strings(item)


def _named(code: types.CodeType) -> list[tuple[str, str]]:
    """(operation, name) of what loads or imports by name; ("", "") for any other instruction."""
    found = []
    names, extended = code.co_names, 0
    operations = iter(code.co_code)
    for opcode, low in zip(operations, operations, strict=True):
        argument = extended | low
        if opcode == _EXTENDED:
            extended = argument << 8
            continue
        extended = 0
        if opcode in _NAMING:
            kind, bits = _NAMING[opcode]
            found.append((kind, names[argument >> bits]))
        elif opcode not in _SKIPPED_OPCODES:
            found.append(("", ""))
    return found


def _chains(found: list[tuple[str, str]]) -> Iterator[tuple[str, ...]]:
    chain: tuple[str, ...] = ()
    for kind, name in found:
        if chain and kind in _ATTRIBUTES:
            chain = (*chain, name)
            continue
        if chain:
            yield chain
        chain = (name,) if kind in _GLOBALS else ()
    if chain:
        yield chain


def _passed_on(instructions: list[dis.Instruction]) -> Iterator[str]:
    """From 3.11 on the interpreter marks globals that are loaded only to be called."""
    for instruction in instructions:
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval in _OUTSIDE:
            called = sys.version_info >= (3, 11) and bool((instruction.arg or 0) & 1)
            if not called:
                yield str(instruction.argval)


def _computes_a_name(instructions: list[dis.Instruction], at: int) -> bool:
    """Whether `getattr` is loaded here for anything but a call with a written name."""
    first = instructions[at]
    if first.opname not in _GLOBALS or first.argval not in _NAMED:
        return False
    pushed = 0  # values on the stack above the function
    second: dis.Instruction | None = None  # what made the second of them
    for instruction in instructions[at + 1 :]:
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            return True  # a conditional expression among the arguments
        argument = instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
        pushed += dis.stack_effect(instruction.opcode, argument)
        if pushed == 2 and not instruction.opname.startswith("PRECALL"):
            second = instruction
        if pushed < 1:  # it is called, or was stored or passed on
            break
    written = second is not None and second.opname == "LOAD_CONST" and pushed < 1
    return not (written and isinstance(second.argval, str))  # type: ignore[union-attr]
