"""A stand-in for Rebellions' `rebel` module, which cannot be installed here: for tests only.

Written from public facts: the documentation of the RBLN SDK 0.12 (docs.rbln.ai: Python API,
supported operations, error codes) and the calls that public clients make (optimum-rbln 0.12).
Every function names its source. What it computes, it computes: a compiled model is the module as
torch.export saw it, and running it runs that program with torch on the CPU.

Settings, read when they are needed:
  REBEL_NPUS        names of the NPUs there are: RBLN-CA22,RBLN-CA25; none without it
  REBEL_FAULT       what goes wrong (faults.py); REBEL_FAULT_ONCE=file: once, then the file is there
  REBEL_NUMERICS    bf16: every result of an operator is rounded to it
  REBEL_OLD_NAMES   1: the compiler takes `tensor_parallel_size`, not `num_devices`
"""

from rebel import custom_ops as custom_ops
from rebel.compile_context import CompileContext
from rebel.compiled_model import RBLNCompiledModel
from rebel.compiler import compile, compile_from_torch
from rebel.core.exception import RBLNCompileError, RBLNRuntimeError
from rebel.devices import device_count, get_npu_name, manual_seed, npu_is_available
from rebel.runtime import Runtime

__version__ = "0.12.0"
__all__ = [
    "CompileContext",
    "RBLNCompileError",
    "RBLNCompiledModel",
    "RBLNRuntimeError",
    "Runtime",
    "compile",
    "compile_from_torch",
    "device_count",
    "get_npu_name",
    "manual_seed",
    "npu_is_available",
]
