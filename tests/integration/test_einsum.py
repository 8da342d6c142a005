"""torch.einsum becomes permutations, products and sums of the IR, and gives what torch gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_capture_operators import check, floats, ints

EQUATIONS = {
    "matrices": ("ij,jk->ik", ("ab", "ba")),
    "no arrow": ("ij,jk", ("ab", "ba")),
    "no arrow, turned": ("ba", ("ab",)),
    "no arrow, ellipsis": ("...ij,jk", ("aab", "ba")),
    "batch behind": ("ijb,jkb->bik", ("ab2", "b32")),
    "two inner axes": ("abij,cij->acb", ("a532", "b32")),
    "attention of XLNet": ("ibnd,jbnd->bnij", ("a2b3", "b2b3")),
    "ellipsis in the middle": ("i...j,j...k->...ik", ("a32b", "b32a")),
    "ellipsis of other lengths": ("...i,...i->...", ("32ab", "ab")),
    "ellipsis of size 1": ("...ij,...jk->...ik", ("1aab", "3aba")),
    "an axis that repeats": ("bij,bjk->bik", ("1ab", "3b2")),
    "an inner axis that repeats": ("ij,jk->ik", ("a1", "ba")),
    "a sum alone": ("abc->c", ("2ab",)),
    "all summed": ("ij,ij->", ("ab", "ab")),
    "one side summed": ("ij,k->i", ("ab", "3")),
    "three": ("ij,jk,kl->il", ("ab", "ba", "ab")),
    "three of a batch": ("bi,bij,bj->b", ("2a", "2ab", "2b")),
    "a label that comes back": ("i,ij,i->ij", ("a", "ab", "a")),
    "a number": (",ij->ji", ("", "ab")),
}


def _make(shapes: tuple[str, ...]) -> Callable[[int, int], Any]:
    def make(a: int, b: int) -> Any:
        sizes = {"a": a, "b": b}
        return tuple(torch.randn([sizes.get(x) or int(x) for x in shape]) for shape in shapes)

    return make


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", EQUATIONS)
def test_an_equation_is_torchs(name: str) -> None:
    equation, shapes = EQUATIONS[name]
    check(lambda *x: torch.einsum(equation, *x) + 1, _make(shapes), native=True)


def test_products_of_integers_are_torchs() -> None:
    check(lambda x, y: torch.einsum("ij,i->ji", x, y), lambda a, b: (ints(a, b), ints(a)), True)


@pytest.mark.parametrize("equation", ["ii->i", "iij,j->i"])
def test_a_diagonal_is_decomposed_by_torch(equation: str) -> None:
    def square(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wide = x @ x.T
        cube = wide[..., None] * y
        return torch.einsum(equation, *((wide,) if equation == "ii->i" else (cube, y)))

    check(square, lambda a, b: (floats(a, b), floats(3)), native=True)


def _drawn(draw: random.Random) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """Up to four operands of up to four of six labels, whose sizes are 1 to 4; some axes are 1."""
    sizes = {x: draw.randint(1, 4) for x in "abcdef"}
    terms = [
        "".join(draw.sample("abcdef", draw.randint(0 if i else 1, 4)))
        for i in range(draw.randint(1, 4))
    ]
    known = sorted(set("".join(terms)))
    result = "".join(draw.sample(known, draw.randint(0, len(known))))
    shapes = tuple(tuple(1 if draw.random() < 0.1 else sizes[x] for x in t) for t in terms)
    arrow = draw.random() < 0.85
    return ",".join(terms) + ("->" + result if arrow else ""), shapes


def test_drawn_equations_are_torchs(seed: int) -> None:
    draw = random.Random(seed)
    drawn = [_drawn(draw) for _ in range(40)]

    def all_of_them(*tensors: torch.Tensor) -> Any:
        rest, results = list(tensors), []
        for equation, shapes in drawn:
            mine, rest = rest[: len(shapes)], rest[len(shapes) :]
            results.append(torch.einsum(equation, *mine))
        return tuple(results)

    def make(a: int, b: int) -> Any:  # sizes do not depend on a and b
        return tuple(torch.randn(shape) for _, shapes in drawn for shape in shapes)

    check(all_of_them, make, native=True)
