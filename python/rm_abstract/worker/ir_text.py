"""Reads programs in the IR's text form (rm.ir/1, src/ir/text.hpp) into plain records. No torch.

Trusts its input as little as any file: what is not understood is a ValueError with the line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

Attr: TypeAlias = "int | float | str | list[int] | list[float] | tuple[str, ...]"

_VALUE = re.compile(
    r'^(input|weight|literal) %(\d+)(?: "((?:[^"\\]|\\.)*)")? : (\S+)( donated)?(?: = (\w*))?$'
)
_NODE = re.compile(r"^(%\d+(?:, %\d+)*) = ([\w.]+)\(([^)]*)\)(?: \{(.*)\})? : (.+)$")
_ESCAPE = re.compile(r'\\(x[0-9a-f]{2}|["\\n])')


@dataclass(frozen=True)
class Type:
    """An element type and dims as text: integers or expressions of symbols."""

    dtype: str
    dims: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims of a static type. Raises ValueError for a symbolic one."""
        return tuple(int(d) for d in self.dims)


@dataclass(frozen=True)
class Node:
    op: str
    operands: tuple[int | None, ...]
    results: tuple[int, ...]
    attrs: dict[str, Attr]
    types: tuple[Type, ...]

    def i(self, name: str, otherwise: int | None = None) -> int:
        """An integer attribute. Raises ValueError when it is absent or of another kind."""
        value = self.attrs.get(name, otherwise)
        if not isinstance(value, int):
            raise ValueError(f"[ir] expected {self.op} to have the integer {name}, got {value!r}")
        return value

    def f(self, name: str) -> float:
        value = self.attrs.get(name)
        if not isinstance(value, (int, float)):
            raise ValueError(f"[ir] expected {self.op} to have the number {name}, got {value!r}")
        return float(value)

    def floats(self, name: str) -> list[float]:
        value = self.attrs.get(name)
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"[ir] expected {self.op} to have the list {name}, got {value!r}")
        return [float(v) for v in value]

    def ints(self, name: str) -> list[int]:
        """A list of integers, or static dims."""
        value = self.attrs.get(name)
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"[ir] expected {self.op} to have the list {name}, got {value!r}")
        return [int(v) for v in value]


@dataclass
class Program:
    inputs: list[int] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # of inputs that have one
    donated: set[int] = field(default_factory=set)  # inputs that are states
    weights: dict[int, str] = field(default_factory=dict)
    literals: dict[int, bytes] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    types: dict[int, Type] = field(default_factory=dict)

    @property
    def input_types(self) -> list[Type]:
        return [self.types[i] for i in self.inputs]

    @property
    def output_types(self) -> list[Type]:
        return [self.types[i] for i in self.outputs]


def split(text: str, separator: str = ",") -> list[str]:
    """Splits at separators outside brackets and quotes."""
    parts, depth, quoted, start, at = [], 0, False, 0, 0
    while at < len(text):
        mark = text[at]
        if quoted and mark == "\\":
            at += 1
        elif mark == '"':
            quoted = not quoted
        elif not quoted:
            depth += (mark in "([<") - (mark in ")]>")
            if depth == 0 and text.startswith(separator, at):
                parts.append(text[start:at])
                start = at + len(separator)
        at += 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def parse_type(text: str) -> Type:
    dtype, bracket, rest = text.partition("[")
    if not bracket or not rest.endswith("]"):
        raise ValueError(f"[ir] expected a type such as f32[2,3], got {text!r}")
    return Type(dtype, tuple(split(rest[:-1])))


def unquote(text: str) -> str:
    """A quoted string's content; bytes beyond ASCII are \\xHH of UTF-8."""

    def decoded(match: re.Match[str]) -> str:
        code = match.group(1)
        return "\n" if code == "n" else code if code in '"\\' else chr(int(code[1:], 16))

    return _ESCAPE.sub(decoded, text).encode("latin-1").decode("utf-8")


def parse_attr(text: str) -> Attr:
    if text.startswith('"'):
        return unquote(text[1:-1])
    if text.startswith("<"):
        return tuple(split(text[1:-1]))
    if text.startswith("f["):
        return [_float(part) for part in split(text[2:-1])]
    if text.startswith("["):
        return [int(part) for part in split(text[1:-1])]
    return _float(text) if any(m in text for m in "x.npi") else int(text)


def _float(text: str) -> float:
    return float(text) if text.lstrip("-") in ("inf", "nan") else float.fromhex(text)


def parse(text: str) -> Program:
    """The whole program. Raises ValueError."""
    program = Program()
    for line in text.splitlines():
        if line.startswith("%"):
            _read_node(line, program)
        elif line.startswith("return"):
            program.outputs = [int(part[1:]) for part in split(line[len("return") :])]
        elif line.startswith(("input", "weight", "literal")):
            _read_value(line, program)
        elif not line.startswith(("rmir 1", "sym ", "where ")):
            raise ValueError(f"[ir] expected a line of rm.ir/1, got {line!r}")
    return program


def _read_value(line: str, program: Program) -> None:
    found = _VALUE.match(line)
    if found is None:
        raise ValueError(f"[ir] expected an input, a weight or a literal, got {line!r}")
    kind, number, name, type_text, donated, data = found.groups()
    value = int(number)
    program.types[value] = parse_type(type_text)
    if kind == "input":
        program.inputs.append(value)
        if name:
            program.names[value] = unquote(name)
        if donated:
            program.donated.add(value)
    elif kind == "weight":
        program.weights[value] = unquote(name or "")
    else:
        program.literals[value] = bytes.fromhex(data or "")


def _read_node(line: str, program: Program) -> None:
    head, colon, types_text = line.rpartition(" : ")
    found = _NODE.match(head + " : " + types_text) if colon else None
    if found is None:
        raise ValueError(f"[ir] expected a node, got {line!r}")
    results_text, op, operands_text, attrs_text, types_text = found.groups()
    results = tuple(int(part[1:]) for part in split(results_text))
    operands = tuple(None if p == "_" else int(p[1:]) for p in split(operands_text))
    attrs: dict[str, Attr] = {}
    for part in split(attrs_text or ""):
        name, _, value = part.partition("=")
        attrs[name] = parse_attr(value)
    types = tuple(parse_type(part) for part in split(types_text))
    program.nodes.append(Node(op, operands, results, attrs, types))
    program.types.update(zip(results, types, strict=True))
