"""`rebel.core.torch_compile`: the backend "rbln" of torch.compile.

Source: vllm-rbln 0.12 (compilation/backends.py imports `rbln_backend` and calls it with the graph,
its inputs and options; compiler.py has their names). Importing the module registers the name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo import register_backend

from rebel import faults
from rebel.core.exception import RBLNCompileError

# Of compiler.py of vllm-rbln 0.12: what `compile` passes on.
_OPTIONS = {
    "cache_dir", "compile_context", "dtype", "global_device_id", "guard_filter_fn", "mode",
    "model_trace_method", "num_devices", "process_group_dict", "use_global_ctx",
    "use_static_output", "_runtime_holder",
}  # fmt: skip


def rbln_backend(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], **given: Any
) -> Callable[..., Any]:
    """What runs the graph: torch on the CPU."""
    options = given.get("options") or {}
    if unknown := set(options) - _OPTIONS:
        raise TypeError(f"rbln_backend() got unexpected options {sorted(unknown)}")
    if faults.happens("compile_error"):
        raise RBLNCompileError("Graph Generation: [a graph of torch.compile]")
    return graph.forward


register_backend(name="rbln", compiler_fn=rbln_backend)
