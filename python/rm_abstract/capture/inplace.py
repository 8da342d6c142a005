"""In-place operators of a captured graph as the operators that return a new tensor.

Models of images write `relu_` everywhere; functionalising a whole graph traces it a second time,
which takes as long as the first. Where the tensor an operator changes is a result that nothing else
lies in, its plain form gives the same values, and everybody who reads the tensor afterwards reads
the plain form's result. Writes into parts of such a tensor are `written_views.py`'s; what is not as
simple as that is left as it is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.export import ExportedProgram

# They keep the type of their first argument among equal types, and draw no numbers.
_PLAIN = frozenset(
    "relu hardtanh hardswish hardsigmoid sigmoid silu mish tanh leaky_relu elu celu selu gelu "
    "add sub mul div clamp clamp_min clamp_max exp neg sqrt rsqrt abs masked_fill".split()
)
_DROPOUT = (torch.ops.aten.dropout.default, torch.ops.aten.dropout_.default)
# Compositions of other operators may return their argument itself, as type_as does; of all others
# torch requires new memory where their schema says nothing. Of the compositions these do give it.
_NEW_MEMORY = frozenset(
    "conv1d conv2d conv3d batch_norm layer_norm group_norm linear matmul".split()
)


def replace(program: ExportedProgram) -> None:
    """Replaces what can be, in place."""
    graph = program.graph_module.graph
    if not any(writes(node) for node in graph.nodes):
        return
    changed = _without_dropout(graph)
    order = {node: number for number, node in enumerate(graph.nodes)}
    shared: Counter[int] = Counter()  # storages by the number of nodes so far that lie in them
    for node in graph.nodes:
        plain = plain_form(node)
        source = node.args[0] if plain is not None else None
        if source is not None and is_new(source) and shared[storage_of(source)] == 1:
            node.target = plain
            after = order[node]
            source.replace_all_uses_with(
                node, delete_user_cb=lambda user, after=after: order.get(user, after) > after
            )
            # From here on the memory is the result's: views taken later belong to it.
            source.meta = {**source.meta, "val": _elsewhere(source.meta["val"])}
            changed = True
            continue
        for storage in storages_of(node):
            shared[storage] += 1
    if changed:
        program.graph_module.recompile()


def writes(node: torch.fx.Node) -> bool:
    """Whether an operator changes one of its arguments."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)


def _without_dropout(graph: torch.fx.Graph) -> bool:
    """Takes evaluated dropouts out: they give their argument itself, which their schema hides."""
    found = [node for node in graph.nodes if node.target in _DROPOUT and node.args[2] is False]
    for node in found:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return bool(found)


def plain_form(node: torch.fx.Node) -> Any:
    """The operator that computes what this one writes into its first argument, a tensor of the
    graph; None when there is none."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.removeprefix("aten::")
    source = node.args[0] if node.args else None
    if not name.endswith("_") or name[:-1] not in _PLAIN or not isinstance(source, torch.fx.Node):
        return None
    plain = getattr(getattr(torch.ops.aten, name[:-1], None), target._overloadname, None)
    if plain is None or _arguments(plain) != _arguments(target):
        return None
    dtypes = {
        argument.meta["val"].dtype
        for argument in node.all_input_nodes
        if isinstance(argument.meta.get("val"), torch.Tensor)
    }
    if name == "masked_fill_":
        dtypes.discard(torch.bool)
    return plain if len(dtypes) == 1 else None


def is_new(source: torch.fx.Node) -> bool:
    """Whether a node's result is one tensor that lies in no other tensor's memory."""
    operator = source.target
    if source.op != "call_function" or not isinstance(operator, torch._ops.OpOverload):
        return False
    if not isinstance(source.meta.get("val"), torch.Tensor):
        return False
    if any(value.alias_info is not None for value in operator._schema.returns):
        return False
    name = operator._schema.name.removeprefix("aten::")
    return name in _NEW_MEMORY or not operator.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    )


def _arguments(operator: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in operator._schema.arguments]


def storage_of(node: torch.fx.Node) -> int:
    return _storage(node.meta["val"])


def storages_of(node: torch.fx.Node) -> set[int]:
    """Of all tensors that a node gives."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return {_storage(v) for v in values if isinstance(v, torch.Tensor)}


def _storage(value: torch.Tensor) -> int:
    functorch = torch._C._functorch
    while functorch.is_batchedtensor(value):  # what torch.vmap saw of the tensor
        value = functorch.get_unwrapped(value)
    return int(value.untyped_storage()._cdata)


def _elsewhere(value: Any) -> Any:
    """A stand-in of the same kind in memory of its own; adds no guard on sizes."""
    with value.fake_mode.shape_env.suppress_guards(), value.fake_mode:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )


def is_traced_again(ep: ExportedProgram) -> bool:
    """True when torch has to trace the graph once more before the import: it mutates a tensor, or
    says where torch.vmap began and ended instead of what it makes of the operators between."""
    for module in ep.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            target: Any = node.target
            if getattr(target, "__module__", "") == "torch._functorch.predispatch":
                return True
            if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
                continue
            if target._schema.is_mutable and target is not torch.ops.aten.detach_.default:
                return True
    return False
