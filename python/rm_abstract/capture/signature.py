"""What an exported program takes and gives: inputs, weights and constants as values of the IR,
results, and ranges of sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped,unused-ignore]
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from rm_abstract.capture.dims import Dim, as_dim
from rm_abstract.capture.errors import capture_error, source_line
from rm_abstract.capture.ir_builder import DTYPES, IrBuilder, Value
from rm_abstract.capture.op_map import pairs

_MAX_LITERAL_BYTES = 64 * 1024


class Signature:
    """`strip` is removed from the front of weights' names. `sizes`: those that are values of
    tensors, by sizes that they follow from."""

    def __init__(
        self,
        ep: ExportedProgram,
        builder: IrBuilder,
        strip: str,
        donated: Collection[int],
        sizes: Mapping[sympy.Symbol, sympy.Expr],
    ) -> None:
        self.ep = ep
        self.b = builder
        self.strip = strip
        self.donated = donated
        self.sizes = sizes
        self.inputs: list[Value] = []
        self.constants: dict[str, torch.Tensor] = {}  # too large to be written into the program
        self.written: dict[str, Value] = {}  # new values of buffers

    def placeholders(self) -> dict[torch.fx.Node, Any]:
        """The program's inputs, then its weights and constants, as values."""
        nodes = [n for n in self.ep.graph_module.graph.nodes if n.op == "placeholder"]
        specs = self.ep.graph_signature.input_specs
        found: dict[torch.fx.Node, Any] = {}
        for node, spec in zip(nodes, specs, strict=True):
            val = node.meta.get("val")
            if spec.kind is InputKind.USER_INPUT and isinstance(val, torch.Tensor):
                dtype, dims = self.type_of(val, node)
                number = len(self.inputs)
                found[node] = self.b.input(
                    f"input{number}", dtype, dims, donated=number in self.donated
                )
                self.inputs.append(found[node])
        for node, spec in zip(nodes, specs, strict=True):
            if node not in found:
                found[node] = self.constant(node, spec)
        return found

    def literal(self, tensor: torch.Tensor, node: torch.fx.Node) -> Value:
        dtype, _ = self.type_of(tensor, node)
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return self.b.literal(dtype, list(tensor.shape), data.numpy().tobytes())

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
        if isinstance(dim, int) or not self.sizes:
            return dim
        return as_dim(sympy.expand(dim.subs(self.sizes)))

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
        if tensor.numel() * tensor.element_size() <= _MAX_LITERAL_BYTES:
            return self.literal(tensor, node)
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
