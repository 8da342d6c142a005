"""FuriosaAI's compiler for one program: torch.export, import, lowering, an RNGD binary.

Ahead of time only: torch.compile on CPU tensors ends the process. No device is needed. The
compiler's own cache keeps failures, so each compile has a cache of its own that goes with it; what
succeeded is in ours.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rm_abstract.plugin import Failure
from rm_abstract.vendors.furiosa import messages
from rm_abstract.vendors.furiosa.artefact import Artefact
from rm_abstract.vendors.furiosa.attention import mask_inputs, spelled_out
from rm_abstract.worker.ir_to_torch import IrModule, ir_to_torch

Progress = Callable[[float, str], None]


def module_of(text: str, weights: Mapping[str, torch.Tensor]) -> IrModule:
    """The program's torch module in operators that the compiler takes. Raises Failure RM304."""
    return ir_to_torch(text, weights, {"sdpa": spelled_out}).eval()


def exported(module: IrModule) -> Any:
    """The program as torch.export sees it, with example inputs of its own shapes; attention masks
    are sums (attention.py)."""
    sums = mask_inputs(module.program)
    examples = tuple(
        torch.zeros(kind.shape) if i in sums else _example(kind.shape, kind.dtype)
        for i, kind in enumerate(module.program.input_types)
    )
    return torch.export.export(module, examples, strict=False)


def _example(shape: Sequence[int], dtype: str) -> torch.Tensor:
    from rm_abstract.worker.dtypes import DTYPES

    if not DTYPES[dtype].is_floating_point:
        raise Failure(f"[furiosa compile] expected floating-point inputs, got {dtype}", "RM304")
    return torch.zeros(shape, dtype=DTYPES[dtype])


def imported(module: IrModule) -> Any:
    """The program as the compiler has read it, as a module that runs on the CPU in float32. Raises
    Failure."""
    from furiosa.torch import DfgModule

    return _quietly(lambda: DfgModule.from_exported(exported(module)))


def lowered(module: IrModule) -> Any:
    """The program after the compiler's lowering, as a module that runs on the CPU. Its numbers are
    those of the device's element types, not of the device: operands of products are rounded to
    bfloat16. Raises Failure."""
    from furiosa.torch import LowerModule

    return _quietly(lambda: LowerModule.from_exported(exported(module)))


def compile_program(text: str, weights: Mapping[str, torch.Tensor], progress: Progress) -> Artefact:
    """An RNGD binary, for the weights' shapes. Raises Failure: RM304 for what the compiler cannot
    do, RM401 for what it needs and has not, RM301 for the rest."""
    from furiosa.torch import CompileModule

    if shutil.which(messages.CROSS_COMPILER) is None:
        raise messages.missing_cross_compiler()
    progress(0.0, "exporting")
    module = module_of(text, weights)
    program = exported(module)
    progress(0.1, "compiling with furiosa-torch")
    compiled = _quietly(lambda: CompileModule.from_exported(program))
    examples, _ = program.example_inputs
    inputs = _order_of(module, examples, compiled.module_weight.flatten_inputs(examples, {}))
    runnable = compiled.runnable._inner  # the module around it has no bytes without the weights
    _check_interface(module, inputs, runnable)
    progress(1.0, "compiled")
    return Artefact(text, inputs, runnable.serialize())


def _order_of(
    module: IrModule, examples: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> list[str]:
    """Which buffer of the module, or input of a call (""), each input of the binary is."""
    buffers = {tensor.data_ptr(): name for name, tensor in module.named_buffers()}
    calls = [tensor.data_ptr() for tensor in examples]
    order = []
    for tensor in given:
        name = buffers.get(tensor.data_ptr(), "")
        if not name and (not calls or calls.pop(0) != tensor.data_ptr()):
            raise Failure(
                "[furiosa compile] expected a binary of the program's weights and inputs in order, "
                f"got an input of its own, {tuple(tensor.shape)}",
                "RM304",
            )
        order.append(name)
    if calls:
        raise Failure(
            f"[furiosa compile] expected {len(examples)} inputs, got {len(calls)} not used",
            "RM304",
        )
    return order


def _quietly(body: Callable[[], Any]) -> Any:
    """The result of a call of the compiler, in a cache that nobody sees."""
    from furiosa.torch import config
    from furiosa.torch.error import UnsupportedOpError

    with tempfile.TemporaryDirectory(prefix="furiosa-") as folder, config.cache_context(folder):
        try:
            return body()
        except UnsupportedOpError as error:
            raise messages.of_compiling(str(error)) from error


def _check_interface(module: IrModule, inputs: Sequence[str], runnable: Any) -> None:
    """The compiler may drop and merge inputs and outputs; then they could not be told apart."""
    types = iter(module.program.input_types)
    wanted = [tuple(getattr(module, n).shape) if n else next(types).shape for n in inputs]
    given = [tuple(shape.host_sizes) for shape in runnable.input_dram_shapes]
    results = [kind.shape for kind in module.program.output_types]
    made = [tuple(shape.host_sizes) for shape in runnable.output_dram_shapes]
    if given != wanted or made != results:
        raise Failure(
            f"[furiosa compile] expected a binary from {wanted} to {results}, got one from {given} "
            f"to {made}",
            "RM304",
        )
