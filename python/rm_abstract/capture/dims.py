"""Dimension expressions: from sympy (as torch.export leaves them) to the text grammar of the IR.

The grammar is integers, symbols, + - *, floordiv(a,b), mod(a,b), min(a,b), max(a,b). Symbols are
renamed s0, s1, ... in order of first use, so that the text does not depend on torch's counters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy  # type: ignore[import-untyped,unused-ignore]
from torch.utils._sympy.functions import FloorDiv

from rm_abstract.capture.errors import capture_error

Dim: TypeAlias = "int | sympy.Expr"

_CALLS = {
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "Mod": "mod",
    "PythonMod": "mod",
    "Min": "min",
    "Max": "max",
}


def as_dim(value: Any) -> Dim:
    """An int, torch.SymInt or sympy expression as a dim; integers stay Python ints."""
    if isinstance(value, int):
        return value
    expr = value if isinstance(value, sympy.Expr) else value.node.expr
    if not expr.is_Integer and not isinstance(value, sympy.Expr) and _has_bounds(expr):
        # max(0, 1-2*s) is 0 for every size s; torch leaves it, and shapes would not agree.
        ranges = value.node.shape_env.bound_sympy(expr)
        if ranges.lower == ranges.upper and getattr(ranges.lower, "is_Integer", False):
            return int(ranges.lower)
    return int(expr) if expr.is_Integer else expr


def _has_bounds(expr: sympy.Expr) -> bool:
    return any(type(part).__name__ in ("Max", "Min") for part in sympy.preorder_traversal(expr))


def same(a: Dim, b: Dim) -> bool:
    """True when the two dims are equal as expressions."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return a == b or sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0


def same_dims(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """True when two shapes are equal as expressions."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def plus(a: Dim, b: Dim) -> Dim:
    """a + b, as an int when both are."""
    return (
        as_dim(a + b) if isinstance(a, int) and isinstance(b, int) else as_dim(sympy.expand(a + b))
    )


def times(a: Dim, b: Dim) -> Dim:
    """a * b, as an int when both are."""
    return (
        as_dim(a * b) if isinstance(a, int) and isinstance(b, int) else as_dim(sympy.expand(a * b))
    )


def floordiv(a: Dim, by: int) -> Dim:
    """a // by, as an int when a is one."""
    return a // by if isinstance(a, int) else as_dim(FloorDiv(a, sympy.Integer(by)))


def product(dims: Iterable[Dim]) -> Dim:
    """The product of all dims, 1 for none."""
    out: Dim = 1
    for d in dims:
        out = times(out, d)
    return out


def broadcast(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """The numpy broadcast of several shapes; a symbol against 1 gives the symbol."""
    rank = max(len(s) for s in shapes)
    out: list[Dim] = []
    for axis in range(rank):
        dim: Dim = 1
        for shape in shapes:
            i = axis - rank + len(shape)
            if i >= 0 and not (isinstance(shape[i], int) and shape[i] == 1):
                if isinstance(dim, int) and dim != 1:
                    break  # a static size settles it; the verifier refuses a contradiction
                dim = shape[i]
        out.append(dim)
    return tuple(out)


class SymbolNames:
    """Gives every sympy symbol its stable name and prints dims in the grammar."""

    def __init__(self) -> None:
        self.names: dict[sympy.Symbol, str] = {}

    def name(self, symbol: sympy.Symbol) -> str:
        """The stable name of one symbol; data-dependent symbols are refused (RM203)."""
        if symbol not in self.names:
            if symbol.name.startswith("u"):
                raise capture_error(
                    "RM203",
                    f"expected shapes that follow from the input shapes, got {symbol.name}, "
                    "a size that depends on tensor values",
                    "running this model eagerly, or moving the data-dependent step out of forward",
                )
            self.names[symbol] = f"s{len(self.names)}"
        return self.names[symbol]

    def text(self, dim: Dim) -> str:
        """One dim in the grammar of the text form."""
        return str(dim) if isinstance(dim, int) else self._expr(dim)

    def _expr(self, e: sympy.Basic) -> str:
        if e.is_Integer:
            return str(int(e))
        if e.is_Symbol:
            return self.name(e)
        if e.is_Add:
            return "+".join(self._factor(a) for a in e.args)
        if e.is_Mul:
            return self._mul(e)
        if e.is_Pow and e.args[1].is_Integer and int(e.args[1]) > 0:
            return "*".join([self._factor(e.args[0])] * int(e.args[1]))
        fn = _CALLS.get(type(e).__name__)
        if fn is None:
            raise capture_error(
                "RM203",
                f"expected a size made of + - * // % min max, got {e}",
                "a model whose sizes are simpler functions of the input sizes",
            )
        text = self._expr(e.args[0])
        for arg in e.args[1:]:
            text = f"{fn}({text},{self._expr(arg)})"
        return text

    def _mul(self, e: sympy.Basic) -> str:
        over = [a for a in e.args if a.is_Rational and not a.is_Integer]
        rest = [a for a in e.args if a not in over]
        if not over:
            return "*".join(self._factor(a) for a in e.args)
        # An exact quotient (torch proved divisibility): p*rest/q.
        top = "*".join([str(int(over[0].p)), *(self._factor(a) for a in rest)])
        return f"floordiv({top},{int(over[0].q)})"

    def _factor(self, e: sympy.Basic) -> str:
        text = self._expr(e)
        return f"({text})" if e.is_Add or text.startswith("-") else text


_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|(.))")


class _Evaluator:
    """Recursive descent over the grammar; foreign text (a cache record), so nothing is `eval`ed."""

    def __init__(self, text: str, bindings: Mapping[str, int]) -> None:
        self.tokens = [m.groups() for m in _TOKEN.finditer(text)]
        self.at = 0
        self.bindings = bindings

    def sum(self) -> int:
        value = self.term()
        while (op := self.peek()) in ("+", "-"):
            self.at += 1
            value = value + self.term() if op == "+" else value - self.term()
        return value

    def term(self) -> int:
        value = self.factor()
        while self.peek() == "*":
            self.at += 1
            value *= self.factor()
        return value

    def factor(self) -> int:
        if self.at >= len(self.tokens):
            raise ValueError("dim expression ends early")
        number, word, mark = self.tokens[self.at]
        self.at += 1
        if number is not None:
            return int(number)
        if mark == "-":
            return -self.factor()
        if mark == "(":
            value = self.sum()
            self.expect(")")
            return value
        if word is None:
            raise ValueError(f"dim expression has {mark!r}")
        if word in ("floordiv", "mod", "min", "max"):
            self.expect("(")
            a = self.sum()
            self.expect(",")
            b = self.sum()
            self.expect(")")
            return {"floordiv": lambda: a // b, "mod": lambda: a % b}.get(
                word, lambda: min(a, b) if word == "min" else max(a, b)
            )()
        return self.bindings[word]

    def peek(self) -> str | None:
        return self.tokens[self.at][2] if self.at < len(self.tokens) else None

    def expect(self, mark: str) -> None:
        if self.peek() != mark:
            raise ValueError(f"dim expression lacks {mark!r}")
        self.at += 1


def evaluate(text: str, bindings: Mapping[str, int]) -> int:
    """The value of a dim in the text grammar; KeyError for an unbound symbol."""
    reader = _Evaluator(text, bindings)
    value = reader.sum()
    if reader.at != len(reader.tokens):
        raise ValueError(f"dim expression {text!r} has a tail")
    return value
