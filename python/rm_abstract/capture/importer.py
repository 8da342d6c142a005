"""ExportedProgram -> text form of the IR. Pure: reads the program, touches no module.

Sizes (SymInt nodes) vanish into dim expressions; parameters and buffers become weights under the
name they have in the user's module; an operator without a native form becomes an `aten.*` node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from rm_abstract.capture import rows_by_values, value_checks
from rm_abstract.capture.aten_args import UnsupportedCall, encode_call
from rm_abstract.capture.decompositions import MOST_TRACED, decomposed, likeness
from rm_abstract.capture.dims import Dim, as_dim
from rm_abstract.capture.errors import CaptureError, capture_error, source_line
from rm_abstract.capture.imported import ImportedProgram, KeptOp
from rm_abstract.capture.ir_builder import Attr, IrBuilder, Shape, Value
from rm_abstract.capture.op_map import pairs
from rm_abstract.capture.op_map.call import Call
from rm_abstract.capture.op_map.table import HANDLERS
from rm_abstract.capture.regions import Regions
from rm_abstract.capture.relations import relations_of
from rm_abstract.capture.signature import Signature

_SIZE_OPS: dict[Any, Callable[..., Any]] = {
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    operator.floordiv: operator.floordiv,
    operator.mod: operator.mod,
}
_OURS = ("aten", "rm_abstract", "prims", "transformers")  # namespaces whose operators handlers know


def import_program(
    ep: ExportedProgram,
    strip: str = "",
    donated: Collection[int] = (),
    *,
    for_training: bool = False,
) -> ImportedProgram:
    """Imports `ep`; `strip` is removed from the front of parameter names.

    The program may write the memory of the inputs numbered in `donated`. `for_training` notes what
    only gradients depend on, and allows writes to buffers: their new values are further results.
    """
    builder = IrBuilder()
    builder.for_training = for_training
    builder.on_gpu = _lies_on_gpu(ep)
    return _Importer(ep, strip, donated, builder).run()


def _lies_on_gpu(ep: ExportedProgram) -> bool:
    placeholders = (n.meta.get("val") for n in ep.graph.nodes if n.op == "placeholder")
    tensors = (t for t in placeholders if isinstance(t, torch.Tensor))
    return any(t.device.type == "cuda" for t in tensors)


class _Importer:
    def __init__(
        self, ep: ExportedProgram, strip: str, donated: Collection[int], b: IrBuilder
    ) -> None:
        self.ep = ep
        self.b = b
        self.by_values = rows_by_values.Found()
        if not b.for_training and not b.on_gpu:
            self.by_values = rows_by_values.find(ep.graph_module.graph)
        self.signature = Signature(ep, b, strip, donated, self.by_values.sizes)
        self.type_of, self.dim = self.signature.type_of, self.signature.dim
        self.env: dict[torch.fx.Node, Any] = {}
        self.kept: list[KeptOp] = []
        self.traced: dict[Any, torch.fx.GraphModule | None] = {}  # by call: its decomposition
        self.checked: set[torch.fx.Node] = set()  # what serves checks alone
        self.conditions = value_checks.Conditions(b, self.env, self.dim)
        self.regions = Regions(self)

    def run(self) -> ImportedProgram:
        of, b = self.signature, self.b
        self.env.update(of.placeholders())
        outputs = of.outputs(self.interpret(self.ep.graph_module))
        text = b.text(
            [*outputs, *of.written.values()], of.ranges(), relations_of(self.ep, b.symbols)
        )
        return ImportedProgram(
            text=text,
            input_dims=[[b.symbols.text(d) for d in v.dims] for v in of.inputs],
            weights=[n for n in b.weight_names if n not in of.constants],
            constants=of.constants,
            symbols=b.symbols,
            kept=self.kept,
            written=list(of.written),
            draws=b.draws,
            asks_tf32=b.asks_tf32,
        )

    def interpret(self, module: torch.fx.GraphModule) -> Sequence[Any]:
        self.checked |= value_checks.serving_checks_alone(module.graph)
        for node in module.graph.nodes:
            if node.op == "output":
                return [self.resolve(a) for a in node.args[0]]
            if node.op == "get_attr":
                self.env[node] = self.attribute(module, node)
            elif node.op == "call_function":
                self.env[node] = self.call(node)
        raise capture_error("RM201", "expected a graph with an output, got none", "a newer torch")

    def attribute(self, module: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
        found: Any = module
        for part in str(node.target).split("."):
            found = getattr(found, part)
        if isinstance(found, torch.Tensor):
            return self.signature.literal(found, node)
        return found

    def resolve(self, arg: Any) -> Any:
        """A node argument as a Value, a dim, a constant, or a list of them."""
        if isinstance(arg, torch.fx.Node):
            return self.env[arg]
        if isinstance(arg, (list, tuple)):
            return [self.resolve(a) for a in arg]
        if isinstance(arg, torch.SymInt):
            return self.dim(arg)
        return arg

    def call(self, node: torch.fx.Node) -> Any:
        if node in self.checked:
            return None
        val = node.meta.get("val")
        if isinstance(val, (int, torch.SymInt)) and not isinstance(val, bool):
            return self.dim(val)
        if node in self.by_values.inner:
            return None
        if node in self.by_values.products:
            return rows_by_values.product_of(self.b, self.env, self.by_values.products[node])
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, torch.fx.Node) and isinstance(index, int)
            item = self.env[source][index]
            if item is None and node.users:
                raise capture_error(
                    "RM207",
                    f"expected only the first result of {source.target} to be used, "
                    f"got result {index} ({source_line(node)})",
                    "keeping this module eager",
                )
            return item
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self.regions.call(node)
        name = str(node.target)
        if name == "aten._assert_tensor_metadata.default":
            return None  # of types, which are the program's
        if name in value_checks.CHECKS:
            return self.conditions.add(node)
        if not isinstance(node.target, torch._ops.OpOverload):
            if isinstance(val, (bool, torch.SymBool)) or val is None:
                return None  # a size condition; the export recorded it as a guard
            raise self.unsupported(node, "a size computed with integers", name)
        return self.aten(node, node.target, val)

    def aten(self, node: torch.fx.Node, target: torch._ops.OpOverload, val: Any) -> Any:
        if isinstance(val, (torch.SymFloat, torch.SymBool, torch.SymInt)):
            raise capture_error(
                "RM203",
                f"expected numbers that do not depend on the values of tensors, got {target} "
                f"({source_line(node)})",
                "torch operations on the tensor instead of .item(), .tolist() or float()",
            )
        vals = [val] if isinstance(val, torch.Tensor) else list(val or ())
        if not vals or not all(isinstance(v, torch.Tensor) for v in vals):
            raise self.unsupported(node, "tensors as results", str(target))
        given = [self.resolve(a) for a in (*node.args, *node.kwargs.values())]
        if pairs.holds_pair(given) or any(str(v.dtype) in pairs.PARTS for v in vals):
            return self.complex(node, target, vals)
        types = [self.type_of(v, node) for v in vals]
        if target.namespace in _OURS and not _is_wide_product(target, types):
            handler = HANDLERS.get(str(target).removeprefix("aten."))
            if handler is not None:
                result = handler(Call(self.b, self.bound(node, target), types))
                if result is not None:
                    self.check(node, result, types)
                    return result
        single = isinstance(val, torch.Tensor)
        if target.namespace == "aten" and not self.b.for_training:
            result = self.decomposed(node, target, types)
            if result is not None:
                return result[0] if single else result
        return self.keep(node, target, types, single)

    def complex(
        self, node: torch.fx.Node, target: torch._ops.OpOverload, vals: Sequence[Any]
    ) -> Any:
        """A call that takes or gives complex tensors, as one over their parts."""
        types = [
            (pairs.PARTS[str(v.dtype)], tuple(self.dim(d) for d in v.shape))
            if str(v.dtype) in pairs.PARTS
            else self.type_of(v, node)
            for v in vals
        ]
        call = Call(self.b, self.bound(node, target), types)
        result = pairs.convert(str(target).removeprefix("aten."), call, HANDLERS)
        if result is None:
            raise capture_error(
                "RM204",
                f"expected an operator that is known for complex numbers, got {target} at "
                f"{node.name} ({source_line(node)})",
                "real tensors",
            )
        found = [result] if isinstance(result, (Value, pairs.Pair)) else list(result)
        for which in ("real", "imag"):
            parts = [getattr(r, which) if isinstance(r, pairs.Pair) else r for r in found]
            self.check(node, parts, types)
        return result

    def decomposed(
        self,
        node: torch.fx.Node,
        target: torch._ops.OpOverload,
        types: Sequence[tuple[str, tuple[Dim, ...]]],
    ) -> list[Value] | None:
        """The call in torch's own words, where all of them are ours."""
        key = (target, *(likeness(a) for a in (*node.args, *sorted(node.kwargs.items()))))
        if key not in self.traced:
            if len(self.traced) >= MOST_TRACED:
                return None
            found = decomposed(target, node.args, node.kwargs)
            self.traced[key] = None if found is None else found[0]
        graph = self.traced[key]
        if graph is None:
            return None
        operands = [n for n in node.all_input_nodes]
        parameters = [n for n in graph.graph.nodes if n.op == "placeholder"]
        self.env.update((p, self.env[n]) for p, n in zip(parameters, operands, strict=True))
        before, nodes = len(self.kept), self.b.mark()
        try:
            results = list(self.interpret(graph))
            self.check(node, results, types)
        except CaptureError:
            results = []
        if len(self.kept) > before or not results or not all(isinstance(r, Value) for r in results):
            del self.kept[before:]  # its nodes have no users and vanish
            self.b.forget_checks(nodes)
            self.traced[key] = None
            return None
        return results

    def bound(self, node: torch.fx.Node, target: torch._ops.OpOverload) -> dict[str, Any]:
        """Arguments by schema name, defaults filled in, a scalar for int[1] made a list."""
        args: dict[str, Any] = {}
        for i, argument in enumerate(target._schema.arguments):
            if i < len(node.args):
                args[argument.name] = self.resolve(node.args[i])
            elif argument.name in node.kwargs:
                args[argument.name] = self.resolve(node.kwargs[argument.name])
            else:
                args[argument.name] = argument.default_value
        return args

    def check(
        self, node: torch.fx.Node, result: Any, types: Iterable[tuple[str, tuple[Dim, ...]]]
    ) -> None:
        """A handler that disagrees with the export in type or rank is a bug of ours: say where."""
        results = [result] if isinstance(result, Value) else list(result)
        for value, (dtype, dims) in zip(results, types, strict=True):
            if value is None:
                continue
            static = [
                (a, b)
                for a, b in zip(value.dims, dims, strict=False)
                if isinstance(a, int) and isinstance(b, int) and a != b
            ]
            if value.dtype != dtype or value.rank != len(dims) or static:
                raise capture_error(
                    "RM201",
                    f"expected {self.b.type_text(dtype, dims)} from {node.target}, got "
                    f"{self.b.type_text(value.dtype, value.dims)} ({source_line(node)})",
                    "reporting this operator",
                )

    def keep(
        self,
        node: torch.fx.Node,
        target: torch._ops.OpOverload,
        types: Sequence[tuple[str, tuple[Dim, ...]]],
        single: bool,
    ) -> Any:
        """The call as an `aten.*` node with its arguments as data."""
        if torch.Tag.nondeterministic_seeded in target.tags:
            arguments = self.bound(node, target)
            if arguments.get("train", arguments.get("training")) is not False:
                wanted, code = "an operator that draws no random numbers", "RM206"
            else:  # recurrent layers: each length would be a capture of its own, of seconds
                wanted, code = "an operator that is captured for every length at once", "RM207"
            raise self.unsupported(node, wanted, str(target), code)  # replaying it is eager's job
        try:
            operands, encoded = encode_call(target, node.args, dict(node.kwargs))
        except UnsupportedCall as error:
            raise self.unsupported(node, "a functional operator", str(error)) from error
        attrs: dict[str, Attr] = {"schema_args": encoded["schema_args"]}
        if target.namespace == "aten":  # functional and not random: a custom operator may be either
            attrs["pure"] = 1
        if "sym_args" in encoded:
            attrs["sym_args"] = Shape(as_dim(self.resolve(s)) for s in encoded["sym_args"])
        values = [self.resolve(n) for n in operands]
        overload = target._overloadname or "default"
        space, name = target._schema.name.split("::")
        op = f"aten.{name}.{overload}" if space == "aten" else f"aten.{space}.{name}.{overload}"
        self.kept.append(KeptOp(op, source_line(node)))
        results = self.b.multi(op, values, types, **attrs)
        return results[0] if single else results

    def unsupported(
        self, node: torch.fx.Node, expected: str, got: str, code: str = "RM207"
    ) -> Exception:
        return capture_error(
            code,
            f"expected {expected}, got {got} at {node.name} ({source_line(node)})",
            "keeping this module eager, or a mapping for this operator",
        )


_PRODUCTS = {"linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "mv", "addmv", "dot"}


def _is_wide_product(
    target: torch._ops.OpOverload, types: Sequence[tuple[str, tuple[Dim, ...]]]
) -> bool:
    """A product in f64: our kernels for it are a reference, PyTorch's are tens of times faster."""
    return types[0][0] == "f64" and target._schema.name.removeprefix("aten::") in _PRODUCTS
