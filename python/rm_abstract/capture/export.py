"""capture(): one call of a module through torch.export into the text form of the IR.

Every size of every input is a symbol, except sizes 0 and 1, which torch specialises (they are
other captures), and the sizes of images (`budget.py`). Relations between sizes that hold in this
call and are natural (equal batch, equal length, mask length = past + new) are assumed and become
guards. The module is only read.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export import _trace as trace_of_export
from torch.fx import _lazy_graph_module

from rm_abstract.base.decline import Decline
from rm_abstract.base.quiet import print_unless_quiet, quietly
from rm_abstract.base.tracing import tracing
from rm_abstract.calls.call import FlatCall, ForwardParameters, call_module, flatten_call
from rm_abstract.calls.step_call import mask_tensors
from rm_abstract.calls.tensors import call_tensors, held_tensors
from rm_abstract.capture import (
    aliases,
    budget,
    inplace,
    layer_list,
    layouts,
    repeated_layers,
    value_checks,
    written_views,
)
from rm_abstract.capture.captured import Captured
from rm_abstract.capture.errors import CaptureError, capture_error
from rm_abstract.capture.importer import import_program
from rm_abstract.capture.inplace import is_traced_again
from rm_abstract.capture.known_values import KnownValues
from rm_abstract.capture.outputs import Recorder, Structure, with_aliases, with_layouts
from rm_abstract.capture.recurrent import RecurrentLayers
from rm_abstract.capture.untraced_layers import UntracedLayers
from rm_abstract.guards import torch_state
from rm_abstract.guards.traced_copy import copied
from rm_abstract.kv import kv_cache, state_cache

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass
class _Trace:
    """What the traced forward leaves behind (torch.export undoes attribute writes on modules)."""

    recorder: Recorder | None = None
    structure: Structure | None = None


class _Flattened(torch.nn.Module):
    """forward(tensors) -> tensors around the user's module; records the output's structure."""

    def __init__(
        self, module: torch.nn.Module, call: FlatCall, positional: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.m = module
        self._call_taken = call
        self._positional = positional
        self.relations = relations(call)
        self.trace = _Trace()
        self.untraced: UntracedLayers | None = None
        self.values: KnownValues | None = None

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.untraced is not None:
            self.untraced.begin()
        if self.values is not None:
            self.values.begin(tensors)
        check: Any = torch._check
        for a, i, b, j, past in self.relations:
            extra = tensors[past[0]].shape[past[1]] if past else 0
            check(tensors[a].shape[i] == tensors[b].shape[j] + extra)
        leaves: list[Any] = []
        caches: dict[int, int] = {}
        alive = []
        given: set[int] = set()
        at = 0
        for i, leaf in enumerate(self._call_taken.leaves):
            if isinstance(leaf, torch.Tensor):
                leaves.append(tensors[at])
                at += 1
                continue
            count = len(held_tensors(leaf))
            cache = kv_cache.traced(leaf, tensors[at : at + count])
            at += count
            leaves.append(cache)
            if not kv_cache.is_cache(leaf):
                continue
            caches[id(cache)] = i
            alive.append(cache)
            if kv_cache.is_pair(leaf):
                given.update(id(t) for t in tensors[at - count : at])
        with RecurrentLayers(), self.values or nullcontext():
            output = call_module(self.m.forward, self._call_taken.spec, leaves, self._positional)
        recorder = Recorder(leaves, caches, given=given)
        self.trace.structure = recorder.record(output)
        for cache in alive:  # caches the output does not return are updated all the same
            recorder.cache(cache, "a cache argument")
        self.trace.recorder = recorder
        return list(recorder.tensors)


def relations(call: FlatCall) -> list[tuple[int, int, int, int, tuple[int, int] | None]]:
    """(a, i, b, j, past): size i of tensor a equals size j of tensor b (+ the past length).

    Only pairs that are equal in this call, between dims of the same role: dim 0 of everything
    (batch), dim 1 of integer and bool matrices (tokens), heads-lengths of a cache, and a mask that
    covers past and new tokens. A call that breaks one is served by another capture.
    """
    tensors = call_tensors(call)
    is_past = [False] * len(tensors)
    at = 0
    for leaf in call.leaves:
        count = 1 if isinstance(leaf, torch.Tensor) else len(held_tensors(leaf))
        is_past[at : at + count] = [
            kv_cache.is_cache(leaf) and not state_cache.is_states(leaf)
        ] * count
        at += count
    found: list[tuple[int, int, int, int, tuple[int, int] | None]] = []

    def relate(numbers: Sequence[int], axis: int) -> None:
        numbers = [n for n in numbers if tensors[n].shape[axis] > 1]
        for n in numbers[1:]:
            if tensors[n].shape[axis] == tensors[numbers[0]].shape[axis]:
                found.append((n, axis, numbers[0], axis, None))

    many = [n for n, t in enumerate(tensors) if t.dim() >= 2]
    tokens = [n for n in many if tensors[n].dim() == 2 and not tensors[n].is_floating_point()]
    past = [n for n in many if is_past[n]]
    relate(many, 0)
    written = _donated(call)
    if not any(map(kv_cache.is_pair, call.leaves)):  # two lengths that only meet by chance
        relate(past, 2)
    elif written:
        relate(sorted(written), 2)
        relate([n for n in past if n not in written], 2)
    if not past:
        relate(tokens, 1)
        return found
    if written:
        masks = mask_tensors(call.spec, call.leaves)
        relate([n for n in tokens if n not in masks], 1)
        found += [(n, 1, past[0], 2, None) for n in tokens if n in masks]
        return found
    length = tensors[past[0]].shape[2]
    new = [n for n in tokens if tensors[n].shape[1] != length + tensors[tokens[0]].shape[1]]
    relate(new, 1)
    for n in tokens:
        if new and n not in new:
            found.append((n, 1, new[0], 1, (past[0], 2)))
    return found


def capture(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """Captures `module(*args, **kwargs)`. Raises Decline or CaptureError; changes nothing."""
    parameters = ForwardParameters.of(module)
    call = flatten_call(parameters, args, kwargs)
    if isinstance(call, Decline):
        raise call
    return capture_flat(module, call, parameters)


def capture_flat(
    module: torch.nn.Module,
    call: FlatCall,
    parameters: ForwardParameters,
    patience: float = 1,
    whole: bool = False,
    by_values: bool = False,
) -> Captured:
    """`capture` for a call that was taken apart already; `patience` multiplies its time limits.

    Of many layers that are alike the first are traced, unless the ``whole`` model is asked for.
    Where Python reads elements of inputs, the capture is for those of this call if ``by_values``
    (`call.torch_state` says of which).
    """
    known = KnownValues(call) if by_values else None
    try:
        return _with_layers(module, call, parameters, patience, whole, None)
    except CaptureError as error:
        if error.code != "RM203" or known is None or not known.may_help:
            raise
        first = error
    try:
        return _with_layers(module, call, parameters, patience, whole, known)
    except CaptureError as error:
        raise (first if error.code == "RM203" else error) from error


def _with_layers(
    module: torch.nn.Module,
    call: FlatCall,
    parameters: ForwardParameters,
    patience: float,
    whole: bool,
    known: KnownValues | None,
) -> Captured:
    started = time.perf_counter()
    layers = None if whole else layer_list.find(module)
    short = layers.shortened(call) if layers is not None else None
    if layers is not None and short is not None:
        try:
            few = _captured(module, short, parameters, patience, layers, known)
        except (CaptureError, Decline):
            few = None  # a forward that wants all of them
        found = few and repeated_layers.extended(few, layers, _first_buffer(short))
        if found is not None:
            found.capture_ms = (time.perf_counter() - started) * 1e3
            return found
    return _captured(module, call, parameters, patience, None, known)


def _first_buffer(call: FlatCall) -> int | None:
    """Which input is the first buffer of the call's device cache."""
    return min(_donated(call), default=None)


def _captured(
    module: torch.nn.Module,
    call: FlatCall,
    parameters: ForwardParameters,
    patience: float,
    layers: layer_list.LayerList | None,
    known: KnownValues | None,
) -> Captured:
    """One capture, of the module or of what is left of it with the first of the layers."""
    started = time.perf_counter()
    traced = copied(module)
    wrapper = _Flattened(traced, call, parameters.positional)
    wrapper.untraced = layers.shorten(traced) if layers is not None else None
    wrapper.training = module.training
    wrapper.values = known
    tensors = call_tensors(call)
    with tracing(), _without_code():
        program = _export(wrapper, tensors, call, patience)
        if wrapper.untraced is not None and not wrapper.untraced.ok:
            raise capture_error("RM201", "expected layers that are alike", "all of them")
        inplace.replace(program)
        written_views.replace(program)
        if is_traced_again(program):
            program = _functional(program, module)
    recorder, structure = wrapper.trace.recorder, wrapper.trace.structure
    assert recorder is not None and structure is not None
    if all(isinstance(leaf, torch.Tensor) for leaf in call.leaves) and not recorder.touched:
        views = aliases.find(program)
        turned = layouts.put_in_order(program, views)
        structure = with_layouts(with_aliases(structure, views), turned)
        if turned and not all(t.is_contiguous() for t in tensors):
            call.torch_state.update(torch_state.answers(["layout"], tensors))
    with _quietly():  # torch takes operators apart here
        imported = import_program(program, strip="m.", donated=_donated(call))
    if known is not None:
        asked = torch_state.values_of(known.asked)
        call.torch_state.update(torch_state.answers(asked, tensors))
    if imported.asks_tf32:
        call.torch_state.update(torch_state.answers([torch_state.TF32], tensors))
    return Captured(
        ir=imported.text,
        input_dims=imported.input_dims,
        weights=imported.weights,
        constants=imported.constants,
        output=structure,
        caches=list(recorder.touched.values()),
        kept=imported.kept,
        capture_ms=(time.perf_counter() - started) * 1e3,
        extended=layers is not None,
        repeated=[] if recorder.touched else _repeated(program),
    )


def _repeated(program: ExportedProgram) -> list[list[int]]:
    """By output: the axes along which eager gives one element again and again (stride 0).

    [] when there are none. Nobody can write into such a tensor in place, in eager neither.
    """
    (output,) = (n for n in program.graph.nodes if n.op == "output")
    found: list[list[int]] = []
    for node in output.args[0]:
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        axes: list[int] = []
        if isinstance(value, torch.Tensor):
            strides = zip(value.stride(), value.shape, strict=True)
            axes = [
                i
                for i, (stride, size) in enumerate(strides)
                if isinstance(stride, int) and stride == 0 and not (type(size) is int and size <= 1)
            ]
        found.append(axes)
    return found if any(found) else []


def _donated(call: FlatCall) -> set[int]:
    """Numbers of the tensors the program may write: the buffers of device caches."""
    found: set[int] = set()
    at = 0
    for leaf in call.leaves:
        count = 1 if isinstance(leaf, torch.Tensor) else len(held_tensors(leaf))
        cache = kv_cache.device_part(leaf)
        if cache is not None:
            found.update(range(at + 1, at + 1 + 2 * len(cache.layers)))
        at += count
    return found


class _ReplacedPrint:
    """torch's export prints as `print_unless_quiet` says, while any thread is inside."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            vars(trace_of_export)["print"] = print_unless_quiet

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                del vars(trace_of_export)["print"]


_replaced_print = _ReplacedPrint()


@contextmanager
def _quietly() -> Iterator[None]:
    """torch prints the graph so far to stderr when an export fails, warns, and logs warnings.

    What failed is in the report.
    """
    with _replaced_print, quietly("torch.fx.experimental.symbolic_shapes"):
        yield


def _without_code() -> AbstractContextManager[None]:
    """torch writes a graph as Python code whenever it changed it, which is an eighth of an export;
    inside it does so when somebody runs the graph, and nobody runs ours."""
    use_lazy: Any = getattr(_lazy_graph_module, "_use_lazy_graph_module", None)
    return nullcontext() if use_lazy is None else use_lazy(True)


def _export(
    wrapper: _Flattened, tensors: list[torch.Tensor], call: FlatCall, patience: float
) -> ExportedProgram:
    """With open sizes first; where that takes too long, for the sizes of this call alone."""
    sizes = budget.open_sizes(tensors, _cached(call))
    fixed: list[dict[int, Any]] = [{} for _ in tensors]
    patience *= budget.share_of(wrapper.m)
    attempts = [(sizes, budget.FIRST_S), (fixed, budget.SECOND_S)]
    attempts = [(dims, seconds * patience) for dims, seconds in attempts]
    limit, wait = sum(seconds for _, seconds in attempts), budget.WAIT_S * patience
    if not any(sizes):
        attempts = [(sizes, limit)]
    name = type(wrapper.m).__name__
    end = time.monotonic() + wait

    def say() -> None:
        text = f"rm_abstract: capturing {name} for its first call; at most {limit:.0f} s, once"
        print(text, file=sys.stderr)

    with nullcontext() if wrapper.values else budget.SayWhenSlow(say):  # it was said before
        for dynamic, seconds in attempts:
            try:
                return _exported(wrapper, tensors, dynamic, budget.Deadline(seconds, end))
            except budget.Waited:
                busy = capture_error(
                    "RM208",
                    f"expected {name} to be captured within {wait:.0f} s, got too little "
                    "of the processor for that",
                    "another process on a less busy machine",
                )
                busy.passing = True
                raise busy from None
            except budget.TooLong:
                continue
    raise capture_error(
        "RM208",
        f"expected {name} to be captured within {limit:.0f} s, got no end of it",
        "rm_abstract.accelerate() on the part of the model that takes most of the time",
    )


def _exported(
    wrapper: _Flattened,
    tensors: list[torch.Tensor],
    dynamic: list[dict[int, Any]],
    deadline: budget.Deadline,
) -> ExportedProgram:
    """One run of torch.export. Raises TooLong, Decline or CaptureError."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_quietly())
        # Inference tensors cannot be traced, and aliased inputs would be merged: fresh views.
        example = [t.clone() if t.is_inference() else t.detach() for t in tensors]
        try:
            with deadline:
                return torch.export.export(
                    wrapper,
                    (example,),
                    dynamic_shapes=(dynamic,) if tensors else None,  # of none, torch fails
                    strict=False,
                )
        except (CaptureError, Decline):
            raise
        except Exception as error:  # torch raises many types here; the cause is kept
            if (late := budget.too_long(error)) is not None:
                raise type(late) from error
            raise _export_error(wrapper.m, error) from error


def _functional(program: ExportedProgram, module: torch.nn.Module) -> ExportedProgram:
    """The program without writes in place. torch traces it again, which can fail as an export."""
    with _quietly():
        try:
            value_checks.keep_through_decompositions(program)
            functional: ExportedProgram = program.run_decompositions({})
            return functional
        except Exception as error:  # assertions of torch's own among them
            raise _export_error(module, error) from error


def _cached(call: FlatCall) -> list[bool]:
    """For each tensor of `call_tensors` whether it comes from a cache."""
    marks: list[bool] = []
    for leaf in call.leaves:
        marks += [False] if isinstance(leaf, torch.Tensor) else [True] * len(held_tensors(leaf))
    return marks


def _export_error(module: torch.nn.Module, error: Exception) -> CaptureError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    trace = error.__traceback__
    where = ""
    while trace is not None:  # the deepest frame outside torch and us is the user's line
        name = trace.tb_frame.f_code.co_filename
        if "/torch/" not in name and not name.startswith(_PACKAGE):
            where = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    data = "data-dependent" in str(error) or "DataDependent" in type(error).__name__
    return capture_error(
        "RM203" if data else "RM201",
        f"expected torch.export to accept {type(module).__name__}, got {type(error).__name__}: "
        f"{lines[0] if lines else ''}{f' at {where}' if where else ''}",
        "rm_abstract.disabled() around this call, or a forward without data-dependent Python",
    )
