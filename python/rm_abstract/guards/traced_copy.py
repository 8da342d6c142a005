"""Modules for torch's tracers, which must not meet the user's own.

torch.export puts stand-ins into the module that it traces; another thread that runs the model
meanwhile must not meet them. It and dynamo also remember the tensors that they saw by weak
references, until the next capture or collection of garbage, and torch.utils.swap_tensors refuses
a tensor that has any.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from rm_abstract.guards import sources


def copied(module: torch.nn.Module, same_tensors: bool = False) -> torch.nn.Module:
    """A copy of the module's structure around the memory of its weights, or around the very
    tensors.

    What cannot be copied, such as a lock, is shared.
    """
    held = (*module.parameters(), *module.buffers())
    memo: dict[int, Any] = {id(t): t if same_tensors else alias(t) for t in held}
    # Parameters that nobody registered are copied, but not by `data`, as deepcopy does it: reading
    # that counts as a write (guards/writes.py).
    for tensor, _ in () if same_tensors else sources.of_module(module).tensors:
        if type(tensor) is torch.nn.Parameter and id(tensor) not in memo:
            memo[id(tensor)] = torch.nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:  # whatever a module's own parts raise when copied
        return _copied_by_part(module, memo)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another object with the tensor's memory; classes of a library's own stay as they are."""
    made: torch.Tensor
    if type(tensor) is torch.nn.Parameter:
        made = torch.nn.Parameter(tensor.detach(), tensor.requires_grad)
    elif type(tensor) is torch.Tensor:
        made = tensor.detach()
    else:
        return tensor
    vars(made).update(vars(tensor))  # what forward may have been given there
    return made


def _copied_by_part(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    parts = list(module.modules())
    for part in parts:
        memo[id(part)] = object.__new__(type(part))
    for part in parts:
        inside = vars(memo[id(part)])
        for name, value in vars(part).items():
            try:
                inside[name] = copy.deepcopy(value, memo)
            except Exception:  # as above, of one attribute
                inside[name] = value
    return memo[id(module)]  # type: ignore[no-any-return]
