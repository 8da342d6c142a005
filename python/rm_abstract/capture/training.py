"""The forward and the loss of a training step in the text form of the IR, for one set of sizes.

torch.export traces with gradients enabled, so a model sees what it sees in eager. What changes
gradients without changing values (detach, no_grad inside forward) is looked for here, because the
IR has values only.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from rm_abstract.base.decline import Decline
from rm_abstract.base.tracing import tracing
from rm_abstract.capture import budget, export, value_checks
from rm_abstract.capture.errors import CaptureError, source_line
from rm_abstract.capture.importer import import_program
from rm_abstract.capture.inplace import is_traced_again
from rm_abstract.guards.traced_copy import copied

_SECONDS = 60.0  # a step is captured once and run often
# Gradients stop here, or go to one of several equal elements, which values do not show.
_STOPS = {"aten.detach.default", "aten.detach_.default", "aten.alias_copy.default"}
_CHOOSES = {"aten.max.dim", "aten.min.dim"}


class _StoppedGradients(TorchFunctionMode):
    """Whether something was computed from a value with a gradient while gradients were off. Torch's
    export forgets that they were inside regions of autocast. What takes no such value, as the
    angles of rotary embeddings, is the same either way."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.seen and not torch.is_grad_enabled() and _has_tensor(result):
            taken = tree_leaves((args, kwargs or {}))
            self.seen = any(isinstance(t, torch.Tensor) and t.requires_grad for t in taken)
        return result


def _has_tensor(result: Any) -> bool:
    return any(isinstance(t, torch.Tensor) for t in tree_leaves(result))


@dataclass
class Forward:
    """`ir` gives the loss, then new values of `written`; its inputs are the tensors of the batch
    in order."""

    ir: str
    weights: list[str]  # names in the captured module
    constants: dict[str, torch.Tensor]
    written: list[str] = field(default_factory=list)  # buffers that the forward updates
    draws: int = 0  # of random numbers, from the weight ir_builder.RANDOM
    closed: bool = False  # over parameters of the module: its code alone does not say which


def capture_forward(
    module: torch.nn.Module, tensors: Sequence[torch.Tensor], trained: Collection[str]
) -> Forward:
    """Captures ``module(list of tensors)``, which returns the loss, a tensor.

    ``trained`` are names of parameters. Raises Decline or CaptureError; changes nothing.
    """
    shadow = copied(module, same_tensors=True)
    stopped = _StoppedGradients()
    plain = shadow.forward

    @functools.wraps(plain)
    def watched(tensors: list[torch.Tensor]) -> Any:
        with stopped:
            return plain(tensors)

    shadow.forward = watched
    with tracing(), ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(export._quietly())
        try:
            with budget.Deadline(_SECONDS, time.monotonic() + 2 * _SECONDS):
                program = torch.export.export(
                    shadow, ([t.detach() for t in tensors],), strict=False
                )
        except (CaptureError, Decline):
            raise
        except Exception as error:  # torch raises many types here; the cause is kept
            if budget.too_long(error) is not None:
                raise Decline("RM208", f"no end after {_SECONDS:.0f} s") from error
            raise export._export_error(module, error) from error
        _forget_tensors(program)
        closed = _close_over_parameters(program, shadow)
        _check_gradients(program, trained)
        regions = any(map(_is_autocast, program.graph.nodes))
        if regions and stopped.seen:
            raise Decline("RM706", "a region without gradients, under autocast")
        if regions:
            widen_losses(program.graph_module)
        if regions or is_traced_again(program):
            try:
                value_checks.keep_through_decompositions(program)
                program = program.run_decompositions({})  # regions become the casts that they made
            except Exception as error:  # an assertion of torch's own, for two names of one buffer
                raise export._export_error(module, error) from error
            _forget_tensors(program)
    imported = import_program(program, for_training=True)
    return Forward(
        imported.text,
        imported.weights,
        imported.constants,
        imported.written,
        imported.draws,
        closed,
    )


def _close_over_parameters(program: ExportedProgram, module: torch.nn.Module) -> bool:
    """Reads parameters that forward has from elsewhere, such as a loss that closes over the model,
    where the module has them: torch took them for constants, which have no gradient.

    Whether there were some.
    """
    names = {
        (p.data_ptr(), p.shape, p.stride()): name
        for name, p in module.named_parameters()
        if p.numel()
    }
    places = {
        str(spec.target): node
        for spec, node in zip(
            program.graph_signature.input_specs, program.graph.nodes, strict=False
        )
    }
    found = False
    for target, value in program.constants.items():
        if target not in places or getattr(value, "layout", None) is not torch.strided:
            continue
        name = names.get((value.data_ptr(), value.shape, value.stride()))
        if name in places and places[target].users:
            places[target].replace_all_uses_with(places[name])
            found = True
    return found


def _forget_tensors(program: ExportedProgram) -> None:
    """Drops the weak references to weights in the mode that traced them: torch keeps a trace alive
    after its last use, and `torch.utils.swap_tensors` refuses a tensor that has any."""
    for node in program.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()
            return


def _check_gradients(program: ExportedProgram, trained: Collection[str]) -> None:
    """Raises Decline where something on the way of a gradient is not in the values."""
    specs = program.graph_signature.input_specs
    names = [str(s.target) if s.kind is InputKind.PARAMETER else "" for s in specs]
    flows: set[Any] = set()
    at = 0
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if names[at] in trained:
                flows.add(node)
            at += 1
            continue
        if not any(n in flows for n in node.all_input_nodes):
            continue
        name = str(node.target)
        if _is_autocast(node):
            _check_region(program.graph_module, node)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            raise Decline("RM706", f"the region {name} ({source_line(node)})")
        if name in _STOPS:
            raise Decline("RM706", f"{name} ({source_line(node)})")
        if name in _CHOOSES:
            raise Decline("RM702", f"{name} ({source_line(node)})")
        if _is_float(node.meta.get("val")):
            flows.add(node)


def widen_losses(module: torch.fx.GraphModule, device: str = "") -> None:
    """Writes into regions of autocast on a GPU the casts of losses whose parts make them.

    CUDA's autocast runs ``log_softmax`` and ``nll_loss`` in float32, the CPU's ``cross_entropy``
    itself. Traces keep ``cross_entropy`` as one operator, of which CUDA's knows nothing.
    """
    for node in list(module.graph.nodes):
        if _is_autocast(node):
            kind, _, enabled = node.args[:3]
            inner = getattr(module, str(node.args[4].target))
            widen_losses(inner, str(kind) if enabled else "")
            inner.recompile()
        elif device == "cuda" and node.target is torch.ops.aten.cross_entropy_loss.default:
            with module.graph.inserting_before(node):
                node.args = tuple(_widened(module.graph, a) for a in node.args)


def _widened(graph: torch.fx.Graph, argument: Any) -> Any:
    """A half tensor in float32, anything else as it is."""
    value = argument.meta.get("val") if isinstance(argument, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.bfloat16, torch.float16):
        return argument
    cast = torch.ops.aten._to_copy.default
    return graph.call_function(cast, (argument,), {"dtype": torch.float32})


def _is_autocast(node: torch.fx.Node) -> bool:
    return str(node.target) == "wrap_with_autocast"


def _check_region(module: torch.nn.Module, region: torch.fx.Node) -> None:
    """Raises Decline for a region of autocast in which gradients may stop, on any way."""
    for argument in region.args:
        if not (isinstance(argument, torch.fx.Node) and argument.op == "get_attr"):
            continue
        inner = getattr(module, str(argument.target))
        if not isinstance(inner, torch.fx.GraphModule):
            continue
        for node in inner.graph.nodes:
            name = str(node.target)
            if _is_autocast(node):
                _check_region(inner, node)
            elif isinstance(node.target, torch._ops.HigherOrderOperator) or name in _STOPS:
                raise Decline("RM706", f"{name} under autocast ({source_line(node)})")
            elif name in _CHOOSES:
                raise Decline("RM702", f"{name} under autocast ({source_line(node)})")


def _is_float(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_float(v) for v in value)
    return isinstance(value, torch.Tensor) and value.is_floating_point()
