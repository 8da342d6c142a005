"""What a call of a module did besides giving its outputs, seen while the original runs once.

A program gives outputs and nothing else. A forward that counts its calls, keeps what it saw, prints
or logs or draws random numbers must stay with the original; this watch finds that out on the call
that would be captured, before the capture runs forward a second time.

Denies by default: a C function that user code calls and that is not known to be free of effects
(guards/pure_calls.py) counts as an effect.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rm_abstract.base.kinds import same_value
from rm_abstract.base.profilers import profiling
from rm_abstract.guards import sources, torch_state
from rm_abstract.guards.found import BOOKKEEPING, Sources
from rm_abstract.guards.packages import is_user_file
from rm_abstract.guards.pure_calls import effect_of, effect_of_library

_LOGGING = logging.__file__
# torch.nn.TransformerEncoder asks it of a padding mask and computes with nested tensors.
_UNEVEN_ROWS = torch._nested_tensor_from_mask_left_aligned
_UNEVEN_TOLD = (
    "gives zeros where the padding mask hides a position: nn.TransformerEncoder packs rows into "
    "nested tensors; with enable_nested_tensor=False it is compiled"
)
_MODULE_CODE = frozenset(
    {torch.nn.Module._call_impl.__code__, torch.nn.Module._wrapped_call_impl.__code__}
)
# Outside of a capture torch compiles their branches: it reads source files and caches of its own,
# and refuses branches with effects itself.
_COMPILED_BY_TORCH = {torch.cond.__code__}
with contextlib.suppress(ImportError, AttributeError):  # a private name of torch
    from torch._higher_order_ops.map import map as control_map

    _COMPILED_BY_TORCH.add(control_map.__code__)
_MODULE_SETATTR = torch.nn.Module.__setattr__.__code__


def can_watch() -> bool:
    """False while a profiler is on: two observers of calls disturb each other."""
    return not profiling()


class Effects:
    """Context manager around one run of the original. ``found`` is empty when it did nothing.

    ``settles``: what was found may be a first call setting something up, or another thread's doing;
    found again on the next call it is what the module does.
    ``trains``: of a training step, which may draw from torch's stream and move its buffers.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        containers: Sequence[tuple[str, Any]] = (),
        trains: bool = False,
    ) -> None:
        self.found, self.code = "", "RM205"
        self.settles = True
        self.state_reads: list[str] = []  # by code of the user (guards/torch_state.py)
        self._module = module
        self._containers, self._trains = containers, trains
        self._profiled = False

    def __enter__(self) -> Effects:
        self._state = _state_of(self._module, not self._trains)
        # A tensor that is gone gives its identity and its memory to the next one.
        weights = itertools.chain(self._module.parameters(), self._module.buffers())
        self._alive = [(weight, weight.detach()) for weight in weights]
        self._given = [(where, value, _flat(value)) for where, value in self._containers]
        self._streams = _random_streams(not self._trains)
        if can_watch():
            self._profiled = True
            sys.setprofile(self._event)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._profiled:
            sys.setprofile(None)
        if exception[0] is not None or not self.settles:
            return
        for where, value, before in self._given:
            now = _flat(value)
            if len(before) != len(now) or not all(map(_same, before, now)):
                self._final(f"changes its argument {where}")
                return
        if self._streams != _random_streams(not self._trains):
            self.found = "draws from a random stream of Python, NumPy or torch"
        elif not self.found and (changed := _changed(self._state)):
            self.found = f"changes {changed}"

    def _final(self, what: str, code: str = "RM205") -> None:
        self.found, self.settles, self.code = what, False, code

    def _event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if not self.settles:
            return
        if event == "c_call":
            self._c_call(frame, argument)
        elif event == "call":
            code = frame.f_code
            question = torch_state.asked_by_code(code)
            asking = frame if question == "requires_grad" else frame.f_back
            if question and asking is not None and is_user_file(asking.f_code.co_filename):
                self._ask(question)
            if code is _MODULE_SETATTR:
                self._attribute(frame)
            elif code.co_filename == _LOGGING and frame.f_back is not None:
                if is_user_file(frame.f_back.f_code.co_filename):
                    self._final(f"logs ({_place(frame.f_back)})")

    def _c_call(self, frame: types.FrameType, function: Any) -> None:
        user = is_user_file(frame.f_code.co_filename)
        if user:
            self._ask(torch_state.asked_by_call(function))
            if what := effect_of(function):
                self._final(f"{what} ({_place(frame)})")
        elif function is _UNEVEN_ROWS:
            self._final(_UNEVEN_TOLD, "RM207")
        elif self._trains and function is warnings.warn:
            return  # torch's own, such as of a loss: Python shows it once a place
        elif (what := effect_of_library(function)) and (caller := _user_caller(frame)):
            self._final(f"{what} ({_place(caller)})")

    def _ask(self, question: str) -> None:
        if question and question not in self.state_reads:
            self.state_reads.append(question)

    def _attribute(self, frame: types.FrameType) -> None:
        """A module's attribute is set: a second run that sets the same plain value is harmless."""
        writer = frame.f_back
        if writer is None or not is_user_file(writer.f_code.co_filename):
            return
        name, value = frame.f_locals.get("name"), frame.f_locals.get("value")
        owner = frame.f_locals.get("self")
        before = vars(owner).get(name, self) if owner is not None else self
        constant = value is None or isinstance(value, (bool, str))
        if constant and type(before) is type(value) and before == value:
            return
        self.found = f"sets {type(owner).__name__}.{name} ({_place(writer)})"


# Set on a class by copying or looking at its objects, not by their code.
_KEPT_BY_PYTHON = frozenset({"__slotnames__", "__abstractmethods__", "_abc_impl", "__doc__"})


def _place(frame: types.FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _user_caller(frame: types.FrameType) -> types.FrameType | None:
    """The user's line that a library function works for; None: a library's module does."""
    caller = frame.f_back
    while caller is not None and caller.f_code not in _MODULE_CODE:
        if caller.f_code in _COMPILED_BY_TORCH:
            return None
        if is_user_file(caller.f_code.co_filename):
            return caller
        caller = caller.f_back
    return None


def _random_streams(of_torch: bool) -> list[Any]:
    streams: list[Any] = [random.getstate()]
    if of_torch:
        streams.append(torch.get_rng_state().numpy().tobytes())
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        state = numpy.random.get_state(legacy=False)["state"]
        streams.append((state["key"].tobytes(), state["pos"]) if "key" in state else str(state))
    return streams


# ---- comparing ------------------------------------------------------------------------------

_Row = tuple[str, Any, Callable[[Any], Any], Any]  # place, holder, how to read it, what it held


def _state_of(module: torch.nn.Module, weights: bool) -> list[_Row]:
    found = sources.of_module(module)
    rows = _copied(found)
    for path, part in module.named_modules():
        name = path or type(part).__name__
        rows.append((name, vars(part), _attributes, _attributes(vars(part))))
        for group in (part._parameters, part._buffers) if weights else ():
            rows.append((path, group, _tensors, _tensors(group)))
    return rows


def _copied(found: Sources) -> list[_Row]:
    rows: list[_Row] = []
    for space, names, where in found.dicts:
        if space is None:
            continue
        read = _stored if names in (None, True) else _picked(tuple(names))  # type: ignore[arg-type]
        rows.append((where, space, read, read(space)))
    for value, where in found.held:
        whole = _held if isinstance(value, types.CellType) else _items
        rows.append((where, value, whole, whole(value)))
    for value, slots, where in found.objects:
        slots_read = _slots(slots)
        rows.append((where, value, slots_read, slots_read(value)))
    rows += [(where, array, _content, _content(array)) for array, where in found.arrays]
    for kind in found.classes:
        rows.append((kind.__qualname__, kind, _class_values, _class_values(kind)))
    rows += [(where, tensor, _written, _written(tensor)) for tensor, where in found.tensors]
    return rows


def _stored(space: dict[Any, Any]) -> dict[Any, Any]:
    """As it lies there: transformers' ``ACT2FN`` makes a new module for each that asks it."""
    return dict(dict.items(space))


def _flat(value: Any) -> list[Any]:
    """What lists, dicts and tuples of an argument hold, depth first."""
    if type(value) is dict:
        return [len(value), *(part for k, v in value.items() for part in (k, *_flat(v)))]
    if type(value) in (list, tuple):
        return [len(value), *(part for v in value for part in _flat(v))]
    return [value]


def _picked(names: tuple[Any, ...]) -> Callable[[Any], dict[Any, Any]]:
    return lambda space: {name: space[name] for name in names if name in space}


def _attributes(space: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in space.items() if k not in BOOKKEEPING}


def _class_values(kind: type) -> dict[str, Any]:
    return {k: v for k, v in vars(kind).items() if k not in _KEPT_BY_PYTHON}


def _slots(names: tuple[str, ...]) -> Callable[[Any], dict[str, Any]]:
    def read(value: Any) -> dict[str, Any]:
        found = {}
        for name in names:
            try:
                found[name] = object.__getattribute__(value, name)
            except AttributeError:
                continue
        return found

    return read


def _items(value: Any) -> list[Any]:
    return list(value) if not isinstance(value, (set, frozenset)) else [len(value), set(value)]


def _content(array: Any) -> bytes:
    return bytes(array.tobytes() if hasattr(array, "tobytes") else array)


def _tensors(group: dict[str, Any]) -> dict[str, Any]:
    return {
        k: (id(t), _memory(t), _version(t)) if t is not None else None for k, t in group.items()
    }


def _held(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _written(tensor: torch.Tensor) -> tuple[int, int]:
    return _memory(tensor), _version(tensor)


def _memory(tensor: torch.Tensor) -> int:
    """Its address, which `tensor.data = other` changes and no version tells."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse ones and classes of a library's own
        return 0


def _changed(rows: list[_Row]) -> str:
    """The place of the first holder that holds something else than before; empty: none."""
    for where, holder, read, before in rows:
        now = read(holder)
        if isinstance(before, dict):
            if before.keys() != now.keys():
                odd = [str(k) for k in before.keys() ^ now.keys()]
                return f"{where}.{odd[0]}" if where else odd[0]
            for key, value in before.items():
                if not _same(value, now[key]):
                    return f"{where}.{key}" if where else str(key)
        elif isinstance(before, list):
            if len(before) != len(now) or not all(map(_same, before, now)):
                return where
        elif not _same(before, now):
            return where
    return ""


def _same(before: Any, now: Any) -> bool:
    if isinstance(now, (set, bytes)):
        return bool(before == now)
    return bool(same_value(before, now))
