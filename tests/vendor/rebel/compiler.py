"""`rebel.compile_from_torch`: a module and its inputs' types become a compiled model."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from rebel import faults
from rebel.compile_context import CompileContext
from rebel.compiled_model import Input, RBLNCompiledModel
from rebel.core.exception import RBLNCompileError
from rebel.devices import get_npu_name

InputInfo = Sequence[tuple[str, Sequence[int], Any]]


def _compile(
    mod: torch.nn.Module,
    input_info: InputInfo,
    npu: str | None,
    devices: int | None,
    example_inputs: Sequence[torch.Tensor] | None,
    compile_context: CompileContext | None,
) -> RBLNCompiledModel:
    """Source: docs.rbln.ai, compile_from_torch: `input_info` has (name, shape, dtype) in the order
    of forward's parameters, and with their names; without `npu` the target is RBLN_TARGET_SOC or
    the NPU that is there. Static shapes only."""
    target = npu or os.environ.get("RBLN_TARGET_SOC") or get_npu_name()
    if target is None:
        raise RBLNCompileError("no target: neither npu, RBLN_TARGET_SOC nor an NPU")
    inputs = [Input(name, tuple(shape), _dtype(kind)) for name, shape, kind in input_info]
    _check_names(mod, inputs)
    faults.crash_or_hang("compile")
    if faults.happens("compile_error"):
        raise RBLNCompileError("Graph Generation: [DEVICE_GRAPH_CONVERSION]")
    if faults.happens("unsupported"):
        raise NotImplementedError("The following operators are not implemented: ['aten::unfold']")
    if faults.happens("compile_slow"):
        time.sleep(float(os.environ.get("REBEL_COMPILE_S", "2")))
    static = set(compile_context.static if compile_context is not None else ())
    return RBLNCompiledModel._of(
        _exported(mod, inputs, example_inputs, static),
        {
            "npu": target,
            "devices": devices or 1,
            "inputs": [(i.name, i.shape, str(i.dtype).partition(".")[2]) for i in inputs],
            "static": {i.name: i.shape for i in inputs if i.name in static},
            "context": compile_context.identity if compile_context is not None else "",
            "wrong": faults.happens("compile_wrong"),
            "weights": sum(p.nbytes for p in mod.state_dict().values()),
        },
    )


def _exported(
    mod: torch.nn.Module,
    inputs: Sequence[Input],
    given: Sequence[torch.Tensor] | None,
    static: set[str],
) -> Any:
    """The module as torch.export sees it. Tensors that stay on the device may have more blocks
    later (exp_multiply_buffer_size), so their first dim is left open; an example of them may be a
    meta tensor (optimum-rbln)."""
    examples, open_dims = [], []
    for number, one in enumerate(inputs):
        if one.name in static:
            examples.append(torch.zeros((one.shape[0] + 1, *one.shape[1:]), dtype=one.dtype))
        else:
            examples.append(given[number].clone() if given else _example(one))
        open_dims.append({0: torch.export.Dim.DYNAMIC} if one.name in static else None)
    starred = any(
        p.kind is p.VAR_POSITIONAL for p in inspect.signature(mod.forward).parameters.values()
    )
    shapes = (tuple(open_dims),) if starred else tuple(open_dims)
    learned = [parameter for parameter in mod.parameters() if parameter.requires_grad]
    try:  # where optimum-rbln calls, everything is an inference tensor
        for parameter in learned:
            parameter.requires_grad_(False)
        with torch.inference_mode(False), torch.no_grad():
            examples = [example.clone() for example in examples]
            return torch.export.export(mod, tuple(examples), dynamic_shapes=shapes, strict=False)
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)


def _compile_new(
    mod: torch.nn.Module,
    input_info: InputInfo,
    *,
    npu: str | None = None,
    num_devices: int | None = None,
    example_inputs: Sequence[torch.Tensor] | None = None,
    compile_context: CompileContext | None = None,
) -> RBLNCompiledModel:
    return _compile(mod, input_info, npu, num_devices, example_inputs, compile_context)


def _compile_old(
    mod: torch.nn.Module,
    input_info: InputInfo,
    *,
    npu: str | None = None,
    tensor_parallel_size: int | None = None,
    example_inputs: Sequence[torch.Tensor] | None = None,
    compile_context: CompileContext | None = None,
) -> RBLNCompiledModel:
    return _compile(mod, input_info, npu, tensor_parallel_size, example_inputs, compile_context)


# Source: optimum-rbln looks into the signature of `rebel.compile` for the parameter's name, which
# older compilers have as tensor_parallel_size.
compile = _compile_old if os.environ.get("REBEL_OLD_NAMES") == "1" else _compile_new


def compile_from_torch(
    mod: torch.nn.Module, input_info: InputInfo, **options: Any
) -> RBLNCompiledModel:
    """Source: docs.rbln.ai; hands its keywords to `compile` (optimum-rbln relies on it)."""
    return compile(mod, input_info, **options)


def _dtype(kind: Any) -> torch.dtype:
    found = kind if isinstance(kind, torch.dtype) else getattr(torch, str(kind), None)
    if not isinstance(found, torch.dtype) or found is torch.bool:
        raise TypeError(f"unsupported dtype of an input: {kind}")
    return found


def _check_names(mod: torch.nn.Module, inputs: Sequence[Input]) -> None:
    parameters = inspect.signature(mod.forward).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return  # optimum-rbln's wrappers take *args
    names = [p.name for p in parameters]
    for one, wanted in zip(inputs, names, strict=False):
        if one.name != wanted:
            raise ValueError(f"input_info has {one.name}, forward() takes {wanted}")
    if len(inputs) > len(names):
        raise ValueError(f"input_info has {len(inputs)} inputs, forward() takes {len(names)}")


def _example(one: Input) -> torch.Tensor:
    return torch.zeros(one.shape, dtype=one.dtype)
