"""Operators of an exported program that hold graphs: switches of a mode, torch.cond, map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rm_abstract.capture.decompositions import over_rows
from rm_abstract.capture.imported import KeptOp
from rm_abstract.capture.ir_builder import IrBuilder, Value

# Kernels of these refuse some values: in a branch that is not taken nothing may be refused.
_MAY_REFUSE = {"gather", "index", "index_copy", "scatter", "embedding", "uniform", "check"}


class Interpreter(Protocol):
    """What writes the nodes of a graph."""

    b: IrBuilder
    env: dict[torch.fx.Node, Any]
    kept: list[KeptOp]

    def resolve(self, arg: Any) -> Any: ...
    def interpret(self, module: torch.fx.GraphModule) -> Sequence[Any]: ...
    def unsupported(
        self, node: torch.fx.Node, expected: str, got: str, code: str = ...
    ) -> Exception: ...


class Regions:
    def __init__(self, of: Interpreter) -> None:
        self._of = of

    def call(self, node: torch.fx.Node) -> Any:
        """Regions that only switch a mode are inlined, others written without a region (0151)."""
        name = node.target.name() if hasattr(node.target, "name") else str(node.target)
        args = list(node.args)
        if name == "wrap_with_set_grad_enabled":
            body, operands = args[1], args[2:]
        elif name == "wrap_with_autocast" and args[2] is False:
            body, operands = args[4], args[5:]
        elif name == "cond":
            return self._chosen(node)
        elif name == "map_impl":
            return self._mapped(node)
        else:
            raise self._of.unsupported(node, "straight-line code", f"the region {name}")
        assert isinstance(body, torch.fx.Node)
        return self._inlined(self._of.env[body], operands)

    def _inlined(self, module: torch.fx.GraphModule, operands: Sequence[Any]) -> Sequence[Any]:
        parameters = [n for n in module.graph.nodes if n.op == "placeholder"]
        for parameter, operand in zip(parameters, operands, strict=True):
            self._of.env[parameter] = self._of.resolve(operand)
        return self._of.interpret(module)

    def _chosen(self, node: torch.fx.Node) -> Sequence[Value]:
        """torch.cond: both branches are computed, and each result is one of two values."""
        predicate, operands = self._of.resolve(node.args[0]), node.args[3]
        assert isinstance(operands, (list, tuple))
        if not isinstance(predicate, Value):
            raise self._of.unsupported(node, "a condition that is a tensor", "a number or a size")
        before, kept = self._of.b.mark(), len(self._of.kept)
        branches = [self._inlined(self._of.env[g], operands) for g in node.args[1:3]]  # type: ignore[index]
        refusing = self._of.b.operators_since(before) & _MAY_REFUSE
        if refusing or len(self._of.kept) > kept:
            names = sorted(refusing) + [op.op for op in self._of.kept[kept:]]
            raise self._of.unsupported(
                node, "branches that may both be computed", f"{', '.join(names)} in one"
            )
        which = self._of.b.reshape(self._of.b.cast(predicate, "bool"), [])
        for a, b in zip(*branches, strict=True):
            if not isinstance(a, Value) or not isinstance(b, Value) or a.dtype != b.dtype:
                raise self._of.unsupported(node, "tensors of one type from both branches", "others")
        return [self._of.b.where(which, a, b) for a, b in zip(*branches, strict=True)]

    def _mapped(self, node: torch.fx.Node) -> Sequence[Any]:
        """torch's map: its body over all rows at once, as vmap writes it."""
        body, rows, others = node.args
        assert isinstance(rows, (list, tuple)) and isinstance(others, (list, tuple))
        graph = over_rows(self._of.env[body], rows, others)  # type: ignore[index]
        if graph is None:
            raise self._of.unsupported(node, "a map over rows that vmap takes", "another")
        return self._inlined(graph, [n for n in (*rows, *others) if isinstance(n, torch.fx.Node)])
