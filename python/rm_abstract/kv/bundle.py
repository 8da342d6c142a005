"""transformers' ModelOutput as an argument (encoder_outputs): its tensors, and the way back.

A field is a tensor, None, or a list or tuple of fields (hidden_states).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rm_abstract.base.decline import Decline


def is_bundle(value: Any) -> bool:
    """True for an instance of any ModelOutput class of transformers."""
    return is_bundle_type(type(value))


def is_bundle_type(kind: type) -> bool:
    return any(k.__name__ == "ModelOutput" and "transformers" in k.__module__ for k in kind.__mro__)


def leaves(bundle: Any) -> list[Any]:
    """What the fields hold, in order, without None."""
    return [leaf for value in bundle.values() for leaf in _below(value)]


def _below(value: Any) -> Iterator[Any]:
    if type(value) in (list, tuple):
        for item in value:
            yield from _below(item)
    elif value is not None:
        yield value


def read(bundle: Any) -> list[torch.Tensor] | Decline:
    """The tensors in field order; a field of another kind is a Decline."""
    found = leaves(bundle)
    if all(isinstance(leaf, torch.Tensor) for leaf in found):
        return found
    return Decline("RM104", f"a {type(bundle).__name__} that holds more than tensors")


def rebuilt(bundle: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The same class and fields around other tensors, in the same order: a field may have been set
    after others that stand behind it."""
    take = iter(tensors)
    made = type(bundle)(**{name: _around(value, take) for name, value in bundle.items()})
    for name in bundle:
        made.move_to_end(name)
    return made


def _around(value: Any, take: Iterator[torch.Tensor]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_around(item, take) for item in value)
    return None if value is None else next(take)


def size_pattern(bundle: Any, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What a capture of this argument is specialised on."""
    sizes = tuple(tuple([d if d < 2 else 2 for d in t.shape]) for t in tensors)
    shape = tuple(_nesting(value) for value in bundle.values())
    return (type(bundle).__name__, tuple(bundle.keys()), shape, sizes)


def _nesting(value: Any) -> Any:
    if type(value) in (list, tuple):
        return (type(value).__name__, *map(_nesting, value))
    return value is None
