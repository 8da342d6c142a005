"""`Tensor`: an array, what made it and its gradient. Only what ran is remembered, so loops,
branches and changing shapes work.

A result's ``creator`` is a `Node` with what its gradient needs; ``backward`` walks nodes from the
loss in reverse order and has every gradient program executed like any other operator.
"""

from __future__ import annotations

import math
import numbers
import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from rm_abstract.base.errors import Error
from rm_abstract.framework import programs
from rm_abstract.framework.backends import Executor, backend
from rm_abstract.framework.programs import Attrs, Gradient, Ints
from rm_abstract.worker.dtypes import DTYPE_NAMES

ElementType: TypeAlias = torch.dtype  # in Tensor, `torch` is a method


class _State(threading.local):
    """Of one thread: who executes, and whether results remember what made them."""

    def __init__(self) -> None:
        self.executor: Executor | None = None
        self.gradients = True
        self.watched: dict[Tensor, None] | None = None  # what got gradients while recording


_state = _State()


def executor() -> Executor:
    """Who executes this thread's operators: "cpu" until `use_backend` says something else."""
    if _state.executor is None:
        _state.executor = backend("cpu")
    return _state.executor


def use_backend(name: str) -> None:
    """Chooses who executes this thread's operators, and where tensors made from here on lie: "cpu",
    "cuda" (torch's current GPU, "cuda:1" the second) or "torch". Raises ValueError for another,
    DeviceUnavailableError where there is no such GPU."""
    _state.executor = backend(name)


@contextmanager
def executing(by: Executor) -> Iterator[None]:
    """Within it, ``by`` executes this thread's operators."""
    before, _state.executor = _state.executor, by
    try:
        yield
    finally:
        _state.executor = before


@contextmanager
def watching_gradients() -> Iterator[dict[Tensor, None]]:
    """Gives the tensors that get gradients within it."""
    _state.watched = {}
    try:
        yield _state.watched
    finally:
        _state.watched = None


@contextmanager
def no_grad() -> Iterator[None]:
    """Within it results do not remember what made them. Also a decorator."""
    before, _state.gradients = _state.gradients, False
    try:
        yield
    finally:
        _state.gradients = before


class Node:
    """What made a result: its gradient program and the arrays that it reads."""

    __slots__ = ("edges", "gradient", "saved", "versions")

    def __init__(self, gradient: Gradient, inputs: list[Tensor], results: list[Any]) -> None:
        self.gradient = gradient
        held = [x.data for x in inputs] + results
        # None: the gradient of the first result, the only one of a floating type.
        self.saved: list[Any] | None = [held[i] if i < len(held) else None for i in gradient.reads]
        self.versions = [None if x is None else x._version for x in self.saved]
        # Where gradients go on: the node of an operand that has one, else the tensor itself.
        self.edges = [inputs[i].creator or inputs[i] for i in gradient.gives]

    def backward(self, gradient: Any) -> list[Any]:
        """Gradients by ``edges``. Frees what was saved."""
        saved = self.saved
        name = self.gradient.program.name
        if saved is None:
            raise Error(
                f"[backward] expected the {name} to be computed once; try one backward for the sum "
                "of the losses",
                code="RM708",
            )
        for x, version in zip(saved, self.versions, strict=True):
            if x is not None and x._version != version:
                raise Error(
                    f"[backward] expected what the {name} reads as it was in the forward, got a "
                    "tensor that was changed in place; try the change after backward",
                    code="RM708",
                )
        self.saved = None
        arrays = [gradient if x is None else x for x in saved]
        return executor().execute(self.gradient.program, arrays)


class Tensor:
    """An array of f32, f64, bf16, f16, integers or booleans on the device of the backend that was
    chosen when it was made.

    ``data``: a torch tensor; it shares memory with what was given where that lies there. ``grad``:
    the sum of the gradients of all ``backward`` calls so far, or None. Operands of one operator
    have one element type and broadcast as in NumPy; numbers take the type of the tensor.
    """

    __slots__ = ("__weakref__", "creator", "data", "grad", "requires_grad")
    __array_ufunc__ = None  # numbers and arrays of NumPy ask this class first

    def __init__(
        self, value: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False
    ) -> None:
        """``value``: a torch tensor or NumPy array, or numbers. Raises TypeError for gradients of
        what is not floating."""
        data = value.data if isinstance(value, Tensor) else torch.as_tensor(value)
        if isinstance(data, torch.Tensor):
            data = data.detach().resolve_conj().resolve_neg()  # memory is to be the value
            if data.is_inference():  # its changes could not be seen
                with torch.inference_mode(False):
                    data = data.clone()
            data = executor().backend.place(data)
        self.data: Any = data if dtype is None else data.to(dtype)
        if requires_grad and not self.data.dtype.is_floating_point:
            raise TypeError(f"[Tensor] expected a floating type, got {self.data.dtype}")
        self.requires_grad = requires_grad
        self.grad: Tensor | None = None
        self.creator: Node | None = None

    # ---- what it is ----------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype  # type: ignore[no-any-return]

    @property
    def ndim(self) -> int:
        return len(self.data.shape)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("[len] expected an axis, got a scalar")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Tensor({self.data!r}, requires_grad={self.requires_grad})"

    def torch(self) -> torch.Tensor:
        """The array as a torch tensor that shares its memory."""
        return _number(self).detach()

    def numpy(self) -> Any:
        """The array as a NumPy array: it shares memory of the host, and is a copy of a GPU's."""
        return _number(self).numpy(force=True)

    def item(self) -> Any:
        """The only element as a number of Python. Raises ValueError when there are more."""
        if math.prod(self.shape) != 1:
            raise ValueError(f"[item] expected one element, got {self.shape}")
        return _number(self).item()

    __float__ = item

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def detach(self) -> Tensor:
        """The same array, without what made it."""
        return of(self.data)

    # ---- gradients -----------------------------------------------------------------------------

    def backward(self) -> None:
        """Adds the gradient of this scalar to ``grad`` of every tensor that it depends on.

        Raises ValueError for what is no floating scalar or depends on nothing with a gradient,
        Error RM708 when something it reads has changed since.
        """
        if math.prod(self.shape) != 1 or self.creator is None:
            raise ValueError(
                f"[backward] expected one number that depends on a parameter, got {self.shape}"
            )
        order = _topological(self.creator)
        ones = executor().execute(programs.ones(self.data), [])
        arriving: dict[int, Any] = {id(self.creator): ones[0]}
        for node in reversed(order):
            for edge, part in zip(node.edges, node.backward(arriving.pop(id(node))), strict=True):
                if isinstance(edge, Tensor):
                    edge.add_gradient(part)
                else:
                    there = arriving.get(id(edge))
                    arriving[id(edge)] = part if there is None else _sum(there, part)

    def add_gradient(self, part: Any) -> None:
        """Adds an array to ``grad``."""
        if _state.watched is not None:
            if self.grad is not None and self not in _state.watched:
                raise Error(
                    "[record] expected no gradients from before the step; try zero_grad() in it",
                    code="RM709",
                )
            _state.watched[self] = None
        self.grad = of(part if self.grad is None else _sum(self.grad.data, part))

    # ---- operators -----------------------------------------------------------------------------

    def __add__(self, other: Any) -> Tensor:
        return apply("add", (self, other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Tensor:
        return apply("sub", (self, other))

    def __rsub__(self, other: Any) -> Tensor:
        return apply("sub", (other, self))

    def __mul__(self, other: Any) -> Tensor:
        return apply("mul", (self, other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Tensor:
        return apply("div", (self, other))

    def __rtruediv__(self, other: Any) -> Tensor:
        return apply("div", (other, self))

    def __pow__(self, other: Any) -> Tensor:
        return apply("pow", (self, other))

    def __neg__(self) -> Tensor:
        return apply("neg", (self,))

    def __matmul__(self, other: Tensor) -> Tensor:
        return apply("matmul", (self, other))

    def __eq__(self, other: object) -> Any:
        return apply("eq", (self, other)) if _is_operand(other) else NotImplemented

    def __ne__(self, other: object) -> Any:
        return apply("ne", (self, other)) if _is_operand(other) else NotImplemented

    __hash__ = object.__hash__

    def __lt__(self, other: Any) -> Tensor:
        return apply("lt", (self, other))

    def __le__(self, other: Any) -> Tensor:
        return apply("le", (self, other))

    def __gt__(self, other: Any) -> Tensor:
        return apply("gt", (self, other))

    def __ge__(self, other: Any) -> Tensor:
        return apply("ge", (self, other))

    def to(self, dtype: ElementType) -> Tensor:
        """The elements in another type; the gradient comes back in this one."""
        if dtype == self.dtype:
            return self
        return apply("cast", (self,), (("dtype", DTYPE_NAMES[dtype]),))

    def reshape(self, *shape: int) -> Tensor:
        """The same elements in another shape; one size may be -1. Raises ValueError for a shape of
        another number of elements."""
        sizes = list(_flat(shape))
        if -1 in sizes:
            known = math.prod(s for s in sizes if s != -1)
            if not known:
                raise ValueError(f"[reshape] expected -1 to be one size, got {tuple(sizes)}")
            sizes[sizes.index(-1)] = math.prod(self.shape) // known
        return apply("reshape", (self,), (("shape", tuple(sizes)),))

    def permute(self, *axes: int) -> Tensor:
        order = Ints(axis_of(a, self.ndim) for a in _flat(axes))
        return apply("permute", (self,), (("axes", order),))

    def transpose(self, first: int, second: int) -> Tensor:
        """Two axes exchanged."""
        axes = list(range(self.ndim))
        first, second = axis_of(first, self.ndim), axis_of(second, self.ndim)
        axes[first], axes[second] = axes[second], axes[first]
        return self.permute(*axes)

    @property
    def T(self) -> Tensor:
        """All axes in reverse order."""
        return self.permute(*reversed(range(self.ndim)))

    def expand(self, *shape: int) -> Tensor:
        """Axes of one element, and new ones in front, repeat; -1 keeps a size."""
        sizes = list(_flat(shape))
        for i in range(1, min(self.ndim, len(sizes)) + 1):
            sizes[-i] = self.shape[-i] if sizes[-i] == -1 else sizes[-i]
        return apply("expand", (self,), (("shape", tuple(sizes)),))

    def sum(self, axis: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
        return self._reduced("sum", axis, keepdim)

    def mean(self, axis: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
        return self._reduced("mean", axis, keepdim)

    def max(self, axis: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
        """Values only; equal elements share the gradient. Raises ValueError for an empty axis."""
        return self._reduced("max", axis, keepdim)

    def min(self, axis: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
        """Values only; equal elements share the gradient. Raises ValueError for an empty axis."""
        return self._reduced("min", axis, keepdim)

    def argmax(self, axis: int, keepdim: bool = False) -> Tensor:
        """The first place of the largest element. Raises ValueError for an empty axis."""
        return self._reduced("argmax", axis, keepdim)

    def _reduced(self, kind: str, axis: int | Sequence[int] | None, keepdim: bool) -> Tensor:
        axes = range(self.ndim) if axis is None else _flat((axis,))
        order = Ints(sorted(axis_of(a, self.ndim) for a in axes))
        if len(set(order)) != len(order):
            raise ValueError(f"[{kind}] expected each axis once, got {tuple(axes)}")
        if kind in ("max", "min", "argmax") and not all(self.shape[a] for a in order):
            raise ValueError(f"[{kind}] expected an element along each axis, got {self.shape}")
        attrs = (("axes", order), ("keepdim", int(keepdim)), ("kind", kind))
        return apply("reduce", (self,), attrs)

    def __getitem__(self, key: Any) -> Tensor:
        """Integers, slices with positive steps, None, ``...`` and integer tensors on neighbouring
        axes. Raises IndexError for what is outside, TypeError for any other key."""
        keys = list(key) if isinstance(key, tuple) else [key]
        missing = self.ndim - sum(k is not None and k is not Ellipsis for k in keys)
        held = sum(k is Ellipsis for k in keys)
        if held > 1:
            raise IndexError("[index] expected one ... at most")
        if not held:
            keys.append(Ellipsis)
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        keys[at : at + 1] = [slice(None)] * missing
        if missing < 0:
            raise IndexError(
                f"[index] expected at most {self.ndim} axes, got {self.ndim - missing}"
            )
        x, axis, shape = self, 0, []
        chosen: list[tuple[int, Tensor]] = []
        for k in keys:
            if k is None:
                shape.append(1)
                continue
            size = self.shape[axis]
            if isinstance(k, slice):
                start, stop, step = k.indices(size)
                if step < 1:
                    raise TypeError("[index] expected a slice with a positive step")
                stop = max(start, stop)
                x = x._slice(axis, start, stop, step)
                shape.append(x.shape[axis])
            elif isinstance(k, Tensor):
                if k.dtype not in (torch.int64, torch.int32):
                    raise TypeError(f"[index] expected integers, got {k.dtype}")
                chosen.append((len(shape), k))
                shape.append(size)
            elif hasattr(k, "__index__") and not isinstance(k, (bool, torch.Tensor)):
                k = operator.index(k)
                if not -size <= k < size:
                    raise IndexError(f"[index] expected an index below {size}, got {k}")
                x = x._slice(axis, k % size, k % size + 1, 1)
            else:
                raise TypeError(f"[index] expected an integer, slice or Tensor, got {type(k)}")
            axis += 1
        if tuple(shape) != x.shape:
            x = x.reshape(*shape)
        if not chosen:
            return x
        axes = [a for a, _ in chosen]
        if axes != list(range(axes[0], axes[0] + len(axes))):
            raise TypeError("[index] expected tensors on neighbouring axes")
        return apply("index", (x, *(k for _, k in chosen)), (("axes", Ints(axes)),))

    def _slice(self, axis: int, start: int, stop: int, step: int) -> Tensor:
        if (start, stop, step) == (0, self.shape[axis], 1):
            return self
        attrs = (("axis", axis), ("start", (start,)), ("step", step), ("stop", (stop,)))
        return apply("slice", (self,), attrs)


def _is_operand(x: object) -> bool:
    """Whether tensors are compared with it element by element."""
    return isinstance(x, (Tensor, torch.Tensor, numbers.Real))


def axis_of(axis: int, ndim: int) -> int:
    """The axis counted from the front. Raises IndexError for one that is not there."""
    if not -ndim <= axis < ndim:
        raise IndexError(f"[axis] expected one of {ndim} axes, got {axis}")
    return axis % ndim


def _flat(values: Any) -> Sequence[int]:
    first = values[0] if len(values) == 1 else None
    return first if isinstance(first, (tuple, list)) else values


def _number(x: Tensor) -> torch.Tensor:
    if not isinstance(x.data, torch.Tensor):
        raise Error(
            "[record] expected a step that reads no numbers while it is recorded; try to return "
            "the tensor, or to run the step without recording",
            code="RM707",
        )
    return x.data


def of(data: Any) -> Tensor:
    """A tensor of this array, without gradient."""
    made = Tensor.__new__(Tensor)
    made.data, made.requires_grad, made.grad, made.creator = data, False, None, None
    return made


def _sum(a: Any, b: Any) -> Any:
    return executor().op_call("add", (a, b))[1][0]


def _topological(last: Node) -> list[Node]:
    """All nodes that ``last`` depends on, each behind those it depends on, ``last`` at the end."""
    order: list[Node] = []
    seen: set[int] = set()
    stack: list[tuple[Node, bool]] = [(last, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        stack.append((node, True))
        stack += [(e, False) for e in node.edges if isinstance(e, Node) and id(e) not in seen]
    return order


def remembers() -> bool:
    """Whether results of this thread remember what made them."""
    return _state.gradients


def move(state: Tensor, value: Tensor, rate: float) -> None:
    """state := state + rate (value - state), in place."""
    executor().execute(programs.blend(state.data, rate), [state.data, value.data])


_PLAIN = (float, int, bool, type(None))


def _plain(name: str, x: Any) -> Any:
    """A number of NumPy's as Python's, a torch tensor as the array of one. Raises TypeError."""
    if isinstance(x, torch.Tensor):
        return Tensor(x).data
    if isinstance(x, numbers.Real):
        return int(x) if isinstance(x, numbers.Integral) else float(x)
    raise TypeError(f"[{name}] expected a Tensor or a number, got a {type(x).__name__}")


def apply(name: str, inputs: Sequence[Any], attrs: Attrs = ()) -> Tensor:
    """One operator on tensors, numbers or None; the first result. ``attrs`` sorted by name."""
    return apply_all(name, inputs, attrs)[0]


def apply_all(name: str, inputs: Sequence[Any], attrs: Attrs = ()) -> list[Tensor]:
    """All results of one operator. Those of a floating type remember what made them when an operand
    has a gradient. Raises TypeError and ValueError for operands it does not take."""
    by = _state.executor or executor()
    arrays = [
        x.data if isinstance(x, Tensor) else x if x.__class__ in _PLAIN else _plain(name, x)
        for x in inputs
    ]
    if _state.watched is not None and hasattr(by, "owned"):
        by.owned(inputs)
    program, results = by.op_call(name, arrays, attrs)
    made = [of(data) for data in results]
    if _state.gradients:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        wanted = tuple([x.requires_grad for x in tensors])
        if True in wanted and made[0].data.dtype.is_floating_point:
            gradient = program.gradient(wanted)
            if gradient.gives:
                made[0].creator = Node(gradient, tensors, results)
                made[0].requires_grad = True
    return made
