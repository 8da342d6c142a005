"""ExportedProgram -> text form of the IR. Pure: reads the program, touches no module.

Sizes (SymInt nodes) vanish into dim expressions; parameters and buffers become weights under the
name they have in the user's module; an operator without a native form becomes an `aten.*` node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped,unused-ignore]
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from rm_abstract.capture import rows_by_values, value_checks
from rm_abstract.capture.aten_args import UnsupportedCall, encode_call
from rm_abstract.capture.decompositions import MOST_TRACED, decomposed, over_rows
from rm_abstract.capture.dims import Dim, SymbolNames, as_dim
from rm_abstract.capture.errors import CaptureError, capture_error
from rm_abstract.capture.ir_builder import DTYPES, Attr, IrBuilder, Shape, Value
from rm_abstract.capture.op_map import pairs
from rm_abstract.capture.op_map.call import Call
from rm_abstract.capture.op_map.table import HANDLERS
from rm_abstract.capture.relations import relations_of

_MAX_LITERAL_BYTES = 64 * 1024
_SIZE_OPS: dict[Any, Callable[..., Any]] = {
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    operator.floordiv: operator.floordiv,
    operator.mod: operator.mod,
}
_OURS = ("aten", "rm_abstract", "prims", "transformers")  # namespaces whose operators handlers know
# Kernels of these refuse some values: in a branch that is not taken nothing may be refused.
_MAY_REFUSE = {"gather", "index", "index_copy", "scatter", "embedding", "uniform", "check"}


@dataclass(frozen=True)
class KeptOp:
    """An operator left to the torch bridge (RM202), with the user's source line."""

    op: str
    source: str


@dataclass
class ImportedProgram:
    """The result: text, and what a caller needs to feed it."""

    text: str
    input_dims: list[list[str]]
    weights: list[str]
    constants: dict[str, torch.Tensor]
    symbols: SymbolNames
    kept: list[KeptOp] = field(default_factory=list)
    written: list[str] = field(default_factory=list)  # buffers whose new values are results too
    draws: int = 0  # of random numbers, from the weight ir_builder.RANDOM
    asks_tf32: bool = False  # holds what depends on torch's switch for tf32 in convolutions


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
    importer = _Importer(ep, strip, donated)
    importer.b.for_training = for_training
    importer.b.on_gpu = _lies_on_gpu(ep)
    return importer.run()


def _lies_on_gpu(ep: ExportedProgram) -> bool:
    placeholders = (n.meta.get("val") for n in ep.graph.nodes if n.op == "placeholder")
    tensors = (t for t in placeholders if isinstance(t, torch.Tensor))
    return any(t.device.type == "cuda" for t in tensors)


def is_inplace(ep: ExportedProgram) -> bool:
    """True when the graph mutates a tensor: it must be functionalised before the import."""
    for module in ep.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            target = node.target
            if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
                continue
            if target._schema.is_mutable and target is not torch.ops.aten.detach_.default:
                return True
    return False


def source_line(node: torch.fx.Node) -> str:
    """The user's line that made a node: the last frame torch recorded, "" when none."""
    frames = [s.strip() for s in (node.meta.get("stack_trace") or "").splitlines() if s.strip()]
    for i in range(len(frames) - 1, -1, -1):
        if frames[i].startswith("File "):
            code = frames[i + 1] if i + 1 < len(frames) else ""
            return f"{frames[i]}: {code}" if code else frames[i]
    return ""


class _Importer:
    def __init__(self, ep: ExportedProgram, strip: str, donated: Collection[int]) -> None:
        self.ep = ep
        self.donated = donated
        self.strip = strip
        self.b = IrBuilder()
        self.env: dict[torch.fx.Node, Any] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.kept: list[KeptOp] = []
        self.traced: dict[Any, torch.fx.GraphModule | None] = {}  # by call: its decomposition
        self.inputs: list[Value] = []
        self.written: dict[str, Value] = {}
        self.by_values = rows_by_values.Found()
        self.checked: set[torch.fx.Node] = set()  # what serves checks alone
        self.conditions = value_checks.Conditions(self.b, self.env, self.dim)

    def run(self) -> ImportedProgram:
        graph = self.ep.graph_module.graph
        if not self.b.for_training and not self.b.on_gpu:
            self.by_values = rows_by_values.find(graph)
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        specs = self.ep.graph_signature.input_specs
        users = [s.kind is InputKind.USER_INPUT for s in specs]
        for node, user in zip(placeholders, users, strict=True):
            if user and isinstance(node.meta.get("val"), torch.Tensor):
                dtype, dims = self.type_of(node.meta["val"], node)
                number = len(self.inputs)
                self.env[node] = self.b.input(
                    f"input{number}", dtype, dims, donated=number in self.donated
                )
                self.inputs.append(self.env[node])
        for node, spec in zip(placeholders, specs, strict=True):
            if node not in self.env:
                self.env[node] = self.constant(node, spec)
        returned = self.interpret(self.ep.graph_module)
        outputs = self.outputs(returned)
        ranges = self.ranges()
        return ImportedProgram(
            text=self.b.text(
                [*outputs, *self.written.values()], ranges, relations_of(self.ep, self.b.symbols)
            ),
            input_dims=[[self.b.symbols.text(d) for d in v.dims] for v in self.inputs],
            weights=[n for n in self.b.weight_names if n not in self.constants],
            constants=self.constants,
            symbols=self.b.symbols,
            kept=self.kept,
            written=list(self.written),
            draws=self.b.draws,
            asks_tf32=self.b.asks_tf32,
        )

    # ---- inputs, weights, outputs --------------------------------------------------------------

    def type_of(self, val: Any, node: torch.fx.Node) -> tuple[str, tuple[Dim, ...]]:
        dtype = DTYPES.get(str(val.dtype))
        if dtype is None or val.layout is not torch.strided:
            raise capture_error(
                "RM204",
                f"expected a dense tensor of a common element type, got {val.dtype} "
                f"{val.layout} at {node.name} ({source_line(node)})",
                "float, half, integer or bool tensors",
            )
        return dtype, tuple(self.dim(d) for d in val.shape)

    def dim(self, size: Any) -> Dim:
        """A size as a dim, without those that are values where they follow from others."""
        dim = as_dim(size)
        if isinstance(dim, int) or not self.by_values.sizes:
            return dim
        return as_dim(sympy.expand(dim.subs(self.by_values.sizes)))

    def constant(self, node: torch.fx.Node, spec: Any) -> Any:
        if spec.kind is InputKind.USER_INPUT:
            return getattr(spec.arg, "value", None)
        if not node.users:
            return None  # registered but not used: no weight of the program
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            tensor = self.ep.state_dict.get(spec.target)
            if tensor is None:
                tensor = self.ep.constants[spec.target]
            return self.weight(spec.target.removeprefix(self.strip), tensor, node)
        tensor = self.ep.constants.get(spec.target)
        if not isinstance(tensor, torch.Tensor):
            raise capture_error(
                "RM204", f"expected tensor constants, got {spec.target}", "a tensor attribute"
            )
        attribute = spec.target.rpartition(".")[2]
        if not attribute.startswith("lifted_tensor") and spec.target.startswith(self.strip):
            return self.weight(spec.target.removeprefix(self.strip), tensor, node)
        dtype, _ = self.type_of(tensor, node)
        size = tensor.numel() * tensor.element_size()
        if size <= _MAX_LITERAL_BYTES:
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return self.b.literal(dtype, list(tensor.shape), data.numpy().tobytes())
        name = f"@constant.{len(self.constants)}"
        self.constants[name] = tensor.detach()
        return self.b.weight(name, dtype, list(tensor.shape))

    def weight(self, name: str, tensor: torch.Tensor, node: torch.fx.Node) -> Value:
        dtype, _ = self.type_of(tensor, node)
        return self.b.weight(name, dtype, list(tensor.shape))

    def outputs(self, returned: Sequence[Any]) -> list[Value]:
        outputs: list[Value] = []
        for value, spec in zip(returned, self.ep.graph_signature.output_specs, strict=True):
            may_write = self.b.for_training and isinstance(value, Value)
            if spec.kind is OutputKind.BUFFER_MUTATION and may_write:
                self.written[str(spec.target).removeprefix(self.strip)] = value
                continue
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise capture_error(
                    "RM204",
                    f"expected a module that leaves its buffers and inputs alone, got a write to "
                    f"{spec.target}",
                    "keeping this module eager",
                )
            if not isinstance(value, Value):
                what = "a complex one" if isinstance(value, pairs.Pair) else value
                raise capture_error(
                    "RM204", f"expected real tensors as outputs, got {what}", "a tensor output"
                )
            outputs.append(value)
        return outputs

    def ranges(self) -> dict[str, tuple[int, int]]:
        out: dict[str, tuple[int, int]] = {}
        for symbol, bounds in self.ep.range_constraints.items():
            name = self.b.symbols.names.get(symbol)
            if name is not None:
                low = int(bounds.lower)
                high = 2**63 - 1 if not bounds.upper.is_Integer else int(bounds.upper)
                out[name] = (low, high)
        return out

    # ---- nodes ---------------------------------------------------------------------------------

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
            dtype, _ = self.type_of(found, node)
            data = found.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return self.b.literal(dtype, list(found.shape), data.numpy().tobytes())
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
            return self.in_groups(self.by_values.products[node])
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
            return self.higher_order(node)
        name = str(node.target)
        if name == "aten._assert_tensor_metadata.default":
            return None  # of types, which are the program's
        if name in value_checks.TENSORS | value_checks.SCALARS | value_checks.RANGES:
            return self.checks(node, name)
        if not isinstance(node.target, torch._ops.OpOverload):
            if isinstance(val, (bool, torch.SymBool)) or val is None:
                return None  # a size condition; the export recorded it as a guard
            raise self.unsupported(node, "a size computed with integers", name)
        return self.aten(node, node.target, val)

    def checks(self, node: torch.fx.Node, name: str) -> None:
        """What eager checks while it runs."""
        if name in value_checks.TENSORS:
            condition = self.env[node.args[0]]  # type: ignore[index]
            message = str(node.args[1]) if len(node.args) > 1 else ""
            self.b.check(condition, message)
        elif value_checks.reads_values(node.args[0]):  # of sizes alone: the export's guards
            try:
                one = name in value_checks.SCALARS
                found = (
                    [self.conditions.scalar(node.args[0])]
                    if one
                    else self.conditions.in_range(node)
                )
            except value_checks.Unknown as error:
                raise capture_error(
                    "RM203",
                    f"expected a condition over elements and sizes of tensors, got {error} in "
                    f"{node.name} ({source_line(node)})",
                    "torch._assert_async of a tensor",
                ) from error
            for condition in found:
                self.b.check(condition)

    def in_groups(self, found: rows_by_values.Grouped) -> Value:
        """Products of groups of rows, as one."""
        b, rows, sizes = self.b, self.env[found.rows], self.env[found.sizes]
        weights = [self.env[w] for w in found.weights]
        if len(weights) > 1 or weights[0].rank == 2:
            width = weights[0].dims
            parts = [b.reshape(w, [1, *width]) for w in weights]
            weights = [b.concat(parts, 0, [len(parts), *width])]
        matrices = b.permute(weights[0], [0, 2, 1])
        ends = b.op("cumsum", [b.cast(sizes, "i64")], "i64", sizes.dims, axis=0)
        dims = [rows.dims[0], matrices.dims[2]]
        return b.op("grouped_gemm", [rows, matrices, ends], rows.dtype, dims)

    def higher_order(self, node: torch.fx.Node) -> Any:
        """Regions that only switch a mode are inlined, others written without a region (0151)."""
        name = node.target.name() if hasattr(node.target, "name") else str(node.target)
        args = list(node.args)
        if name == "wrap_with_set_grad_enabled":
            body, operands = args[1], args[2:]
        elif name == "wrap_with_autocast" and args[2] is False:
            body, operands = args[4], args[5:]
        elif name == "cond":
            return self.chosen(node)
        elif name == "map_impl":
            return self.mapped(node)
        else:
            raise self.unsupported(node, "straight-line code", f"the region {name}")
        assert isinstance(body, torch.fx.Node)
        return self.region(self.env[body], operands)

    def region(self, module: torch.fx.GraphModule, operands: Sequence[Any]) -> Sequence[Any]:
        parameters = [n for n in module.graph.nodes if n.op == "placeholder"]
        for parameter, operand in zip(parameters, operands, strict=True):
            self.env[parameter] = self.resolve(operand)
        return self.interpret(module)

    def chosen(self, node: torch.fx.Node) -> Sequence[Value]:
        """torch.cond: both branches are computed, and each result is one of two values."""
        predicate, operands = self.resolve(node.args[0]), node.args[3]
        assert isinstance(operands, (list, tuple))
        if not isinstance(predicate, Value):
            raise self.unsupported(node, "a condition that is a tensor", "a number or a size")
        before, kept = self.b.mark(), len(self.kept)
        branches = [self.region(self.env[g], operands) for g in node.args[1:3]]  # type: ignore[index]
        refusing = self.b.operators_since(before) & _MAY_REFUSE
        if refusing or len(self.kept) > kept:
            names = sorted(refusing) + [op.op for op in self.kept[kept:]]
            raise self.unsupported(
                node, "branches that may both be computed", f"{', '.join(names)} in one"
            )
        which = self.b.reshape(self.b.cast(predicate, "bool"), [])
        for a, b in zip(*branches, strict=True):
            if not isinstance(a, Value) or not isinstance(b, Value) or a.dtype != b.dtype:
                raise self.unsupported(node, "tensors of one type from both branches", "others")
        return [self.b.where(which, a, b) for a, b in zip(*branches, strict=True)]

    def mapped(self, node: torch.fx.Node) -> Sequence[Any]:
        """torch's map: its body over all rows at once, as vmap writes it."""
        body, rows, others = node.args
        assert isinstance(rows, (list, tuple)) and isinstance(others, (list, tuple))
        graph = over_rows(self.env[body], rows, others)  # type: ignore[index]
        if graph is None:
            raise self.unsupported(node, "a map over rows that vmap takes", "another")
        return self.region(graph, [n for n in (*rows, *others) if isinstance(n, torch.fx.Node)])

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
        key = (target, *(self.likeness(a) for a in (*node.args, *sorted(node.kwargs.items()))))
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

    def likeness(self, arg: Any) -> Any:
        """Equal for arguments for which a decomposition is the same graph."""
        if isinstance(arg, torch.fx.Node):
            val = arg.meta.get("val")
            if isinstance(val, torch.Tensor):
                return (str(val.dtype), tuple(str(s) for s in (*val.shape, "", *val.stride())))
            return str(val)
        if isinstance(arg, (list, tuple)):
            return tuple(self.likeness(a) for a in arg)
        return repr(arg)

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
