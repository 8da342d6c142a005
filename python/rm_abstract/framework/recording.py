"""A whole step (forward, backward, update) recorded as one program and replayed.

While a step is recorded, the recorder stands in the backend's place: it computes nothing, appends
each program to one graph and gives symbols back. Tensors from outside become inputs that are read
where they lie; those that an update writes are the graph's states. The thread's backend then
compiles the whole, so that eager steps and replays use the same kernels' rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.errors import Error
from rm_abstract.framework import programs, tensor
from rm_abstract.framework.backends import Backend
from rm_abstract.framework.programs import Attrs, Program
from rm_abstract.framework.tensor import Tensor
from rm_abstract.worker.dtypes import DTYPES


class Symbol:
    """An array of a step that is being recorded: its type, and its value in the graph."""

    __slots__ = ("_version", "dtype", "shape", "value")

    def __init__(self, value: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.value, self.dtype, self.shape, self._version = value, dtype, shape, 0


class Recorder:
    """An executor that writes down instead of executing."""

    name = "recorder"

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._graph = _core.eager.Recorder()
        self.arrays: list[torch.Tensor] = []  # by input
        self.states: dict[int, Symbol] = {}  # what an input holds after the step, by input
        self.before: list[Callable[[], None]] = []  # at each replay
        self.after: list[Callable[[], None]] = []
        self.once: dict[int, object] = {}  # objects that may come once a step, by id
        self.draws: dict[Any, int] = {}  # of random numbers, by generator
        self.owners: dict[int, Tensor] = {}  # tensors that hold arrays from outside, by array's id
        self._inputs: dict[int, int] = {}  # id of an array -> its input's number and value
        self._symbols: list[Symbol] = []  # of the inputs

    def input(self, array: torch.Tensor) -> Symbol:
        """The symbol of an array from outside: what an update left, or a new input."""
        number = self._inputs.get(id(array))
        if number is None:
            number = self._inputs[id(array)] = len(self.arrays)
            self.arrays.append(array)
            value = self._graph.input(programs.type_of(array))
            self._symbols.append(Symbol(value, array.dtype, tuple(array.shape)))
        return self.states.get(number, self._symbols[number])

    def owned(self, inputs: Sequence[Any]) -> None:
        """Remembers who held an array: another one may lie there at a replay."""
        for x in inputs:
            if isinstance(x, Tensor) and isinstance(x.data, torch.Tensor):
                self.owners[id(x.data)] = x

    def execute(self, program: Program, arrays: list[Any]) -> list[Any]:
        symbols = [a if isinstance(a, Symbol) else self.input(a) for a in arrays]
        rows = self._graph.add(program.text, [s.value for s in symbols])
        results = [Symbol(value, DTYPES[dtype], shape) for value, dtype, shape in rows]
        # A program of states returns their new values first, in their order (programs.py).
        for array, result in zip(arrays[: program.states], results, strict=False):
            if isinstance(array, Symbol):
                raise Error(
                    "[record] expected a tensor from outside to be updated; try to make states "
                    "before the step",
                    code="RM709",
                )
            number = self._inputs[id(array)]
            if number not in self.states:
                self._graph.donate(self._symbols[number].value)
            self.states[number] = result  # what the step reads and updates from here on
        return results

    def op_call(
        self, name: str, inputs: Sequence[Any], attrs: Attrs = ()
    ) -> tuple[Program, list[Any]]:
        program = programs.operation(name, inputs, attrs)
        return program, self.execute(program, [x for x in inputs if hasattr(x, "dtype")])

    def finish(self, outputs: list[Symbol]) -> Program:
        values = [s.value for s in (*outputs, *self.states.values())]
        return Program("recorded step", self._graph.finish(values), len(self.states), True)


def once_a_step(owner: object) -> None:
    """Raises Error RM709 when a step that is being recorded comes here twice for this object: what
    it writes before a replay holds for all of the step."""
    by = tensor.executor()
    if not isinstance(by, Recorder):
        return
    if id(owner) in by.once:
        raise Error(
            f"[record] expected one step of {type(owner).__name__} in a recorded step, got two; "
            "try to record what lies between them",
            code="RM709",
        )
    by.once[id(owner)] = owner


def each_time(
    before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> None:
    """Runs a function now, or at every replay of the step that is being recorded: ``before`` may
    write numbers into tensors, ``after`` runs when the replay succeeded."""
    by = tensor.executor()
    for function, kept in ((before, "before"), (after, "after")):
        if function is not None and isinstance(by, Recorder):
            getattr(by, kept).append(function)
        elif function is not None:
            function()


class _Replay:
    """One recorded step, for one structure of arguments."""

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], by: Backend
    ) -> None:
        self._recorder = Recorder(by)
        self._by = by
        self._places = [i for i, a in enumerate(arguments) if isinstance(a, Tensor)]
        # Views: an argument is an input of its own, also where its array is known already.
        given = [arguments[i].data.detach() for i in self._places]
        symbols = [tensor.of(self._recorder.input(array)) for array in given]
        inside = list(arguments)
        for i, symbol in zip(self._places, symbols, strict=True):
            symbol.requires_grad = arguments[i].requires_grad
            inside[i] = symbol
        with tensor.executing(self._recorder), tensor.watching_gradients() as touched:
            try:
                returned = function(*inside)
            finally:
                for t in touched:
                    t.grad = None  # a symbol means nothing outside
        self._single = not isinstance(returned, (tuple, list))
        results = [] if returned is None else [returned] if self._single else list(returned)
        if not all(isinstance(r, Tensor) for r in results):
            raise Error("[record] expected a step that returns tensors or None", code="RM709")
        outputs = [
            r.data if isinstance(r.data, Symbol) else self._recorder.input(r.data) for r in results
        ]
        self._count = len(outputs)
        self.program = self._recorder.finish(outputs)
        arrays = self._recorder.arrays
        self._kept = arrays[len(given) :]
        owners = self._recorder.owners
        self._owned = [(owners[id(a)], a) for a in self._kept if id(a) in owners]
        self._states = sorted(_span(arrays[i]) for i in self._recorder.states)
        read = [a for i, a in enumerate(arrays) if i not in self._recorder.states]
        if any(a[1] > b[0] for a, b in pairwise(self._states)) or self._updates(read[len(given) :]):
            raise Error(
                "[record] expected tensors that are updated to have memory of their own, got some "
                "that share it; try copies",
                code="RM709",
            )

    def fits(self) -> bool:
        """Whether the tensors from outside hold the arrays that they held."""
        return all(owner.data is array for owner, array in self._owned)

    def _updates(self, arrays: Sequence[torch.Tensor]) -> bool:
        """Whether the step writes to the memory of one of them."""
        if not self._states:
            return False
        for start, end in map(_span, arrays):
            before = bisect_left(self._states, (end, 0))  # states that begin in front of its end
            if before and self._states[before - 1][1] > start:
                return True
        return False

    def __call__(self, arguments: tuple[Any, ...]) -> Any:
        arrays = [arguments[i].data for i in self._places]
        if self._updates(arrays):
            raise Error(
                "[record] expected arguments that the step does not update; try to read a "
                "parameter where it lies",
                code="RM709",
            )
        for function in self._recorder.before:
            function()
        results = self._by.execute(self.program, [*arrays, *self._kept])[: self._count]
        for function in self._recorder.after:
            function()
        made = [tensor.of(data) for data in results]
        if not made:
            return None
        return made[0] if self._single else made


class Recorded:
    """See `record`. ``programs``: the text of every step that was recorded, in rm.ir/1."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._replays: dict[Hashable, _Replay] = {}

    @property
    def programs(self) -> list[str]:
        return [replay.program.text for replay in self._replays.values()]

    def __call__(self, *arguments: Any) -> Any:
        by = tensor.executor()
        if isinstance(by, Recorder):
            return self._function(*arguments)
        key = (by.name, tensor.remembers(), *map(_kind, arguments))
        replay = self._replays.get(key)
        if replay is None or not replay.fits():
            replay = self._replays[key] = _Replay(self._function, arguments, by.backend)
        return replay(arguments)


def _kind(argument: Any) -> Hashable:
    if isinstance(argument, Tensor):
        return (argument.data.shape, argument.dtype, argument.requires_grad)
    if isinstance(argument, float):  # -0.0 equals 0.0, and NaN nothing
        return (type(argument), argument.hex())
    return (type(argument), argument)


def _span(array: torch.Tensor) -> tuple[int, int]:
    """First byte and the one behind the last that the array touches; two times the same for one of
    no elements."""
    start = array.data_ptr()
    if not array.numel():
        return start, start
    last = sum((n - 1) * s for n, s in zip(array.shape, array.stride(), strict=True))
    return start, start + (last + 1) * array.element_size()


def record(function: Callable[..., Any]) -> Recorded:
    """``function`` as a step that is recorded once for every shape of its arguments, then replayed.

    The function runs once a shape, without computing; every call, the first included, replays the
    compiled whole. Arguments are tensors, and values that can be keys of a dictionary; it returns
    tensors or None. Parameters and the optimiser's state are read and written where they lie.
    Gradients exist inside the step only: ``grad`` is None afterwards. What the function reads of
    Python beside its arguments, such as ``training`` of a module, stays what it was when it ran.

    Raises Error RM707 when the function asks for the numbers of a tensor (``if loss > 1``), RM709
    when it updates what is no tensor from outside or returns something else.
    """
    return Recorded(function)
