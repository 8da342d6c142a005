"""A call as text: what its record is found by, and one line of a report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rm_abstract.calls.call import CallSpec, FlatCall, leaf_count
from rm_abstract.calls.tensors import held_tensors
from rm_abstract.engines.call_parts import Pattern
from rm_abstract.guards import torch_state


def containers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Arguments that forward could change in place beside tensors and caches."""
    named = [*((f"{i + 1}", value) for i, value in enumerate(args)), *kwargs.items()]
    return [(name, value) for name, value in named if type(value) in (list, dict, tuple)]


def call_key(call: FlatCall, pattern: Pattern) -> str:
    """What a front record is found by, besides the module."""
    return json.dumps([call.spec.json(), repr(pattern)], separators=(",", ":"))


def argument_names(spec: CallSpec, leaves: Sequence[Any], numbers: Sequence[int]) -> list[str]:
    """The arguments that inputs of a program, by their numbers, are or lie in."""
    names: list[str] = []
    taken = iter(leaves)
    for name, part in zip(spec.names, spec.specs, strict=True):
        for _ in range(leaf_count(part)):
            leaf = next(taken)
            names += [name] * (1 if isinstance(leaf, torch.Tensor) else len(held_tensors(leaf)))
    return list(dict.fromkeys(names[number] for number in numbers))


def readable(call: FlatCall, state: Mapping[str, Any]) -> str:
    """The call in one line: input_ids[2,7], cache(24 layers), use_cache=True.

    Of inputs whose values a record's ``state`` holds, with these: image_sizes=[[30, 60]].
    """
    leaves = iter(call.leaves)
    told: dict[str, Any] = {}
    for question, answer in state.items():
        number = torch_state.valued(question)
        if number is not None:
            told[argument_names(call.spec, call.leaves, [number])[0]] = answer
    parts = []
    for name, spec in zip(call.spec.names, call.spec.specs, strict=True):
        mine = [next(leaves) for _ in range(leaf_count(spec))]
        if spec[0] == "tensor" and name in told:
            parts.append(f"{name}={told[name]}")
        elif spec[0] == "tensor":
            parts.append(f"{name}[{','.join(map(str, mine[0].shape))}]")
        elif spec[0] == "const":
            parts.append(f"{name}={spec[2]!r}")
        elif spec[0] == "float":
            parts.append(f"{name}={float.fromhex(spec[1])}")
        elif spec[0] == "fixed":
            parts.append(f"{name}={spec[1]}")
        elif spec[0] == "cache":
            layers = getattr(mine[0], "layers", None)
            parts.append(f"{name}({len(layers)} layers)" if layers else name)
        elif spec[0] != "none":
            parts.append(name)
    return ", ".join(parts)
