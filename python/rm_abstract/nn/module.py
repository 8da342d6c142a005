"""`Module` and `Parameter`: names and containment. They know no arithmetic and no backend."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rm_abstract.framework import saving
from rm_abstract.framework.tensor import Tensor


class Parameter(Tensor):
    """A tensor that is trained: an optimiser finds it through the module that holds it."""

    __slots__ = ()

    def __init__(self, value: Any, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(value, dtype=dtype, requires_grad=True)


class Module:
    """Holds parameters and other modules as attributes, in the order they were set.

    A subclass defines ``forward``. ``training`` says which of its two behaviours a layer has.
    """

    training = True

    def forward(self, *arguments: Any) -> Any:
        raise NotImplementedError(f"[Module] expected {type(self).__name__} to define forward")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.forward(*arguments, **named)

    def children(self) -> Iterator[tuple[str, Module]]:
        """Modules that are attributes, or elements of lists that are, by name."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, (list, tuple)):
                yield from (
                    (f"{name}.{i}", v) for i, v in enumerate(value) if isinstance(v, Module)
                )

    def modules(self) -> Iterator[Module]:
        """This module and all below it."""
        yield self
        for _, child in self.children():
            yield from child.modules()

    def named_tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Parameters and other tensors that are attributes, by dotted name."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                yield prefix + name, value
        for name, child in self.children():
            yield from child.named_tensors(f"{prefix}{name}.")

    def parameters(self) -> list[Parameter]:
        """Each once, also when two modules share it."""
        found = {id(t): t for _, t in self.named_tensors() if isinstance(t, Parameter)}
        return list(found.values())

    def train(self, training: bool = True) -> Module:
        """Sets ``training`` here and below. Returns itself."""
        for module in self.modules():
            module.training = training
        return self

    def eval(self) -> Module:
        return self.train(False)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Names to torch tensors that share the memory of the module's."""
        return {name: value.torch() for name, value in self.named_tensors()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copies numbers into the module's tensors, all or none. Raises ValueError when names or
        shapes differ."""
        own = dict(self.named_tensors())
        given = saving.matching("load_state_dict", self.state_dict(), state)
        for name, value in given.items():
            own[name].data.copy_(value)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file; it replaces an old one as a whole or not at all."""
        saving.write(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Reads a safetensors file, of ``save`` or another writer. Raises as `load_state_dict`."""
        from safetensors.torch import load_file

        self.load_state_dict(load_file(path))


class Sequential(Module):
    """Modules one behind the other."""

    def __init__(self, *layers: Module) -> None:
        self.layers = list(layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x
