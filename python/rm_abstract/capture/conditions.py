"""When a capture serves a call: its input dims and guards as one compiled function.

The conditions may come from a cache record, so the text is read token by token and only names and
marks of the dim grammar reach `compile`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

Sizes: TypeAlias = "Sequence[Sequence[int]]"
_TOKEN = re.compile(r"s\d+|floordiv|mod|min|max|\d+|==|!=|<=|>=|[-+*(),<>]")
_NAMES = {
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "min": min,
    "max": max,
    "__builtins__": {},
}


def _checked(text: str) -> str:
    if "".join(_TOKEN.findall(text)) != text:
        raise ValueError(f"[conditions] expected a relation of dims, got {text!r}")
    return text


def serves(
    input_dims: Sequence[Sequence[str]], conditions: Sequence[str], skip: Sequence[bool]
) -> Callable[[Sizes], bool]:
    """A function (shapes) -> bool. Inputs with `skip` are not looked at (the core checks them)."""
    bound: dict[str, str] = {}
    tests: list[str] = []
    for i, dims in enumerate(input_dims):
        for j, dim in enumerate(dims):
            if skip[i]:
                continue
            if re.fullmatch(r"s\d+", dim) and dim not in bound:
                bound[dim] = f"n[{i}][{j}]"
            else:
                tests.append(f"n[{i}][{j}]=={_checked(dim)}")
    tests += [_checked(c) for c in conditions]
    usable = [t for t in tests if set(re.findall(r"s\d+", t)) <= set(bound)]
    lines = ["def serves(n):"]
    lines += [f"    {name} = {source}" for name, source in bound.items()]
    lines.append("    return " + (" and ".join(f"({t})" for t in usable) or "True"))
    space: dict[str, Callable[[Sizes], bool]] = {}
    exec(compile("\n".join(lines), "<conditions>", "exec"), dict(_NAMES), space)
    return space["serves"]
