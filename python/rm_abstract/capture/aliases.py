"""Outputs that lie in the memory of an input or of another output, and how to give them so.

A program's outputs are tensors of their own. Where eager gives a view, writing into one of two
tensors shows in the other: those views are taken again, by torch, of the tensor they belong to.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rm_abstract.capture.errors import capture_error

if TYPE_CHECKING:  # a process that only runs programs imports this file for `taker`
    from torch.export import ExportedProgram

# Views whose sizes may be symbols: taken again with the sizes of the tensor the program computed.
_BY_SHAPE = {
    "aten.view.default": "aten.view.default",
    "aten.view_as.default": "aten.view.default",
    "aten.unflatten.int": "aten.view.default",
    "aten.reshape.default": "aten.reshape.default",
    "aten.expand.default": "aten.expand.default",
}
Step = list[Any]  # an operator's name, its arguments past the tensor; or "getitem", a number


def find(program: ExportedProgram) -> dict[int, tuple[str, int, list[Step]]]:
    """By output number: ("input" | "output", number, views to take of it), of those that are views.

    Inputs are numbered as the call's tensors. Raises CaptureError for views that cannot be taken
    again: of weights, and by sizes that only the graph knows.
    """
    (end,) = (n for n in program.graph.nodes if n.op == "output")
    outputs = [n if isinstance(n, torch.fx.Node) else None for n in end.args[0]]
    inputs, weights = _placeholders(program)
    found: dict[int, tuple[str, int, list[Step]]] = {}
    for number, node in enumerate(outputs):
        if node is None or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        steps: list[Step] = []
        at: torch.fx.Node | None = node
        while at is not None:
            if at in weights:
                raise capture_error(
                    "RM204",
                    f"expected outputs of their own, got (a view of) the kept tensor {weights[at]}",
                    "returning a clone",
                )
            if at in inputs:
                found[number] = ("input", inputs[at], steps[::-1])
                break
            if at is not node and at in outputs:
                found[number] = ("output", outputs.index(at), steps[::-1])
                break
            at = _source(at, steps, whole=at is node)
    for number, (_, _, steps) in found.items():
        if any(step[1] is None for step in steps):
            raise capture_error(
                "RM204",
                f"expected outputs of their own, got output {number} as a view whose sizes are "
                "computed in forward",
                "returning a clone",
            )
    return found


def _placeholders(
    program: ExportedProgram,
) -> tuple[dict[torch.fx.Node, int], dict[torch.fx.Node, str]]:
    from torch.export.graph_signature import InputKind

    inputs: dict[torch.fx.Node, int] = {}
    weights: dict[torch.fx.Node, str] = {}
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True):
        if not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if spec.kind is InputKind.USER_INPUT:
            inputs[node] = len(inputs)
        else:  # a constant is kept, too: what forward makes of numbers is a copy in the graph
            weights[node] = str(spec.target).removeprefix("m.")
    return inputs, weights


def _source(node: torch.fx.Node, steps: list[Step], whole: bool) -> torch.fx.Node | None:
    """What `node` is a view of, with the step from there; None when it is a tensor of its own."""
    if node.op != "call_function" or not node.args:
        return None
    if node.target is operator.getitem:
        parent: Any = node.args[0]
        source = parent.args[0] if parent.args else None
        if not _shares(node, source):
            return None
        steps += [["getitem", node.args[1]], _step(parent, False)]
        return source
    source = node.args[0]
    if not _shares(node, source):
        return None
    steps.append(_step(node, whole))
    return source  # type: ignore[return-value]


def _shares(node: torch.fx.Node, source: Any) -> bool:
    value = source.meta.get("val") if isinstance(source, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    if node.target is torch.ops.aten.lift_fresh_copy.default:  # its example may share, it does not
        return False
    if node.target is torch.ops.aten.dropout.default:  # outside of training it gives its input
        return node.args[2] is False
    storage = node.meta["val"].untyped_storage()
    return bool(storage._cdata == value.untyped_storage()._cdata)


def _step(node: torch.fx.Node, whole: bool) -> Step:
    """`whole`: this view is the output itself. Arguments None: not known outside the graph."""
    name = str(node.target)
    rest = [_plain(a) for a in node.args[1:]]
    named = {k: _plain(v) for k, v in node.kwargs.items()}
    if any(v is _UNKNOWN for v in (*rest, *named.values())):
        return [_BY_SHAPE[name], "shape"] if whole and name in _BY_SHAPE else [name, None]
    return [name, rest, named] if named else [name, rest]


_UNKNOWN = object()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, (list, tuple)):
        items = [_plain(v) for v in value]
        return _UNKNOWN if any(v is _UNKNOWN for v in items) else items
    return _UNKNOWN


def taker(steps: Sequence[Step]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function (base, computed) -> the view of `base` that equals `computed`."""
    calls = [_call(step) for step in steps]

    def take(base: Any, computed: torch.Tensor) -> Any:
        for call in calls:
            base = call(base, computed)
        return base

    return take


def _call(step: Step) -> Callable[[Any, torch.Tensor], Any]:
    name, given = step[0], step[1]
    if name == "getitem":
        return lambda base, computed: base[given]
    packet, _, overload = name.removeprefix("aten.").partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload)
    if given == "shape":
        return lambda base, computed: function(base, computed.shape)
    args = [_typed(a) for a in given]
    named = {k: _typed(v) for k, v in step[2].items()} if len(step) > 2 else {}
    return lambda base, computed: function(base, *args, **named)


def _typed(value: Any) -> Any:
    return getattr(torch, value.removeprefix("torch.")) if isinstance(value, str) else value
