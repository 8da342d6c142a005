"""A program in the IR as a torch module, for vendors' compilers that take torch (torch.export,
torch.jit, ``rebel.compile_from_torch``). Needs torch only.

One small function an operator, by the semantics of docs/operators.md. Programs must be static and
unfused (``_core.ir.substitute`` gives such); an operator without a function is an error that names
it, never a wrong answer. Weights are parameters of the module under their own names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from rm_abstract.worker.dtypes import DTYPES
from rm_abstract.worker.ir_images import IMAGES
from rm_abstract.worker.ir_random import philox_uniform
from rm_abstract.worker.ir_recurrent import recurrent
from rm_abstract.worker.ir_text import Node, Program, parse

Operands = Sequence[Any]
Functions: TypeAlias = "Mapping[str, Callable[[Operands, Node], Any]]"


def _reduce(x: Any, node: Node) -> Any:
    axes, keep = node.ints("axes"), bool(node.i("keepdim"))
    kind = str(node.attrs["kind"])
    if kind in ("argmax", "argmin"):
        return getattr(torch, kind)(x, axes[0], keep)
    if kind in ("any", "all", "prod"):
        for axis in sorted(axes, reverse=True):
            x = getattr(torch, kind)(x, axis, keep)
        return x
    function = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}[kind]
    return getattr(torch, function)(x, axes, keep)


def _index(x: Any, indices: Operands, node: Node) -> Any:
    axes = node.ints("axes")
    places: list[Any] = [slice(None)] * axes[0]
    return x[tuple(places) + tuple(indices)]


def _scatter(x: Any, index: Any, src: Any, node: Node) -> Any:
    axis = node.i("axis")
    kind = node.attrs.get("kind", "set")
    if kind == "add":
        return x.scatter_add(axis, index, src)
    if kind != "set":
        return x.scatter_reduce(axis, index, src, _REDUCTIONS[str(kind)])
    return x.scatter(axis, index, src)


_REDUCTIONS = {"mul": "prod", "max": "amax", "min": "amin"}


def _scan(x: Any, node: Node) -> Any:
    axis, kind = node.i("axis"), node.attrs["kind"]
    if kind == "prod":
        return torch.cumprod(x, axis)
    if kind == "logsumexp":
        return torch.logcumsumexp(x, axis)
    return (torch.cummax if kind == "max" else torch.cummin)(x, axis).values


def _rms_norm(x: Any, weight: Any, node: Node) -> Any:
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    eps, offset = node.f("eps"), node.f("weight_offset")
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * (weight + offset)
    return out.to(x.dtype)


def _sdpa(o: Operands, node: Node) -> Any:
    q, k, v = o[:3]
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return functional.scaled_dot_product_attention(
        q,
        k,
        v,
        o[3] if len(o) > 3 else None,
        is_causal=bool(node.i("is_causal")),
        scale=node.f("scale"),
    )


def _slice(x: Any, node: Node) -> Any:
    (start,), (stop,) = node.ints("start"), node.ints("stop")
    places: list[Any] = [slice(None)] * node.i("axis")
    places.append(slice(start, stop, node.i("step")))
    return x[tuple(places)]


def _iota(node: Node) -> Any:
    (start,) = node.ints("start")
    step = node.i("step")
    size = node.types[0].shape[0]
    values = torch.arange(size, dtype=torch.int64) * step + start
    return values.to(DTYPES[node.types[0].dtype])


def _layer_norm(o: Operands, node: Node) -> Any:
    shape = o[0].shape[o[0].dim() - node.i("num_axes") :]
    weight = o[1] if len(o) > 1 else None
    bias = o[2] if len(o) > 2 else None
    return functional.layer_norm(o[0], shape, weight, bias, node.f("eps"))


def _dim_value(node: Node) -> Any:
    (value,) = node.ints("value")
    return torch.tensor(value)


def _sort(o: Operands, node: Node) -> list[Any]:
    values, indices = torch.sort(
        o[0], dim=node.i("axis"), descending=bool(node.i("descending")), stable=True
    )
    k = node.i("k", -1)
    if k >= 0:
        values, indices = (t.narrow(node.i("axis"), 0, k) for t in (values, indices))
    return [values, indices]


def _adam(o: Operands, node: Node) -> list[Any]:
    """torch.optim.Adam's formulas; nothing is updated in place."""
    p, g, m, v, numbers = o[:5]
    largest, apply = (o[i] if len(o) > i else None for i in (5, 6))
    decay, keep, new1, old2, new2, eps, step, root = numbers.unbind()
    how = node.attrs.get("decay", "none")
    g = -g if node.i("maximize", 0) else g
    moved = p * keep if how == "parameter" else p
    g = g + p * decay if how == "gradient" else g
    mean, square = m + (g - m) * new1, v * old2 + g * g * new2
    most = [] if largest is None else [torch.maximum(largest, square)]
    second = most[0] if most else square
    made = [moved - mean / (second.sqrt() / root + eps) * step, mean, square, *most]
    if apply is None:
        return made
    before = [p, m, v] if largest is None else [p, m, v, largest]
    return [torch.where(apply, new, old) for new, old in zip(made, before, strict=True)]


def _softmax(x: Any, node: Node) -> Any:
    axis = node.i("axis")
    return torch.log_softmax(x, axis) if node.attrs.get("log") else torch.softmax(x, axis)


def _grouped_gemm(x: Any, w: Any, offsets: Any) -> Any:
    """Every row times the matrix of its group: as many groups end before it or with it."""
    rows = torch.arange(x.shape[0], device=x.device)
    group = (rows[:, None] >= offsets[None]).sum(1)
    y = torch.bmm(x[:, None], w[group.clamp(max=w.shape[0] - 1)])[:, 0]
    return torch.where((group < w.shape[0])[:, None], y, torch.zeros_like(y))


_UNARY: dict[str, Callable[[Any], Any]] = {
    name: getattr(torch, name)
    for name in (
        "neg abs exp log sqrt rsqrt sin cos tanh erf sigmoid relu logical_not reciprocal floor "
        "ceil round sign log1p expm1 isnan trunc"
    ).split()
}
_UNARY |= {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "softplus": functional.softplus,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(torch, name)
    for name in "add sub mul pow minimum maximum remainder eq ne lt le gt ge".split()
}
_BINARY |= {
    "div": torch.true_divide,
    "floor_div": torch.floor_divide,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}
_OTHER: dict[str, Callable[[Operands, Node], Any]] = {
    "reshape": lambda o, n: o[0].reshape(n.ints("shape")),
    "permute": lambda o, n: o[0].permute(n.ints("axes")),
    "expand": lambda o, n: o[0].expand(n.ints("shape")),
    "bitcast": lambda o, n: o[0].view(DTYPES[n.types[0].dtype]),
    "slice": lambda o, n: _slice(o[0], n),
    "concat": lambda o, n: torch.cat(list(o), n.i("axis")),
    "iota": lambda o, n: _iota(n),
    "full": lambda o, n: torch.full(n.types[0].shape, n.f("value"), dtype=DTYPES[n.types[0].dtype]),
    "dim_value": lambda o, n: _dim_value(n),
    "where": lambda o, n: torch.where(o[0], o[1], o[2]),
    "cast": lambda o, n: o[0].to(DTYPES[n.types[0].dtype]),
    "reduce": lambda o, n: _reduce(o[0], n),
    "scan": lambda o, n: _scan(o[0], n),
    "cumsum": lambda o, n: torch.cumsum(o[0], n.i("axis")),
    "softmax": lambda o, n: _softmax(o[0], n),
    "sort": _sort,
    "gather": lambda o, n: torch.gather(o[0], n.i("axis"), o[1]),
    "index": lambda o, n: _index(o[0], o[1:], n),
    "index_copy": lambda o, n: torch.index_copy(o[0], n.i("axis"), o[1].long(), o[2]),
    "scatter": lambda o, n: _scatter(o[0], o[1], o[2], n),
    "embedding": lambda o, n: functional.embedding(o[1], o[0]),
    "matmul": lambda o, n: torch.matmul(o[0], o[1]),
    "grouped_gemm": lambda o, n: _grouped_gemm(*o),
    "linear": lambda o, n: functional.linear(o[0], o[1], o[2] if len(o) > 2 else None),
    "layer_norm": _layer_norm,
    "rms_norm": lambda o, n: _rms_norm(o[0], o[1] if len(o) > 1 else None, n),
    "sdpa": _sdpa,
    "adam": _adam,
    "uniform": lambda o, n: philox_uniform(o[0], n.types[0].shape),
    "recurrent": recurrent,
    **IMAGES,
}


def operator_of(name: str) -> Callable[[Operands, Node], Any] | None:
    """The function of an operator; None when there is none."""
    if name in _OTHER:
        return _OTHER[name]
    if name in _UNARY:
        return lambda o, n: _UNARY[name](o[0])
    if name in _BINARY:
        return lambda o, n: _BINARY[name](o[0], o[1])
    return _aten if name.startswith("aten.") else None


def _aten(o: Operands, node: Node) -> Any:
    """An ATen call as capture/aten_args.py wrote it down; only plain arguments."""
    _, name, overload = node.op.split(".")
    target = getattr(getattr(torch.ops.aten, name), overload)
    args = [_argument(v, o) for _, v in json.loads(str(node.attrs["schema_args"]))["args"]]
    given = zip(args, target._schema.arguments, strict=True)
    positional = [a for a, s in given if not s.kwarg_only]
    named = {s.name: a for a, s in zip(args, target._schema.arguments, strict=True) if s.kwarg_only}
    return target(*positional, **named)


def _argument(value: Any, operands: Operands) -> Any:
    if isinstance(value, list):
        return [_argument(v, operands) for v in value]
    if isinstance(value, dict):
        if "t" in value:
            return operands[value["t"]]
        if "f" in value:
            return math.nan if value["f"] == "nan" else float(value["f"])
        raise ValueError(f"[ir_to_torch] expected a static ATen argument, got {value}")
    return value


class IrModule(torch.nn.Module):
    """forward(*inputs) -> tuple of outputs."""

    def __init__(
        self, program: Program, weights: Mapping[str, torch.Tensor], instead: Functions
    ) -> None:
        super().__init__()
        self.program = program
        for value, name in program.weights.items():
            self.register_buffer(f"w{value}", weights[name])
        for value, data in program.literals.items():
            kind = program.types[value]
            literal = torch.frombuffer(bytearray(data), dtype=DTYPES[kind.dtype])
            self.register_buffer(f"w{value}", literal.reshape(kind.shape), persistent=False)
        self._steps = [
            (node, instead.get(node.op) or self._function(node)) for node in program.nodes
        ]

    @staticmethod
    def _function(node: Node) -> Callable[[Operands, Node], Any]:
        function = operator_of(node.op)
        if function is None:
            raise ValueError(
                f"[ir_to_torch] expected an operator of docs/operators.md, got {node.op}; try the "
                "program before fusion"
            )
        return function

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.evaluate(inputs, [getattr(self, f"w{v}") for v in self.program.weights])

    def evaluate(
        self, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """forward() with other weights, in the program's order."""
        values: dict[int, Any] = dict(zip(self.program.inputs, inputs, strict=True))
        values.update(zip(self.program.weights, weights, strict=True))
        for value in self.program.literals:
            values[value] = getattr(self, f"w{value}")
        for node, function in self._steps:
            operands = [None if i is None else values[i] for i in node.operands]
            result = function(operands, node)
            results = list(result) if isinstance(result, (list, tuple)) else [result]
            for number, one, kind in zip(node.results, results, node.types, strict=False):
                wanted = DTYPES[
                    kind.dtype
                ]  # a cast to the same type is a node vendors stumble over
                values[number] = one if one.dtype == wanted else one.to(wanted)
        return tuple(values[i] for i in self.program.outputs)


class StatesLast(torch.nn.Module):
    """forward(*inputs, *states): the states behind the others, wherever the program has them."""

    def __init__(self, module: IrModule) -> None:
        super().__init__()
        self.module = module
        program = module.program
        behind = [v for v in program.inputs if v in program.donated]
        order = [v for v in program.inputs if v not in program.donated] + behind
        self._places = [order.index(value) for value in program.inputs]

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs: tuple[torch.Tensor, ...] = self.module(*[given[at] for at in self._places])
        return outputs


def states_last(module: IrModule) -> StatesLast:
    return StatesLast(module)


def ir_to_torch(
    text: str, weights: Mapping[str, torch.Tensor], instead: Functions | None = None
) -> IrModule:
    """The module of a static program; ``instead`` has operators in a vendor's own words. Raises
    ValueError for what it does not know."""
    return IrModule(parse(text), weights, instead or {})
