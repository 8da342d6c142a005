"""transformers' ModelOutput as an argument (encoder_outputs): its tensors, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rm_abstract.base.decline import Decline


def is_bundle(value: Any) -> bool:
    """True for an instance of any ModelOutput class of transformers."""
    return is_bundle_type(type(value))


def is_bundle_type(kind: type) -> bool:
    return any(k.__name__ == "ModelOutput" and "transformers" in k.__module__ for k in kind.__mro__)


def read(bundle: Any) -> list[torch.Tensor] | Decline:
    """The tensors in field order; a field of another kind is a Decline."""
    values = list(bundle.values())
    if all(isinstance(v, torch.Tensor) for v in values):
        return values
    return Decline("RM104", f"a {type(bundle).__name__} that holds more than tensors")


def rebuilt(bundle: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The same class and fields around other tensors."""
    return type(bundle)(**dict(zip(bundle.keys(), tensors, strict=True)))


def size_pattern(bundle: Any, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What a capture of this argument is specialised on."""
    sizes = tuple(tuple([d if d < 2 else 2 for d in t.shape]) for t in tensors)
    return (type(bundle).__name__, tuple(bundle.keys()), sizes)
