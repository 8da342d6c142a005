"""``torch.compile(model, backend="rm_abstract")``: compiles the graphs that dynamo captures.

Dynamo hands weights over as arguments of the graph. A program wants them as constants, so they
become parameters of a module around the graph; a call that brings other tensors runs the graph
itself. Calls that no program can serve run the graph as PyTorch would, with the reason in
``explain()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rm_abstract import api, session


class FixedWeights(nn.Module):
    """A captured graph whose parameters and buffers are members, no longer arguments."""

    def __init__(self, graph: nn.Module, fixed: dict[int, torch.Tensor], count: int) -> None:
        super().__init__()
        self.graph = _bare(graph)
        self.places = [i for i in range(count) if i not in fixed]
        self.count = count
        self.names: list[tuple[int, str]] = []
        for place, tensor in fixed.items():
            name = f"weight_{place}"
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
            self.names.append((place, name))

    def forward(self, *arguments: Any) -> Any:
        values: list[Any] = [None] * self.count
        for place, value in zip(self.places, arguments, strict=True):
            values[place] = value
        for place, name in self.names:
            values[place] = getattr(self, name)
        return self.graph(*values)


def _bare(graph: nn.Module) -> nn.Module:
    """A module with the graph's forward and members, without fx's records of the graph.

    Those are objects of C that the guard cannot watch; nothing in forward reads them.
    """
    compiled_now = getattr(graph, "real_recompile", None)
    if compiled_now is not None:  # dynamo puts off writing the forward until it is called
        compiled_now()
    kind = type("CapturedGraph", (nn.Module,), {"forward": type(graph).forward})
    bare: nn.Module = kind()
    for group in ("_modules", "_parameters", "_buffers"):
        getattr(bare, group).update(getattr(graph, group))
    return bare


def rm_abstract(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """The backend: a callable like the graph. Raises TypeError for options; use ``init()``."""
    if options:
        raise TypeError(
            f"the torch.compile backend rm_abstract takes no options, got {sorted(options)}; "
            "give them to rm_abstract.init()"
        )
    if session.current() is None:
        api.init()
    fixed = _weights(graph, example_inputs)
    module = FixedWeights(graph, fixed, len(example_inputs)).eval()
    served = api.accelerate(module)
    places = module.places
    expected = list(fixed.items())

    def call(*arguments: Any) -> Any:
        if any(arguments[place] is not tensor for place, tensor in expected):
            return graph(*arguments)
        return served(*[arguments[place] for place in places])

    return call


def _weights(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Arguments that dynamo says keep their address: parameters and buffers of the module."""
    fixed: dict[int, torch.Tensor] = {}
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for place, (node, value) in enumerate(zip(nodes, example_inputs, strict=True)):
        static = getattr(node, "_dynamo_static_input_type", None) is not None
        if isinstance(value, nn.Parameter) or (static and isinstance(value, torch.Tensor)):
            fixed[place] = value
    return fixed
