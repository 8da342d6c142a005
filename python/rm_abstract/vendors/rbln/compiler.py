"""Rebellions' compiler for one program: a module with named parameters, a `.rbln` file's bytes.

No NPU is needed. The file holds the weights. Booleans cross the line as i32: `input_info` has no
boolean type in any public use.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch

from rm_abstract.vendors.rbln import messages, scratch
from rm_abstract.worker.dtypes import DTYPES
from rm_abstract.worker.ports import Port
from rm_abstract.worker.python_backend import Program

Progress = Callable[[float, str], None]


def compile_program(program: Program, target: str, devices: int, progress: Progress) -> bytes:
    """A `.rbln` file's bytes for so many NPUs of that name; "" asks the vendor's software which one
    there is. Raises Failure: RM304, RM305, RM301."""
    import rebel

    progress(0.0, "making the torch module")
    module = with_named_parameters(program)
    info = [(one.name, list(one.shape), _name_of(given_dtype(one))) for one in program.inputs]
    progress(0.1, "compiling with rebel")
    options = {"npu": target or None, _devices_keyword(rebel): devices}
    try:
        with torch.no_grad():
            compiled = rebel.compile_from_torch(module, info, **options)
        progress(0.9, "saving")
        with scratch.folder() as folder:
            path = folder / "program.rbln"
            compiled.save(str(path))
            data = path.read_bytes()
    except Exception as error:
        raise messages.of_compiling(error) from error
    progress(1.0, "compiled")
    return data


def with_named_parameters(program: Program) -> torch.nn.Module:
    """The program's module with a parameter of its own a input, as `input_info` names them."""
    graph = torch.fx.Graph()
    given = [graph.placeholder(one.name) for one in program.inputs]
    operands = [
        graph.call_function(torch.ne, (value, 0)) if one.dtype == "bool" else value
        for one, value in zip(program.inputs, given, strict=True)
    ]
    results = graph.call_module("program", tuple(operands))
    graph.output(
        tuple(
            graph.call_method("to", (_item(graph, results, i), given_dtype(one)))
            if one.dtype == "bool"
            else _item(graph, results, i)
            for i, one in enumerate(program.outputs)
        )
    )
    return torch.fx.GraphModule({"program": program.torch()}, graph).eval()


def _item(graph: torch.fx.Graph, values: torch.fx.Node, index: int) -> torch.fx.Node:
    return graph.call_function(operator.getitem, (values, index))


def given_dtype(port: Port) -> torch.dtype:
    """What a port's values are on the vendor's side."""
    return torch.int32 if port.dtype == "bool" else DTYPES[port.dtype]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).partition(".")[2]


def _devices_keyword(rebel: Any) -> str:
    """What this version of the compiler calls the number of NPUs."""
    known = inspect.signature(rebel.compile).parameters
    return "tensor_parallel_size" if "tensor_parallel_size" in known else "num_devices"
