"""What a call of a module did besides giving its outputs, seen while the original runs once.

A program gives outputs and nothing else. A forward that counts its calls, keeps what it saw, prints
or logs or draws from Python's random streams must stay with the original; this watch finds that out
on the call that would be captured, before the capture runs forward a second time.
"""

from __future__ import annotations

import logging
import random
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rm_abstract import surroundings, torch_state
from rm_abstract.surroundings import SIMPLE, Surroundings

_LOGGING = logging.__file__
# torch.nn.TransformerEncoder asks it of a padding mask and computes with nested tensors.
_UNEVEN_ROWS = torch._nested_tensor_from_mask_left_aligned
_UNEVEN_TOLD = (
    "gives zeros where the padding mask hides a position: nn.TransformerEncoder packs rows into "
    "nested tensors; with enable_nested_tensor=False it is compiled"
)
_MODULE_SETATTR = torch.nn.Module.__setattr__.__code__
# What user code calls to be seen or heard elsewhere; library code warns and logs as it likes.
_OUTSIDE = {"print": "prints", "open": "opens a file", "input": "asks for input"}
_CLOCKS = frozenset({"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "sleep"})


class Effects:
    """Context manager around one run of the original. ``found`` is empty when it did nothing.

    ``settles``: what was found may be a first call setting something up, or another thread's doing;
    found again on the next call it is what the module does.
    """

    def __init__(self, module: torch.nn.Module, containers: Sequence[tuple[str, Any]] = ()) -> None:
        self.found, self.code = "", "RM205"
        self.settles = True
        self.asked: list[str] = []  # of torch's state, by the user's code (torch_state.py)
        self._module = module
        self._containers = containers
        self._profiled = False

    def __enter__(self) -> Effects:
        self._state = _state_of(self._module)
        self._given = [(where, value, _flat(value)) for where, value in self._containers]
        self._streams = _random_streams()
        if sys.getprofile() is None:  # the user's own profiler goes first
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
        if self._streams != _random_streams():
            self.found = "draws from a random stream of Python or NumPy"
        elif not self.found and (changed := _changed(self._state)):
            self.found = f"changes {changed}"

    def _final(self, what: str, code: str = "RM205") -> None:
        self.found, self.settles, self.code = what, False, code

    def _event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if not self.settles:
            return
        if event == "c_call":
            what, question = _outside(argument), torch_state.asked_by_call(argument)
            if (what or question) and surroundings.is_own(frame.f_code.co_filename):
                if what:
                    self._final(f"{what} ({_place(frame)})")
                self._ask(question)
            elif argument is _UNEVEN_ROWS:
                self._final(_UNEVEN_TOLD, "RM207")
        elif event == "call":
            code = frame.f_code
            question = torch_state.asked_by_code(code)
            asking = frame if question == "requires_grad" else frame.f_back
            if question and asking is not None and surroundings.is_own(asking.f_code.co_filename):
                self._ask(question)
            if code is _MODULE_SETATTR:
                self._attribute(frame)
            elif code.co_filename == _LOGGING and frame.f_back is not None:
                if surroundings.is_own(frame.f_back.f_code.co_filename):
                    self._final(f"logs ({_place(frame.f_back)})")

    def _ask(self, question: str) -> None:
        if question and question not in self.asked:
            self.asked.append(question)

    def _attribute(self, frame: types.FrameType) -> None:
        """A module's attribute is set: a second run that sets the same plain value is harmless."""
        writer = frame.f_back
        if writer is None or not surroundings.is_own(writer.f_code.co_filename):
            return
        name, value = frame.f_locals.get("name"), frame.f_locals.get("value")
        owner = frame.f_locals.get("self")
        before = vars(owner).get(name, self) if owner is not None else self
        constant = value is None or isinstance(value, (bool, str))
        if constant and type(before) is type(value) and before == value:
            return
        self.found = f"sets {type(owner).__name__}.{name} ({_place(writer)})"


def _place(frame: types.FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _outside(function: Any) -> str:
    """What a builtin that user code calls does to the world; empty for nothing."""
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None) or ""
    if module in ("builtins", "io", "_io") and name in _OUTSIDE:
        return _OUTSIDE[name]
    if module == "_warnings" and name == "warn":
        return "warns"
    if module == "time" and name in _CLOCKS:
        return "reads the clock" if name != "sleep" else "sleeps"
    if module in ("posix", "nt") and name in ("write", "system", "urandom"):
        return f"calls os.{name}"
    return ""


def _random_streams() -> list[Any]:
    streams: list[Any] = [random.getstate()]
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        state = numpy.random.get_state(legacy=False)["state"]
        streams.append((state["key"].tobytes(), state["pos"]) if "key" in state else str(state))
    return streams


# ---- comparing ------------------------------------------------------------------------------

_Row = tuple[str, Any, Callable[[Any], Any], Any]  # place, holder, how to read it, what it held


def _state_of(module: torch.nn.Module) -> list[_Row]:
    rows = _copied(surroundings.of_module(module))
    for path, part in module.named_modules():
        rows.append((path or type(part).__name__, vars(part), _attributes, _attributes(vars(part))))
        for group in (part._parameters, part._buffers):
            rows.append((path, group, _tensors, _tensors(group)))
    return rows


def _copied(found: Surroundings) -> list[_Row]:
    rows: list[_Row] = []
    for space, names, where in found.dicts:
        if space is None:
            continue
        read = dict if names is None else _picked(names)
        rows.append((where, space, read, read(space)))
    rows += [(where, values, list, list(values)) for values, where in found.lists]
    rows += [(where, cell, _held, _held(cell)) for cell, where in found.cells]
    for kind, names in found.classes:
        read = _picked(names)
        rows.append((kind.__qualname__, vars(kind), read, read(vars(kind))))
    rows += [(where, tensor, _version, _version(tensor)) for tensor, where in found.tensors]
    return rows


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
    return {k: v for k, v in space.items() if k not in surroundings.IGNORED}


def _tensors(group: dict[str, Any]) -> dict[str, Any]:
    return {k: (id(t), _version(t)) if t is not None else None for k, t in group.items()}


def _held(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


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
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(now, tuple):
        return len(before) == len(now) and all(map(_same, before, now))
    return isinstance(now, SIMPLE) and bool(before == now)
