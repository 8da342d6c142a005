"""A program of many layers from the trace of a model with its first four.

In the text of the IR the nodes between the first use of a weight of layer 1 and that of layer 2 are
a *window*; the next one, up to layer 3, must be the same but for what moves along: weights and
caches of the layer, and values that the window before defined. Windows are then written for all
other layers, and the traced rest, which begins with layer 3, stands behind the last one. A trace
where anything is not as said gives no program.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from rm_abstract.capture.captured import Captured
from rm_abstract.capture.layer_list import TRACED, LayerList

_VALUE = re.compile(r"%(\d+)")
_WEIGHT = re.compile(r'weight %(\d+) "([^"]*)" : (.*)')
_Key = tuple[
    Any, ...
]  # of a value: ("input", number), ("weight", name), ("literal", id), ("node", at, n)


class _Irregular(Exception):
    """The layers are not repetitions of one window."""


@dataclass
class _Text:
    """The lines of a program by kind, and the key of every value."""

    head: list[str]
    inputs: list[str]
    relations: list[str]
    weights: list[tuple[str, str]]  # name, type
    literals: list[str]
    nodes: list[str]
    returned: list[int]
    keys: dict[int, _Key]

    @staticmethod
    def of(text: str) -> _Text:
        read = _Text([], [], [], [], [], [], [], {})
        for line in text.splitlines():
            kind = line.split(" ", 1)[0]
            numbers = [int(n) for n in _VALUE.findall(line)]
            if kind == "input":
                read.keys[numbers[0]] = ("input", len(read.inputs))
                read.inputs.append(line)
            elif kind == "weight":
                match = _WEIGHT.fullmatch(line)
                if match is None:
                    raise _Irregular
                read.keys[numbers[0]] = ("weight", match[2])
                read.weights.append((match[2], match[3]))
            elif kind == "literal":
                read.keys[numbers[0]] = ("literal", len(read.literals))
                read.literals.append(line)
            elif kind == "where":
                read.relations.append(line)
            elif kind == "return":
                read.returned = numbers
            elif line.startswith("%"):
                for n, value in enumerate(_VALUE.findall(line.split(" = ", 1)[0])):
                    read.keys[int(value)] = ("node", len(read.nodes), n)
                read.nodes.append(line)
            else:
                read.head.append(line)
        return read

    def operands(self, at: int) -> list[_Key]:
        _, right = self.nodes[at].split(" = ", 1)
        return [self.keys[int(n)] for n in _VALUE.findall(right)]


def extended(captured: Captured, layers: LayerList, first_buffer: int | None) -> Captured | None:
    """`captured`, of a model with the first layers, for all of them; None where they are irregular.

    ``first_buffer``: which input is the first buffer of a cache among the inputs, if one is.
    """
    if captured.kept or captured.constants or captured.repeated:
        return None
    try:
        writer = _Writer(_Text.of(captured.ir), layers, first_buffer)
        numbers = _cache_numbers(captured)
        writer.check_outputs(numbers)
    except (_Irregular, KeyError, ValueError):
        return None
    added = 2 * (layers.count - TRACED)
    outputs = len(writer.text.returned)

    def more(structure: Any) -> Any:
        if not isinstance(structure, list):
            return structure
        if len(structure) == 3 and structure[0] == "cache":
            return ["cache", structure[1], [*structure[2], *range(outputs, outputs + added)]]
        return [more(item) for item in structure]

    dims = list(captured.input_dims)
    if first_buffer is not None:
        end = first_buffer + 2 * TRACED
        dims[end:end] = dims[end - 2 : end] * (layers.count - TRACED)
    return replace(
        captured,
        ir=writer.write(numbers),
        weights=writer.weight_names(captured.weights),
        input_dims=dims,
        output=more(captured.output) if numbers else captured.output,
        caches=more(captured.caches) if numbers else captured.caches,
    )


def _cache_numbers(captured: Captured) -> list[int]:
    """The outputs that are keys and values of the layers, in order; [] where there are none."""
    kinds = str([captured.output, captured.caches])
    if any(f"'{kind}'" in kinds for kind in ("caches", "windows", "states")):
        raise _Irregular
    found = {tuple(s[2]) for s in _structures([captured.output, captured.caches], "cache")}
    if not found:
        return []
    (numbers,) = found  # of two caches it is not known which layers fill them
    if len(numbers) not in (2 * TRACED, 2 * TRACED + 1) or -1 in numbers:
        raise _Irregular
    return list(numbers[-2 * TRACED :])


def _structures(structure: Any, kind: str) -> list[Any]:
    if not isinstance(structure, list):
        return []
    if len(structure) == 3 and structure[0] == kind:
        return [structure]
    return [found for item in structure for found in _structures(item, kind)]


class _Writer:
    """Writes the program of all layers. Raises _Irregular where they are not one window each."""

    def __init__(self, text: _Text, layers: LayerList, first_buffer: int | None) -> None:
        self.text, self._count, self._buffer = text, layers.count, first_buffer
        self._prefix = layers.name + "."
        if first_buffer is not None:  # inputs behind the cache get other numbers
            end, added = first_buffer + 2 * TRACED, 2 * (layers.count - TRACED)
            for value, key in text.keys.items():
                if key[0] == "input" and key[1] >= end:
                    text.keys[value] = ("input", key[1] + added)
        starts = [self._first_use(n) for n in range(TRACED)]
        one, two, three = starts[1:]
        self._period = two - one
        if not starts[0] < one < two < three or three - two != self._period:
            raise _Irregular
        self._starts = starts
        self._moves = [self._moving(one + at) for at in range(self._period)]
        uses = [at for at in range(two, three) if self._uses(2, at)]
        for at in range(two, max(uses)):  # layer 3 as well, as far as its end is in sight
            if _VALUE.sub("%", text.nodes[at]) != _VALUE.sub("%", text.nodes[at + self._period]):
                raise _Irregular
        for at in range(three, len(text.nodes)):
            for key in text.operands(at):
                self._in_rest(key)

    def _first_use(self, layer: int) -> int:
        for at in range(len(self.text.nodes)):
            if self._uses(layer, at):
                return at
        raise _Irregular

    def _uses(self, layer: int, at: int) -> bool:
        return any(self._layer_of(key) == layer for key in self.text.operands(at))

    def _layer_of(self, key: _Key) -> int | None:
        """The layer that a weight or a buffer of a cache belongs to."""
        if key[0] == "weight" and key[1].startswith(self._prefix):
            return int(key[1][len(self._prefix) :].split(".", 1)[0])
        if key[0] == "input" and self._buffer is not None:
            at = int(key[1]) - self._buffer
            return at // 2 if 0 <= at < 2 * TRACED else None
        return None

    def _of_layer(self, key: _Key, layer: int) -> _Key:
        """The counterpart of a weight or a buffer."""
        if key[0] == "weight":
            rest = key[1][len(self._prefix) :].split(".", 1)[1]
            return ("weight", f"{self._prefix}{layer}.{rest}")
        assert self._buffer is not None
        return ("input", self._buffer + 2 * layer + (int(key[1]) - self._buffer) % 2)

    def _moving(self, at: int) -> list[bool]:
        """For each operand of a node of the first window whether it moves along to the next."""
        nodes, period = self.text.nodes, self._period
        if _VALUE.sub("%", nodes[at]) != _VALUE.sub("%", nodes[at + period]):
            raise _Irregular
        moves = []
        for a, b in zip(self.text.operands(at), self.text.operands(at + period), strict=True):
            if self._layer_of(a) is not None:
                if self._layer_of(a) != 1 or b != self._of_layer(a, 2):
                    raise _Irregular
                moves.append(True)
            elif a[0] == "node" and b == ("node", a[1] + period, a[2]):
                if a[1] < self._starts[1] - period:
                    raise _Irregular
                moves.append(True)
            elif a == b and not (a[0] == "node" and a[1] >= self._starts[1]):
                moves.append(False)
            else:
                raise _Irregular
        return moves

    def _moved(self, key: _Key, windows: int) -> _Key:
        """The value that a window's operand is so many windows later."""
        layer = self._layer_of(key)
        if layer is not None:
            return self._of_layer(key, layer + windows)
        return ("node", key[1] + windows * self._period, key[2]) if key[0] == "node" else key

    def _in_rest(self, key: _Key) -> _Key:
        """The value that an operand of the traced rest is behind the last window."""
        layer = self._layer_of(key)
        last = layer == TRACED - 1 if layer is not None else True
        one, two = self._starts[1:3]
        if not last or (key[0] == "node" and one <= key[1] < two):
            raise _Irregular  # the rest reads layers one by one
        if layer is None and not (key[0] == "node" and key[1] >= two):
            return key
        return self._moved(key, self._count - TRACED)

    def check_outputs(self, caches: list[int]) -> None:
        """Raises _Irregular unless outputs are of the rest, or keys and values layer by layer."""
        returned = [self.text.keys[n] for n in self.text.returned]
        if caches and caches != list(range(len(returned) - len(caches), len(returned))):
            raise _Irregular
        for number, key in enumerate(returned):
            if number not in caches:
                self._in_rest(key)
        for one, two, three in zip(caches[2:4], caches[4:6], caches[6:8], strict=True):
            of_one = returned[one]
            if of_one[0] != "node" or of_one[1] < self._starts[1]:
                raise _Irregular
            if [self._moved(of_one, n) for n in (1, 2)] != [returned[two], returned[three]]:
                raise _Irregular

    def weight_names(self, names: list[str]) -> list[str]:
        """With those of the other layers, each run of a layer's behind the last traced one's."""
        found: list[str] = []
        run: list[str] = []
        for name in [*names, ""]:
            if self._layer_of(("weight", name)) == TRACED - 1:
                run.append(name)
            elif run:
                for layer in range(TRACED, self._count):
                    found += [str(self._of_layer(("weight", n), layer)[1]) for n in run]
                run = []
            found.append(name)
        return found[:-1]

    def write(self, caches: list[int]) -> str:
        """The program of all layers; ``caches`` are the outputs that are keys and values."""
        numbers = _Numbers()
        lines = [*self.text.head, *self._declarations(numbers)]
        one, three = self._starts[1], self._starts[3]
        lines += [self._node(numbers, at, at, self.text.operands(at)) for at in range(one)]
        for window in range(self._count - 2):
            for at in range(one, one + self._period):
                operands = [
                    self._moved(key, window) if moves else key
                    for key, moves in zip(
                        self.text.operands(at), self._moves[at - one], strict=True
                    )
                ]
                lines.append(self._node(numbers, at, at + window * self._period, operands))
        behind = (self._count - TRACED) * self._period
        for at in range(three, len(self.text.nodes)):
            operands = [self._in_rest(key) for key in self.text.operands(at)]
            lines.append(self._node(numbers, at, at + behind, operands))
        returned = ", ".join(map(numbers.of, self._outputs(caches)))
        return "\n".join([*lines, f"return {returned}"]) + "\n"

    def _declarations(self, numbers: _Numbers) -> list[str]:
        """Lines of inputs, relations, weights and literals."""
        inputs = list(self.text.inputs)
        if self._buffer is not None:
            end = self._buffer + 2 * TRACED
            inputs[end:end] = inputs[end - 2 : end] * (self._count - TRACED)
        lines = []
        for n, line in enumerate(inputs):
            kind = line.split('"', 2)[2]
            lines.append(f'input {numbers.of(("input", n))} "input{n}"{kind}')
        lines += self.text.relations
        types = dict(self.text.weights)
        for name in self.weight_names(list(types)):
            key: _Key = ("weight", name)
            layer = self._layer_of(key)
            like = self._of_layer(key, TRACED - 1)[1] if (layer or 0) >= TRACED else name
            lines.append(f'weight {numbers.of(key)} "{name}" : {types[like]}')
        for n, line in enumerate(self.text.literals):
            lines.append(_renumbered(line, [numbers.of(("literal", n))]))
        return lines

    def _node(self, numbers: _Numbers, at: int, place: int, operands: list[_Key]) -> str:
        """A traced node as it stands at a place of the written program."""
        left, right = self.text.nodes[at].split(" = ", 1)
        right = _renumbered(right, [numbers.of(key) for key in operands])
        results = range(len(_VALUE.findall(left)))
        left = _renumbered(left, [numbers.of(("node", place, n)) for n in results])
        return f"{left} = {right}"

    def _outputs(self, caches: list[int]) -> list[_Key]:
        returned = [self.text.keys[n] for n in self.text.returned]
        found = [self._in_rest(key) for n, key in enumerate(returned) if n not in caches]
        if caches:
            found += [returned[n] for n in caches[:2]]
            pair = [returned[n] for n in caches[2:4]]
            found += [self._moved(k, w) for w in range(self._count - 1) for k in pair]
        return found


class _Numbers:
    """Of values in the order in which they are first named."""

    def __init__(self) -> None:
        self._numbers: dict[_Key, int] = {}

    def of(self, key: _Key) -> str:
        return f"%{self._numbers.setdefault(key, len(self._numbers))}"


def _renumbered(line: str, values: list[str]) -> str:
    """The line with these values, in order, in the place of its own."""
    taken = iter(values)
    return _VALUE.sub(lambda _: next(taken), line)
