"""The weights of a module by the names that a capture gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import CompileError
from rm_abstract.engines.variant import Record
from rm_abstract.guards import writes
from rm_abstract.verification.quantised import QuantisedWeight


class ModuleWeights:
    """Looked up at every use: a script may replace any of them."""

    def __init__(self, module: Callable[[], torch.nn.Module]) -> None:
        self._module = module

    def of(self, record: Record) -> dict[str, torch.Tensor]:
        """What a program of this capture reads. Raises CompileError when a weight is gone."""
        weights = dict(record.constants)
        for name in record.weights:
            owner, key = self.owner(name)
            weights[name] = owner[key].detach()
        return weights

    def beside(self, record: Record) -> list[torch.Tensor]:
        """The buffers and plain tensors of the modules that own what a program of this capture
        reads. PyTorch moves running means without counting a write to them."""
        module = self._module()
        owners = {name.rpartition(".")[0] for name in record.weights}
        parts = [module.get_submodule(owner) for owner in sorted(owners)]
        groups = [group for part in parts for group in (part._buffers, vars(part))]
        return [v for group in groups for v in group.values() if isinstance(v, torch.Tensor)]

    def has(self, record: Record) -> bool:
        try:
            self.of(record)
        except CompileError:
            return False
        return True

    def owner(self, name: str) -> tuple[dict[str, Any], str]:
        """The dictionary that holds a weight and its key there. Raises CompileError when gone."""
        path, _, key = name.rpartition(".")
        owner: Any = self._module()
        for part in path.split(".") if path else ():
            owner = owner._modules.get(part)
            if owner is None:
                break
        for group in ("_parameters", "_buffers", "__dict__"):
            held = getattr(owner, group, None)
            if held is not None and isinstance(held.get(key), torch.Tensor):
                return held, key
        raise CompileError(
            f"[weights] expected {name} in {type(self._module()).__name__}, got nothing; "
            "try clearing the compile cache",
            code="RM201",
        )


class WeightsChanged(Decline):
    """Weights changed while a program was compared with the original, so the comparison says
    nothing about the program."""

    def __init__(self) -> None:
        super().__init__("RM107", "the weights changed while the program was compared")


class WeightVersions:
    """The addresses of tensors and how often each was written. Two of these are equal when no
    tensor was replaced or written in between.

    Keeps the memory of the tensors: the address of freed memory may be given to the next tensor.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._held = [weight.detach() for weight in weights]
        self._versions = (
            writes.registry().clock,
            tuple([(t.data_ptr(), None if t.is_inference() else t._version) for t in self._held]),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightVersions) and self._versions == other._versions


def kinds_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """What forward can know of the module's tensors without their elements: whatever it asks of one
    that no program reads is one of these."""
    return tuple(
        (id(part), name, value.shape, value.stride(), value.dtype, value.device)
        for part in module.modules()
        for group in (part._parameters, part._buffers, vars(part))
        for name, value in group.items()
        if isinstance(value, torch.Tensor)
    )


def ties_of(module: torch.nn.Module) -> frozenset[tuple[str, ...]]:
    """Names of weights that are one tensor: a program reads it by one of them."""
    names: dict[int, list[str]] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    for name, tensor in module.named_buffers(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return frozenset(tuple(group) for group in names.values() if len(group) > 1)


def sizes(forms: list[QuantisedWeight], weights: dict[str, torch.Tensor]) -> dict[str, int]:
    """How many weights are quantised, and the bytes of all before and after; empty when none is."""
    if not forms:
        return {}
    before = sum(weights[f.name].numel() * weights[f.name].element_size() for f in forms)
    after = sum(f.bytes_of(weights[f.name].shape, weights[f.name].element_size()) for f in forms)
    return {"weights": len(forms), "bytes": after, "bytes_before": before}
