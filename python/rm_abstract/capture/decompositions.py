"""Operators without a handler, written by torch in operators that have one.

torch knows how most operators are made of others (``torch._decomp``, and operators that are such
compositions themselves). One call is traced on the fake tensors of the export, so sizes
stay symbols; the importer takes the result where nothing of it is left to the bridge.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

# PyTorch's kernels of these do at once what their decompositions do in many steps over far more
# memory, or in steps that grow with a size.
_WHOLE = {
    "aten::_adaptive_avg_pool2d",
    "aten::_adaptive_avg_pool3d",
    "aten::_cdist_forward",
    "aten::_ctc_loss",
    "aten::_embedding_bag",
    "aten::adaptive_avg_pool1d",
    "aten::adaptive_avg_pool2d",
    "aten::adaptive_avg_pool3d",
    "aten::cdist",
    "aten::col2im",
    "aten::conv_tbc",
    "aten::embedding_bag",
    "aten::grid_sampler",
    "aten::grid_sampler_2d",
    "aten::grid_sampler_3d",
    "aten::im2col",
    "aten::multi_head_attention_forward",
}
_RESIZED = ("aten::upsample_", "aten::_upsample_")
_MOST_NODES = 48
MOST_TRACED = 32  # different calls of a capture: each takes 0.1 to 0.3 s


def decomposed(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.fx.GraphModule, list[torch.fx.Node]] | None:
    """The call as a graph of other operators, and the nodes that its placeholders stand for.

    `args` and `kwargs` are those of the exported node. None where torch has no decomposition, or
    one that is long or fails.
    """
    rule = _rule(target)
    if rule is None:
        return None
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    nodes = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, torch.fx.Node)))
    number = {node: i for i, node in enumerate(nodes)}

    def call(*values: Any) -> list[Any]:
        given = [values[number[x]] if isinstance(x, torch.fx.Node) else x for x in leaves]
        call_args, call_kwargs = pytree.tree_unflatten(given, spec)
        return pytree.tree_leaves(rule(*call_args, **call_kwargs))

    graph = _traced(call, nodes)
    if graph is None or sum(n.op == "call_function" for n in graph.graph.nodes) > _MOST_NODES:
        return None
    return graph, nodes


def over_rows(
    body: torch.fx.GraphModule, rows: Sequence[Any], others: Sequence[Any]
) -> torch.fx.GraphModule | None:
    """`body` for all rows (axis 0) of the tensors `rows` at once; it takes `others` whole.

    A placeholder for each of both that is a node. None where vmap does not take the body.
    """
    given = [*rows, *others]
    axes = tuple([0] * len(rows) + [None] * len(others))

    def call(*values: Any) -> list[Any]:
        left = iter(values)
        full = [next(left) if isinstance(x, torch.fx.Node) else x for x in given]
        return pytree.tree_leaves(torch.vmap(body, in_dims=axes)(*full))

    return _traced(call, [x for x in given if isinstance(x, torch.fx.Node)])


def _traced(
    call: Callable[..., list[Any]], nodes: Sequence[torch.fx.Node]
) -> torch.fx.GraphModule | None:
    """The graph of a call for what the nodes stand for, without writes; None where it fails."""
    values = [node.meta.get("val") for node in nodes]
    try:
        with ExitStack() as stack:
            for context in (torch.inference_mode(False), torch.no_grad(), _silent()):
                stack.enter_context(context)
            environments = {v.fake_mode.shape_env for v in values if isinstance(v, FakeTensor)}
            for environment in environments:
                if environment is not None:
                    stack.enter_context(_no_new_guards(environment))
            graph = make_fx(call, tracing_mode="symbolic")(*values)
            if any(_writes(node) for node in graph.graph.nodes):
                graph = make_fx(functionalize(graph), tracing_mode="symbolic")(*values)
    except Exception:  # whatever a decomposition raises on these arguments: the call stays whole
        return None
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(graph, str(node.target)), FakeTensor):
            return None  # a constant without values
    return graph


def _writes(node: torch.fx.Node) -> bool:
    """torch writes some compositions with operators in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class _NewGuard(Exception):
    """A decomposition branches on a size."""


@contextmanager
def _no_new_guards(environment: Any) -> Iterator[None]:
    """Raises where a decomposition branches on a size: the branch would hold for the sizes of the
    capture only.
    """
    if hasattr(environment, "error_on_new_guards"):
        with environment.error_on_new_guards():
            yield
        return

    # torch 2.10 and 2.11 only warn, in a method that they call before they add a guard.
    def refuse(expression: Any, value: Any) -> None:
        raise _NewGuard(f"{expression} == {value}")

    environment._check_frozen = refuse  # hides the class's method
    try:
        yield
    finally:
        del environment._check_frozen


@contextmanager
def _silent() -> Iterator[None]:
    """torch logs what a decomposition's shape functions raise; such a call just stays whole."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = disabled


@functools.cache
def _table() -> Mapping[Any, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions, decomposition_table

    core: Mapping[Any, Callable[..., Any]] = core_aten_decompositions()
    return {**decomposition_table, **core}


def _rule(target: torch._ops.OpOverload) -> Callable[..., Any] | None:
    name = target._schema.name
    if name in _WHOLE or name.startswith(_RESIZED) or target._schema.is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    found: Callable[..., Any] | None = _table().get(target)
    if found is None and target._can_decompose():
        found = target.decompose
    return found


def likeness(arg: Any) -> Any:
    """Equal for arguments for which a decomposition is the same graph."""
    if isinstance(arg, torch.fx.Node):
        val = arg.meta.get("val")
        if isinstance(val, torch.Tensor):
            return (str(val.dtype), tuple(str(s) for s in (*val.shape, "", *val.stride())))
        return str(val)
    if isinstance(arg, (list, tuple)):
        return tuple(likeness(a) for a in arg)
    return repr(arg)
