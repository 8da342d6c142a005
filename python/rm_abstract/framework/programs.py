"""What is executed: one operator, its gradient, or one optimiser's update, as a program in the IR.

Every program is made once for its problem (operator, attributes, element types, shapes); types are
inferred and gradients built by the core (src/autograd). Arrays are torch tensors, or the symbols of
a recorder: what counts here is their ``shape`` and ``dtype``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from rm_abstract import _core
from rm_abstract.base.errors import Error
from rm_abstract.worker.dtypes import DTYPE_NAMES

Attrs: TypeAlias = tuple[tuple[str, Any], ...]  # a tuple as a value is sizes, Ints are integers
Run: TypeAlias = "Callable[[list[Any]], list[Any]]"


class Ints(tuple[int, ...]):
    """An attribute that is a list of integers: axes, strides."""


class Gradient:
    """A program for the gradients of an operator's operands.

    ``reads``: its inputs, as places in [operands..., results..., gradients of results...].
    ``gives``: the operands whose gradients it gives.
    """

    __slots__ = ("gives", "program", "reads")

    def __init__(self, program: Program, reads: list[int], gives: list[int]) -> None:
        self.program, self.reads, self.gives = program, reads, gives


class Program:
    """A program's text, and what each backend made of it. ``whole``: it is a step, no operator."""

    __slots__ = ("_gradients", "name", "runs", "states", "text", "whole")

    def __init__(self, name: str, text: str, states: int = 0, whole: bool = False) -> None:
        self.name, self.text, self.whole = name, text, whole
        self.states = states  # how many inputs are updated in place
        self.runs: dict[str, Run] = {}
        self._gradients: dict[tuple[bool, ...], Gradient] = {}

    def gradient(self, wanted: tuple[bool, ...]) -> Gradient:
        """By the operands that are wanted. Raises Error RM702 for an operator that has none."""
        found = self._gradients.get(wanted)
        if found is None:
            try:
                text, reads, gives = _core.eager.gradient(self.text, list(wanted))
            except _core.CoreError as error:
                raise Error(str(error), code=error.reason) from None
            found = Gradient(Program(f"gradient of {self.name}", text), reads, gives)
            self._gradients[wanted] = found
        return found


def _kind(x: Any) -> Any:
    if x is None:
        return None
    shape = getattr(x, "shape", None)
    return float(x).hex() if shape is None else (shape, x.dtype)


def type_of(x: Any) -> tuple[str, tuple[int, ...]]:
    """(element type, shape) as the core names them. Raises TypeError for a type it has not."""
    name = DTYPE_NAMES.get(x.dtype)
    if name is None:
        raise TypeError(f"[op_call] expected an element type of {list(DTYPE_NAMES)}, got {x.dtype}")
    return name, tuple(x.shape)


_operations: dict[Any, Program] = {}


def operation(name: str, inputs: Sequence[Any], attrs: Attrs) -> Program:
    """The program of one operator of docs/operators.md on arrays, numbers or None.

    A number takes the element type of the first array that is not logical. Raises TypeError and
    ValueError for operands that the operator does not take.
    """
    key = (name, attrs, *map(_kind, inputs))
    found = _operations.get(key)
    if found is None:
        found = _operations[key] = Program(name, _operation(name, inputs, attrs))
    return found


def _operation(name: str, inputs: Sequence[Any], attrs: Attrs) -> str:
    operands: list[Any] = []
    whole = any(
        hasattr(x, "dtype") and not x.dtype.is_floating_point and x.dtype != torch.bool
        for x in inputs
    ) and not any(hasattr(x, "dtype") and x.dtype.is_floating_point for x in inputs)
    for x in inputs:
        if x is None:
            operands.append(None)
        elif hasattr(x, "dtype"):
            operands.append(type_of(x))
        else:
            if whole and float(x) != int(x):
                raise TypeError(f"[{name}] expected a whole number beside integers, got {x}")
            operands.append(float(x))
    given = {key: list(value) if isinstance(value, Ints) else value for key, value in attrs}
    try:
        return str(_core.eager.operation(name, operands, given))
    except _core.CoreError as error:
        raise ValueError(str(error)) from None


_updates: dict[Any, Program] = {}


def update(rule: tuple[tuple[str, Any], ...], parameter: Any) -> Program:
    """One optimiser's update of one parameter; ``rule`` as ``_core.autograd.states`` takes it."""
    key = (rule, parameter.shape, parameter.dtype)
    found = _updates.get(key)
    if found is None:
        text = _core.eager.update(dict(rule), type_of(parameter))
        states = 1 + len(_core.autograd.states(dict(rule)))
        found = _updates[key] = Program("update", text, states)
    return found


_texts: dict[Any, Program] = {}


def ones(like: Any) -> Program:
    """No inputs; ones of this array's type and shape."""
    key = ("ones", like.shape, like.dtype)
    found = _texts.get(key)
    if found is None:
        text = f"rmir 1\n%0 = full() {{value=0x1p0}} : {_written(like)}\nreturn %0\n"
        found = _texts[key] = Program("ones", text)
    return found


def blend(state: Any, rate: float) -> Program:
    """state := state + rate (value - state), in place; inputs: state, value."""
    key = ("blend", rate, state.shape, state.dtype)
    found = _texts.get(key)
    if found is None:
        whole, number = _written(state), struct.pack("<d", rate).hex()
        text = (
            f'rmir 1\ninput %0 "state" : {whole} donated\ninput %1 "value" : {whole}\n'
            f"literal %2 : f64[] = {number}\n%3 = cast(%2) : {type_of(state)[0]}[]\n"
            f"%4 = sub(%1, %0) : {whole}\n%5 = mul(%4, %3) : {whole}\n"
            f"%6 = add(%0, %5) : {whole}\n%7 = assign(%0, %6) : {whole}\nreturn %7\n"
        )
        found = _texts[key] = Program("blend", text, 1)
    return found


def _written(x: Any) -> str:
    dtype, shape = type_of(x)
    return f"{dtype}[{','.join(map(str, shape))}]"
