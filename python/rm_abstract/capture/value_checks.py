"""Conditions on values that eager checks while it runs, as `check` nodes (decision 0233).

torch.export leaves them as `_assert_async` of a tensor, or as `_assert_scalar` of an expression
over numbers that it read from tensors. Such numbers have no dims of their own here: where they
serve checks alone, the expression is written over the tensors that they were read from. Conditions
on sizes alone are no checks: the export has them as guards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from rm_abstract.capture.dims import Dim
from rm_abstract.capture.errors import capture_error, source_line
from rm_abstract.capture.ir_builder import FLOATS, IrBuilder, Value

TENSORS = {"aten._assert_async.default", "aten._assert_async.msg"}
SCALARS = {"aten._assert_scalar.default"}
RANGES = {"aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default"}
CHECKS = TENSORS | SCALARS | RANGES
_READS = {"aten.item.default", "aten._local_scalar_dense.default"}
_SIZES = {"aten.sym_size.int", "aten.sym_numel.default"}
_CHOOSES = {"aten.index.Tensor", "aten.masked_select.default", "aten.nonzero.default"}

_COMPARES: dict[Any, str] = {
    operator.eq: "eq",
    operator.ne: "ne",
    operator.lt: "lt",
    operator.le: "le",
    operator.gt: "gt",
    operator.ge: "ge",
}
_ARITHMETIC: dict[Any, str] = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.floordiv: "floor_div",
    operator.mod: "remainder",
    torch.sym_max: "maximum",
    torch.sym_min: "minimum",
}
_LOGIC: dict[Any, str] = {operator.and_: "and", operator.or_: "or"}
_OTHERS = {torch.sym_ite, torch.sym_not, torch.sym_float, operator.neg}
_NUMBERS = {*_COMPARES, *_ARITHMETIC, *_LOGIC, *_OTHERS}


def keep_through_decompositions(program: ExportedProgram) -> None:
    """Gives every assertion a message: torch drops those without when it traces a program again."""
    for module in program.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.target is torch.ops.aten._assert_async.default:
                node.target = torch.ops.aten._assert_async.msg
                node.args = (*node.args, "")
        module.recompile()


def serving_checks_alone(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Numbers, and tensors of a size that only values tell, that nothing but checks looks at."""
    alone: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        name = str(node.target)
        number = node.target in _NUMBERS or name in _READS or name in _SIZES
        if node.op != "call_function" or not (number or _count_of(node) is not None):
            continue
        if node.users and all(u in alone or str(u.target) in SCALARS | RANGES for u in node.users):
            alone.add(node)
    return alone


def reads_values(node: Any) -> bool:
    """Whether a number of the graph depends on the elements of a tensor."""
    if not isinstance(node, torch.fx.Node) or node.op != "call_function":
        return False
    if str(node.target) in _SIZES:
        return _count_of(node.args[0]) is not None
    return str(node.target) in _READS or any(map(reads_values, node.all_input_nodes))


def _count_of(node: Any) -> tuple[Any, int, int] | None:
    """Of a tensor with an axis as long as a mask has true elements: the mask, the axis, the mask's
    rank."""
    if not isinstance(node, torch.fx.Node) or str(node.target) not in _CHOOSES:
        return None
    if str(node.target) == "aten.nonzero.default":
        return node.args[0], 0, -1
    if str(node.target) == "aten.masked_select.default":
        return node.args[1], 0, -1
    indices = node.args[1]
    assert isinstance(indices, (list, tuple))
    given = [i for i, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        return None
    mask: Any = indices[given[0]]
    dtype = getattr(mask.meta.get("val"), "dtype", None)
    return (mask, given[0], mask.meta["val"].ndim) if dtype is torch.bool else None


class Unknown(Exception):
    """A number that cannot be written over tensors."""


class Conditions:
    """Writes conditions over the values that the importer has for the nodes of a graph."""

    def __init__(
        self,
        builder: IrBuilder,
        values: Mapping[torch.fx.Node, Any],
        dim: Callable[[Any], Dim],
    ) -> None:
        self._b = builder
        self._values = values
        self._dim = dim

    def add(self, node: torch.fx.Node) -> None:
        """What eager checks while it runs. Of sizes alone: the export has it as a guard."""
        name = str(node.target)
        if name in TENSORS:
            condition = self._values[node.args[0]]  # type: ignore[index]
            message = str(node.args[1]) if len(node.args) > 1 else ""
            self._b.check(condition, message)
            return
        if not reads_values(node.args[0]):
            return
        try:
            found = [self.scalar(node.args[0])] if name in SCALARS else self.in_range(node)
        except Unknown as error:
            raise capture_error(
                "RM203",
                f"expected a condition over elements and sizes of tensors, got {error} in "
                f"{node.name} ({source_line(node)})",
                "torch._assert_async of a tensor",
            ) from error
        for condition in found:
            self._b.check(condition)

    def scalar(self, arg: Any) -> Value:
        """A number of the graph as a value of rank 0: bool, i64 or f64. Raises Unknown."""
        b = self._b
        if isinstance(arg, (bool, int, float)):
            kind = "bool" if isinstance(arg, bool) else "f64" if isinstance(arg, float) else "i64"
            return b.scalar(kind, arg)
        if not isinstance(arg, torch.fx.Node):
            raise Unknown(str(arg))
        if not reads_values(arg):
            val = arg.meta.get("val")
            if isinstance(val, (bool, float)):
                return self.scalar(val)
            if isinstance(val, (int, torch.SymInt)):
                return b.dim_value(self._dim(val))
            raise Unknown(str(arg))
        name = str(arg.target)
        if name in _READS:
            return self._element(arg.args[0])
        if name in _SIZES:
            return self._size(arg)
        return self._computed(arg)

    def in_range(self, node: torch.fx.Node) -> list[Value]:
        """What `sym_constrain_range` says of its number."""
        given = {"min": None, "max": None, **node.kwargs}
        given.update(zip(("min", "max"), node.args[1:], strict=False))
        x = self._number(self.scalar(node.args[0]))
        return [
            self._compared(op, x, self._b.scalar("i64", int(bound)))
            for op, bound in (("ge", given["min"]), ("le", given["max"]))
            if isinstance(bound, int)
        ]

    def _tensor(self, node: Any) -> Value:
        value = self._values.get(node)
        if not isinstance(value, Value):
            raise Unknown(str(node))
        return value

    def _element(self, node: Any) -> Value:
        x = self._b.reshape(self._tensor(node), [])
        if x.dtype == "u64":
            raise Unknown(str(node))
        kind = x.dtype if x.dtype == "bool" else "f64" if x.dtype in FLOATS else "i64"
        return self._b.cast(x, kind)

    def _size(self, node: torch.fx.Node) -> Value:
        """A size of what a mask chose."""
        b, source = self._b, node.args[0]
        found = _count_of(source)
        assert found is not None and isinstance(source, torch.fx.Node)
        mask_node, axis, rank = found
        mask = self._tensor(mask_node)
        truth = b.cast(mask, "bool")
        shape: list[Dim | None] = [None]
        name = str(source.target)
        if name == "aten.masked_select.default":
            whole = source.args[0]
            same = self._tensor(whole).dims
            if same != mask.dims:  # they broadcast
                raise Unknown(str(node))
        elif name == "aten.nonzero.default":
            shape.append(mask.rank)
        else:
            dims = self._tensor(source.args[0]).dims
            shape = [*dims[:axis], None, *dims[axis + rank :]]
        every = str(node.target) == "aten.sym_numel.default"
        wanted = shape if every else [shape[int(node.args[1])]]  # type: ignore[arg-type]
        out: Value | None = None
        for size in wanted:
            part = (
                b.reduce("sum", truth, range(truth.rank), False, "i64")
                if size is None
                else b.dim_value(size)
            )
            out = part if out is None else b.binary("mul", out, part)
        assert out is not None
        return out

    def _computed(self, node: torch.fx.Node) -> Value:
        b = self._b
        given = [self.scalar(a) for a in node.args]
        if node.target in _COMPARES:
            return self._compared(_COMPARES[node.target], *given)
        if node.target in _LOGIC and all(v.dtype == "bool" for v in given):
            return b.binary(_LOGIC[node.target], given[0], given[1])
        if node.target in _ARITHMETIC:
            return b.binary(_ARITHMETIC[node.target], *self._alike(*given))
        if node.target is torch.sym_ite:
            return b.where(b.cast(given[0], "bool"), *self._alike(*given[1:]))
        if node.target is torch.sym_not:
            return b.unary("logical_not", b.cast(given[0], "bool"), "bool")
        if node.target is torch.sym_float:
            return b.cast(given[0], "f64")
        if node.target is operator.neg:
            return b.unary("neg", self._number(given[0]))
        raise Unknown(str(node.target))

    def _number(self, x: Value) -> Value:
        return self._b.cast(x, "i64") if x.dtype == "bool" else x

    def _alike(self, x: Value, y: Value) -> tuple[Value, Value]:
        kind = "f64" if "f64" in (x.dtype, y.dtype) else "i64"
        return self._b.cast(x, kind), self._b.cast(y, kind)

    def _compared(self, op: str, x: Value, y: Value) -> Value:
        return self._b.binary(op, *self._alike(x, y), "bool")
