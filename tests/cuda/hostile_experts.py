"""Random problems of what mixtures of experts need: lines in order, products of rows in groups."""

from __future__ import annotations

import numpy as np
import torch
from hostile import Maker, Problem, Result
from hostile_plans import matrix, product_scale
from plugged import Plugged
from problems import DTYPES, tolerance

_SORTED = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64,
           torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)  # fmt: skip
_SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3e38)


def hostile_values(make: Maker, shape: tuple[int, ...], t: torch.dtype) -> torch.Tensor:
    """Few different values, so that many are equal; all kinds of floats; or any values at all."""
    kind = make.one_of("any", "few", "special")
    if t == torch.bool or kind == "few":
        drawn = make.rng.integers(0, 2 if t == torch.bool else 5, shape)
        return torch.from_numpy(np.asarray(drawn)).cuda().to(t)
    if not t.is_floating_point:
        info = torch.iinfo(t)
        drawn = make.rng.integers(info.min, info.max, shape, dtype=np.int64, endpoint=True)
        if kind == "special":
            drawn = make.rng.choice(np.array([info.min, info.max, 0, 1, 2]), shape)
        return torch.from_numpy(np.asarray(drawn)).cuda().to(t)
    if kind == "any":
        return make.random(shape).to(t)
    return torch.from_numpy(make.rng.choice(np.array(_SPECIAL), shape)).cuda().to(t)


def sort(make: Maker, m: Plugged) -> Problem:
    """Stable, NaN above every number, both zeros equal: torch's own order of the host."""
    rank, t = make.one_of(1, 2, 2, 3), make.one_of(*_SORTED)
    axis = int(make.rng.integers(0, rank))
    longest = make.one_of(40, 300, 5000, 20_000)
    shape = [make.size(longest if d == axis else (300, 20, 6)[rank - 1]) for d in range(rank)]
    descending, n = make.maybe(), shape[axis]
    k = make.one_of(n, -1, min(n, 8), make.size(n))
    kept = tuple((n if k < 0 else k) if d == axis else size for d, size in enumerate(shape))

    def where() -> dict[str, tuple[int, ...]]:
        if rank < 2 or make.maybe(0.6):
            return {}
        return {"order": tuple(int(d) for d in make.rng.permutation(rank))}

    value = hostile_values(make, tuple(shape), t)
    x = make.operand("x", tuple(shape), t, value=value, **where())
    values = make.result("values", kept, t, **where())
    indices = make.result("indices", kept, torch.int64, **where())
    ordered, places = torch.sort(x.cpu(), dim=axis, descending=descending, stable=True)
    ordered, places = (r.narrow(axis, 0, kept[axis]).cuda() for r in (ordered, places))
    return m.problem(
        make, f"{shape} {t} axis {axis} descending {descending} k {k}", [x], [values, indices],
        {"axis": axis, "descending": int(descending), "k": k},
        lambda: [Result("indices", indices, places, 0.0), Result("values", values, ordered, 0.0)],
    )  # fmt: skip


def grouped_gemm(make: Maker, m: Plugged) -> Problem:
    """Groups without rows, one with all, rows behind the last; matrices that lie either way."""
    kind = make.dtype()
    t, rows, groups = DTYPES[kind], make.size(700), make.size(make.one_of(4, 40, 300))
    depth, columns = make.size(700), make.size(400)
    groups = max(1, min(groups, (4 << 20) // (depth * columns)))
    ends = np.sort(make.rng.integers(0, rows + 1, groups))
    if make.maybe(0.7):
        ends[-1] = rows
    if make.maybe(0.2):
        ends[:] = ends[-1]
    x = matrix(make, "x", (rows, depth), t)
    order = make.one_of((0, 1, 2), (0, 2, 1), (0, 2, 1))
    w = make.operand("w", (groups, depth, columns), t, scale=depth**-0.5, order=order)
    offsets = make.operand("offsets", (groups,), make.one_of(torch.int32, torch.int64), dense=True,
                           value=torch.from_numpy(ends).cuda())  # fmt: skip
    y = make.result("y", (rows, columns), t)
    wanted = torch.zeros(rows, columns, dtype=torch.float64, device="cuda")
    begin, scale = 0, 1.0
    for group, end in enumerate(int(n) for n in ends):
        if end > begin:
            a, b = x[begin:end].double(), w[group].double()
            wanted[begin:end] = a @ b
            scale = max(scale, product_scale(a, b))
        begin = end
    return m.problem(
        make, f"{rows} x {depth} x {columns} {kind} in {groups} groups {order}",
        [x, w, offsets], [y], {},
        lambda: [Result("y", y, wanted, tolerance(kind, depth, 3), scale)], constant=[1],
    )  # fmt: skip
