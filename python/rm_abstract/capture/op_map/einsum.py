"""torch.einsum as permutations, products and sums, by the grammar of torch's documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rm_abstract.capture.dims import product
from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call
from rm_abstract.capture.op_map.nn import matmul

_ELLIPSIS = 0x10000  # labels of the axes of an ellipsis, counted from the last, begin here


@dataclass
class _Term:
    """A value and a label for each of its axes."""

    value: Value
    labels: str

    def axes(self, labels: str) -> list[int]:
        return [self.labels.index(x) for x in labels]


def _ellipsis(count: int) -> str:
    return "".join(chr(_ELLIPSIS + i) for i in reversed(range(count)))


def _parse(equation: str, tensors: Sequence[Value]) -> tuple[list[_Term], str] | None:
    """The operands with labels, and the result's. None where a term has one twice: a diagonal."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    names = left.split(",")
    if len(names) != len(tensors):
        return None
    longest, terms = 0, []
    for name, tensor in zip(names, tensors, strict=True):
        free = tensor.rank - len(name.replace("...", ""))
        longest = max(longest, free if "..." in name else 0)
        labels = name.replace("...", _ellipsis(free))
        if len(labels) != tensor.rank or len(set(labels)) != len(labels):
            return None
        terms.append(_Term(tensor, labels))
    if not arrow:
        counts = Counter("".join(names).replace(".", ""))
        result = "..." + "".join(sorted(x for x, n in counts.items() if n == 1))
    result = result.replace("...", _ellipsis(longest))
    known = set("".join(t.labels for t in terms))
    if len(set(result)) != len(result) or not set(result) <= known:
        return None
    return terms, result


def _without_repeats(c: Call, terms: list[_Term]) -> list[_Term]:
    """An axis of size 1 is repeated where the label has another size: the term goes without it."""
    wide = {x for t in terms for x, size in zip(t.labels, t.value.dims, strict=True) if size != 1}
    kept = []
    for t in terms:
        labels = [x for x, n in zip(t.labels, t.value.dims, strict=True) if n != 1 or x not in wide]
        dims = [t.value.dims[i] for i in t.axes("".join(labels))]
        kept.append(_Term(c.b.reshape(t.value, dims), "".join(labels)))
    return kept


def _summed(c: Call, t: _Term, wanted: Collection[str]) -> _Term:
    """The term's sum over all labels that nobody wants."""
    gone = [i for i, x in enumerate(t.labels) if x not in wanted]
    if not gone:
        return t
    value = c.b.reduce("sum", t.value, gone, False, t.value.dtype)
    return _Term(value, "".join(x for x in t.labels if x in wanted))


def _product(c: Call, a: _Term, b: _Term) -> _Term:
    """The product of two terms over all their labels."""
    labels = a.labels + "".join(x for x in b.labels if x not in a.labels)
    factors = []
    for t in (a, b):
        ordered = "".join(x for x in labels if x in t.labels)
        value = c.b.permute(t.value, t.axes(ordered))
        sizes = iter(value.dims)
        factors.append(c.b.reshape(value, [next(sizes) if x in ordered else 1 for x in labels]))
    return _Term(c.b.binary("mul", factors[0], factors[1]), labels)


def _contracted(c: Call, a: _Term, b: _Term, wanted: Collection[str]) -> _Term:
    """The product of two terms, summed over the labels that only they have."""
    a = _summed(c, a, {*wanted, *b.labels})
    b = _summed(c, b, {*wanted, *a.labels})
    shared = [x for x in a.labels if x in b.labels]
    batch = "".join(x for x in shared if x in wanted)
    inner = "".join(x for x in shared if x not in wanted)
    if not inner:
        return _product(c, a, b)
    rows = "".join(x for x in a.labels if x not in shared)
    columns = "".join(x for x in b.labels if x not in shared)

    def sizes(t: _Term, labels: str) -> list:  # type: ignore[type-arg]
        return [t.value.dims[i] for i in t.axes(labels)]

    leading, m, k, n = sizes(a, batch), sizes(a, rows), sizes(a, inner), sizes(b, columns)
    left = c.b.permute(a.value, a.axes(batch + rows + inner))
    right = c.b.permute(b.value, b.axes(batch + inner + columns))
    left = c.b.reshape(left, [*leading, product(m), product(k)])
    right = c.b.reshape(right, [*leading, product(k), product(n)])
    y = matmul(c, left, right, [*leading, product(m), product(n)])
    return _Term(c.b.reshape(y, [*leading, *m, *n]), batch + rows + columns)


def einsum(c: Call) -> Value | None:
    """Operands are joined from the left. None: diagonals, a path that is given, integers summed."""
    tensors = c["tensors"]
    if c["path"] is not None or not tensors or any(t.dtype != c.dtype for t in tensors):
        return None
    parsed = _parse(str(c["equation"]), tensors)
    if parsed is None:
        return None
    terms, result = parsed
    if not tensors[0].is_float and set(result) != set("".join(t.labels for t in terms)):
        return None
    terms = _without_repeats(c, terms)
    out = terms[0]
    for i, t in enumerate(terms[1:], 1):
        later = "".join(u.labels for u in terms[i + 1 :])
        out = _contracted(c, out, t, set(result + later))
    out = _summed(c, out, set(result))
    present = "".join(x for x in result if x in out.labels)
    value = c.b.permute(out.value, out.axes(present))
    return c.finish(c.b.reshape(value, c.dims))


TABLE = {"einsum.default": einsum}
