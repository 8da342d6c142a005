"""Values of inputs that Python reads while a module is captured (docs/decisions/0239-*.md).

torch.export shows Python no elements: a size or a branch that depends on one ends the capture.
Under `KnownValues` those of this call are told. What was told of small inputs of integers is a
condition of the record, compared at every call; what follows from others is a check of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from rm_abstract.calls.call import FlatCall, leaf_count
from rm_abstract.calls.tensors import held_tensors
from rm_abstract.guards.torch_state import may_be_asked

_MOST_CHECKED = 64  # elements that one check compares
_MOST_FOLLOWED = 1 << 24  # elements of a tensor that is computed beside the trace
_TOKENS = ("ids", "mask", "labels")  # in names of arguments: their values differ in every call

_READS = frozenset(
    {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "is_nonzero", "equal"}
)
_COUNTED = frozenset(  # their results are as long as values say
    {"nonzero", "argwhere", "unique", "unique_consecutive", "bincount", "_return_output"}
)
_UNSTEADY = ("rand", "bernoulli", "multinomial", "normal", "dropout", "poisson", "empty")
_SIZED = frozenset(  # they take sizes, which may come as tensors
    {"arange", "linspace", "full", "zeros", "ones", "empty", "view", "reshape", "expand", "repeat"}
    | {"split", "narrow", "tile", "__getitem__", "__setitem__", "new_zeros", "new_ones"}
)
_MADE = frozenset({"tensor", "arange", "zeros", "ones", "full", "as_tensor"})


@dataclass(frozen=True)
class _Known:
    traced: torch.Tensor  # alive: its id is the key
    real: torch.Tensor
    inputs: frozenset[int]  # that it was computed from
    sizes: tuple[torch.SymInt, ...] = ()  # of inputs, likewise


class KnownValues(TorchFunctionMode):
    """Of one capture. `asked` are the inputs that it holds for."""

    def __init__(self, call: FlatCall) -> None:
        super().__init__()
        self._inputs: dict[int, torch.Tensor] = {}
        for number, name, tensor in _inputs(call):
            if any(part in name for part in _TOKENS) or tensor.numel() > _MOST_FOLLOWED:
                continue
            if may_be_asked(tensor) or call.has_contents:
                self._inputs[number] = tensor.detach().clone()
        self._small = {n for n, t in self._inputs.items() if may_be_asked(t)}
        self._known: dict[int, _Known] = {}
        self._checked: set[int] = set()
        self.asked: set[int] = set()

    @property
    def may_help(self) -> bool:
        return bool(self._inputs)

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Forward is about to be traced with these inputs."""
        self._known.clear()
        self._checked.clear()
        self.asked.clear()
        with _disable_current_modes():  # else the copies would be traced
            values = {number: real.clone() for number, real in self._inputs.items()}
        for number, real in values.items():
            self._remember(tensors[number], real, frozenset({number}))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__iter__":
            parts = self.__torch_function__(torch.Tensor.unbind, types, args)
            return iter(parts)
        tensors = [x for x in _all((args, kwargs)) if isinstance(x, torch.Tensor)]
        known = [self._known.get(id(t)) for t in tensors]
        if name in _READS and known and all(k is not None and self._ask(k) for k in known):
            return self._real(func, args, kwargs)
        counted = name in _COUNTED or (name == "where" and len(args) == 1)
        if counted and known and all(k is not None and self._ask(k) for k in known):
            return self._constants(self._real(func, args, kwargs), _together(known))
        chosen = self._chosen(name, func, args, kwargs)
        if chosen is not None:
            return chosen
        if name in _SIZED:
            args, kwargs = self._with_numbers(args), self._with_numbers(kwargs)
        result = func(*args, **kwargs)
        self._follow(name, func, args, kwargs, result, known)
        return result

    # ---- what is known -----------------------------------------------------------------------

    def _remember(
        self,
        traced: torch.Tensor,
        real: torch.Tensor,
        inputs: frozenset[int],
        sizes: tuple[torch.SymInt, ...] = (),
    ) -> None:
        self._known[id(traced)] = _Known(traced, real, inputs, sizes)

    def _real(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call on the values themselves, beside the trace."""

        def value(x: Any) -> Any:
            if isinstance(x, torch.SymInt):
                return int(x.node.hint)  # this call's; what asks makes it a condition
            return self._known[id(x)].real if isinstance(x, torch.Tensor) else x

        args, kwargs = _mapped(value, args), _mapped(value, kwargs)
        with _disable_current_modes():
            return func(*args, **kwargs)

    def _follow(
        self,
        name: str,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        result: Any,
        known: Sequence[_Known | None],
    ) -> None:
        """Remembers the values of a result where those of all operands are known."""
        leaves = _leaves(result)
        if _writes(name):
            self._checked.clear()
        elif not leaves:
            return
        real: list[torch.Tensor] | None = None
        if all(k is not None for k in known) and (known or name in _MADE):
            try:
                if not any(part in name for part in _UNSTEADY):
                    real = _leaves(self._real(func, args, kwargs))
            except Exception:  # what cannot be computed beside the trace is not known
                real = None
        if real is None or [(x.dtype, x.dim()) for x in real] != [
            (x.dtype, x.dim()) for x in leaves
        ]:
            written = known if _writes(name) or _may_share(name) or None not in known else []
            self._forget([*written, self._known.get(id(kwargs.get("out")))])
            return
        sizes = tuple(x for x in _all((args, kwargs)) if isinstance(x, torch.SymInt))
        sizes += tuple(size for k in known if k is not None for size in k.sizes)
        for traced, value in zip(leaves, real, strict=True):
            if value.numel() <= _MOST_FOLLOWED:
                self._remember(traced, value, _together(known), sizes)

    def _forget(self, written: Sequence[_Known | None]) -> None:
        """Of tensors that get unknown elements, and of all that share their memory."""
        memory = {k.real.untyped_storage().data_ptr() for k in written if k is not None}
        for key, known in list(self._known.items() if memory else ()):
            if known.real.untyped_storage().data_ptr() in memory:
                del self._known[key]

    # ---- what is asked -----------------------------------------------------------------------

    def _ask(self, known: _Known) -> bool:
        """Whether the capture may hold for these values alone; if so, it does from here on."""
        real, traced = known.real, known.traced
        if known.inputs <= self._small:
            for size in (*known.sizes, *traced.shape):
                int(size)  # a condition of the export
            self.asked |= known.inputs
            return True
        if real.dtype.is_floating_point or real.dtype.is_complex or real.numel() > _MOST_CHECKED:
            return False
        if real.dim() == 0 and real.dtype is torch.bool:  # a branch: the other is refused again
            return False
        if id(traced) not in self._checked:
            self._checked.add(id(traced))
            same = traced == _literal(real)
            torch._assert_async(same.all(), "values of another call")
        return True

    def _number(self, value: Any) -> Any:
        """A tensor that is one known integer, as that."""
        if not isinstance(value, torch.Tensor):
            return value
        known = self._known.get(id(value))
        if known is None or value.dim() or known.real.dtype.is_floating_point:
            return value
        if known.real.dtype is torch.bool or not self._ask(known):
            return value
        with _disable_current_modes():
            return int(known.real)

    def _with_numbers(self, value: Any) -> Any:
        return _mapped(self._number, value)

    def _constants(self, result: Any, inputs: frozenset[int]) -> Any:
        """Results as constants of the program."""

        def constant(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            made = _literal(x)
            self._remember(made, x, inputs)
            return made

        return pytree.tree_map(constant, result)

    def _chosen(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Elements that known masks choose, or that known numbers repeat; None: it is neither."""
        if name == "__getitem__" and len(args) == 2:
            index = _mapped(self._places, args[1])
            return None if index is None or index is args[1] else self(func, args[0], index)
        if name != "repeat_interleave" or len(args) < 2 or not isinstance(args[1], torch.Tensor):
            return None
        repeats = self._known.get(id(args[1]))
        if repeats is None or not self._ask(repeats):
            return None
        x, dim = args[0], args[2] if len(args) > 2 else kwargs.get("dim")
        if dim is None:
            x, dim = self(torch.flatten, x), 0
        with _disable_current_modes():
            count = repeats.real.expand(x.shape[dim]) if repeats.real.numel() == 1 else repeats.real
            places = torch.repeat_interleave(torch.arange(len(count)), count.cpu())
        return self(torch.index_select, x, dim, self._constants(places, repeats.inputs))

    def __call__(self, func: Callable[..., Any], *args: Any) -> Any:
        """A call of ours, followed like one of the module's."""
        return self.__torch_function__(func, (), args)

    def _places(self, mask: Any) -> Any:
        """A known mask of one axis as the places that it chooses."""
        if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool or mask.dim() != 1:
            return mask
        known = self._known.get(id(mask))
        if known is None or not self._ask(known):
            return mask
        with _disable_current_modes():
            places = known.real.nonzero().flatten()
        return self._constants(places, known.inputs)


def _inputs(call: FlatCall) -> Iterator[tuple[int, str, torch.Tensor]]:
    """(number among the program's inputs, name of the argument, tensor), caches left out."""
    leaves, number = iter(call.leaves), 0
    for name, spec in zip(call.spec.names, call.spec.specs, strict=True):
        for _ in range(leaf_count(spec)):
            leaf = next(leaves)
            if isinstance(leaf, torch.Tensor):
                yield number, name, leaf
                number += 1
            else:
                number += len(held_tensors(leaf))


def _leaves(value: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def _literal(x: torch.Tensor) -> torch.Tensor:
    """A constant of the graph that is being traced."""
    with _disable_current_modes():
        values = x.flatten().tolist()
    return torch.tensor(values, dtype=x.dtype, device=x.device).reshape(x.shape)


def _together(known: Sequence[_Known | None]) -> frozenset[int]:
    return frozenset().union(*(k.inputs for k in known if k is not None))


def _writes(name: str) -> bool:
    """Whether a method of this name writes into its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_") or name == "__set__"


def _may_share(name: str) -> bool:
    """Whether a result may be a view of a known tensor although another operand is not known."""
    return name == "to" or name.endswith("_as")


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """`change` of everything in containers and slices; the same object where nothing changes."""
    if isinstance(value, slice):
        parts = [value.start, value.stop, value.step]
        made = [_mapped(change, part) for part in parts]
        return value if _alike(parts, made) else slice(*made)
    if type(value) in (list, tuple):
        items = [_mapped(change, item) for item in value]
        return value if _alike(value, items) else type(value)(items)
    if type(value) is dict:
        made = [_mapped(change, item) for item in value.values()]
        return value if _alike(list(value.values()), made) else dict(zip(value, made, strict=True))
    return change(value)


def _alike(before: Sequence[Any], after: Sequence[Any]) -> bool:
    return all(x is y for x, y in zip(before, after, strict=True))


def _all(value: Any) -> list[Any]:
    """Everything in containers and slices."""
    found: list[Any] = []

    def take(x: Any) -> Any:
        found.append(x)
        return x

    _mapped(take, value)
    return found
