"""Random problems of the operators that walk over rows or elements."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from hostile import Maker, Problem, Result
from problems import DTYPES, EPSILON, tolerance
from programs import OPCODES, chains, run

F = torch.nn.functional


def names(table: list[tuple[str, str]]) -> list[str]:
    return [name for name, _ in table]


def lead(make: Maker, rows: int) -> tuple[int, ...]:
    """Rows as one axis or as several."""
    for n in (2, 3, 5, 7):
        if rows % n == 0 and make.maybe(0.3):
            return (rows // n, n)
    return (rows,)


def row_shape(make: Maker, longest: int) -> tuple[int, ...]:
    n = make.size(longest)
    if make.maybe():
        n = max(8, n // 8 * 8)
    return (*lead(make, make.size(max(1, min(2000, 1_000_000 // n)))), n)


def softmax(make: Maker, m: ModuleType) -> Problem:
    kind, log, backward = make.dtype(), make.maybe(), make.maybe()
    t, shape = DTYPES[kind], row_shape(make, 60_000)
    bound = tolerance(kind, shape[-1]) + 40 * 2.0**-23
    if not backward:
        x = make.operand("x", shape, t, scale=3)
        before = x.double()
        inside = make.maybe(0.3)
        y = make.in_place(x) if inside else make.result("y", shape, t)
        function = torch.log_softmax if log else torch.softmax
        return Problem(
            f"softmax {shape} {kind} log {log} in place {inside}",
            lambda **how: m.forward(x, y=y, log=log, **how),
            names(m.kernels()),
            lambda: [Result("y", y, function(before, -1), bound, 1.0 if log else 2.0**-14)],
            make.tensors,
            not inside,
        )
    value = torch.softmax(make.random(shape, 2), -1)
    y = make.operand("y", shape, t, value=value.log() if log else value)
    dy = make.operand("dy", shape, t)
    inside = make.one_of("", "", "y", "dy")
    yd, d = y.double(), dy.double()
    dx = make.in_place({"y": y, "dy": dy}[inside]) if inside else make.result("dx", shape, t)
    wanted = d - yd.exp() * d.sum(-1, True) if log else yd * (d - (d * yd).sum(-1, True))
    scale = 1 + (float(d.abs().sum(-1).max() * yd.exp().max()) if log else 0)
    return Problem(
        f"softmax backward {shape} {kind} log {log} in place of {inside or 'nothing'}",
        lambda **how: m.backward(dy, y, dx=dx, log=log, **how),
        names(m.backward_kernels()),
        lambda: [Result("dx", dx, wanted, bound, scale)],
        make.tensors,
        not inside,
    )


def norm_of(name: str, h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    if name == "layernorm":
        return F.layer_norm(h, h.shape[-1:], w, b, 1e-5)
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * w


def norm(make: Maker, m: ModuleType, name: str) -> Problem:
    kind, layer = make.dtype(), name == "layernorm"
    t, shape = DTYPES[kind], row_shape(make, 20_000)
    n = shape[-1]
    w = make.operand("w", (n,), t, dense=True)
    if make.maybe():
        return norm_backward(make, m, name, kind, shape, w)
    x = make.operand("x", shape, t, scale=2)
    b = make.operand("b", (n,), t, dense=True) if layer and make.maybe() else None
    r = make.operand("r", shape, t) if make.maybe() else None
    total = x.double() + (0 if r is None else r.double())
    inside = make.one_of("", "", "x", "r") if r is not None else make.one_of("", "", "x")
    y = make.in_place(x) if inside == "x" else make.result("y", shape, t)
    h = None
    if make.maybe():
        h = make.in_place(r) if inside == "r" and r is not None else make.result("sum", shape, t)
    wanted = norm_of(name, total, w.double(), None if b is None else b.double())
    deviation = (total.var(-1, unbiased=False) + 1e-5).sqrt()
    centre = float((total.mean(-1).abs() / deviation).max())
    bound = tolerance(kind, n) * (1 if n >= 64 else 8) + centre * 2.0**-21

    def results() -> list[Result]:
        out = [Result("y", y, wanted, bound, 4.0)]
        return out + ([] if h is None else [Result("sum", h, total, EPSILON[kind], 1e-6)])

    return Problem(
        f"{name} {shape} {kind} in place of {inside or 'nothing'}",
        lambda **how: m.forward(x, w, b, r, y=y, sum=h, **how) if layer else m.forward(
            x, w, None, r, y=y, sum=h, **how),
        names(m.kernels()), results, make.tensors, inside == "",
    )  # fmt: skip


def norm_backward(
    make: Maker, m: ModuleType, name: str, kind: str, shape: tuple[int, ...], w: torch.Tensor
) -> Problem:
    t, n, layer = DTYPES[kind], shape[-1], name == "layernorm"
    h, dy = make.operand("h", shape, t), make.operand("dy", shape, t)
    dsum = make.operand("dsum", shape, t) if make.maybe() else None
    inside = dsum is not None and make.maybe(0.3)
    extra = 0 if dsum is None else dsum.double()
    dx = make.in_place(dsum) if inside and dsum is not None else make.result("dx", shape, t)
    wants = make.maybe(0.7)
    dw = make.result("dw", (n,), t, dense=True) if wants else None
    db = make.result("db", (n,), t, dense=True) if wants and layer else None
    space = make.workspace(m.backward_workspace(h, wants))
    leaves = [v.double().requires_grad_() for v in (h, w)]
    zero = torch.zeros(n, device="cuda", dtype=torch.float64, requires_grad=True)
    y = norm_of(name, leaves[0], leaves[1], zero) if layer else norm_of(name, *leaves, None)
    grads = torch.autograd.grad(y, [*leaves, zero] if layer else leaves, dy.double())
    deviation = float((h.double().var(-1, unbiased=False) + 1e-5).sqrt().min())
    if not layer:
        deviation = float((h.double().square().mean(-1) + 1e-5).sqrt().min())
    rows = h.numel() // n
    low = min(1.0, deviation)

    def results() -> list[Result]:
        out = [Result("dx", dx, grads[0] + extra, 4 * tolerance(kind, n) / low, 8.0 / low)]
        for name_, got, wanted in (("dw", dw, grads[1]), ("db", db, grads[-1])):
            if got is not None:
                bound = tolerance(kind, rows) + 2.0**-18 / low
                out.append(Result(name_, got, wanted, bound, 4.0 * rows**0.5))
        return out

    return Problem(
        f"{name} backward {shape} {kind} dx in place {inside}, weights {wants}",
        lambda **how: m.backward(dy, h, w, dsum, dx=dx, dweight=dw, dbias=db, workspace=space,
                                 **how),
        names(m.backward_kernels()), results, make.tensors, not inside,
    )  # fmt: skip


def layernorm(make: Maker, m: ModuleType) -> Problem:
    return norm(make, m, "layernorm")


def rmsnorm(make: Maker, m: ModuleType) -> Problem:
    return norm(make, m, "rmsnorm")


def cross_entropy(make: Maker, m: ModuleType) -> Problem:
    kind = make.dtype()
    t, columns = DTYPES[kind], make.size(70_000, 2)
    rows = make.size(max(1, min(500, 2_000_000 // columns)))
    value = make.random((rows, columns), 3) + make.one_of(0.0, -150.0, 80.0)
    if make.maybe():
        value[:, :: int(make.rng.integers(2, 5))] = -float("inf")
    target = torch.from_numpy(make.rng.integers(0, columns, rows)).cuda()
    value.scatter_(1, target[:, None], value.nan_to_num(neginf=-100.0).mean(1, keepdim=True))
    target[torch.rand(rows, device="cuda") < 0.1] = -100
    x = make.operand("logits", (rows, columns), t, value=value)
    ids = make.operand("target", (rows,), torch.int64, value=target, dense=True, offset=0)
    wide = x.double()
    lse = torch.logsumexp(wide, -1)
    if make.maybe():
        outs = [make.result(n, (rows,), torch.float32, dense=True) for n in ("loss", "lse")]
        space = make.workspace(m.forward_workspace(x))
        loss = F.cross_entropy(wide, target, reduction="none")
        scale = float(lse.abs().max()) + 4
        return Problem(
            f"cross_entropy {rows} x {columns} {kind}",
            lambda **how: m.forward(x, ids, loss=outs[0], lse=outs[1], workspace=space, **how),
            names(m.kernels()),
            lambda: [Result("loss", outs[0], loss, 2.0**-20, scale),
                     Result("lse", outs[1], lse, 2.0**-20, scale)],
            make.tensors,
        )  # fmt: skip
    kept = make.operand("lse", (rows,), torch.float32, value=lse, dense=True)
    dloss = make.operand("dloss", (rows,), torch.float32, dense=True)
    hot = F.one_hot(target.clamp(min=0), columns).double()
    wanted = (torch.exp(wide - kept.double()[:, None]) - hot) * dloss.double()[:, None]
    wanted[target == -100] = 0
    inside = make.maybe(0.4)
    dx = make.in_place(x) if inside else make.result("dlogits", (rows, columns), t)
    return Problem(
        f"cross_entropy backward {rows} x {columns} {kind} in place {inside}",
        lambda **how: m.backward(dloss, x, ids, kept, dlogits=dx, **how),
        names(m.backward_kernels()),
        lambda: [Result("dlogits", dx, wanted, tolerance(kind, 1) + 2.0**-14, 2.0**-8)],
        make.tensors, not inside,
    )  # fmt: skip


def permuted(make: Maker, shape: tuple[int, ...]) -> dict[str, Any]:
    order = tuple(int(d) for d in make.rng.permutation(len(shape)))
    return {"order": order} if make.maybe() else {}


def copy(make: Maker, m: ModuleType) -> Problem:
    t = make.one_of(torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool)
    rank = make.size(4)
    shape = tuple(make.size(70 if rank < 4 else 30) for _ in range(rank))  # the arena holds two
    value = torch.randint(0, 2 if t == torch.bool else 100, shape, device="cuda")
    x = make.operand("x", shape, t, value=value, **permuted(make, shape))
    y = make.result("y", shape, t, **(permuted(make, shape) or {"offset": 0}))
    return Problem(
        f"copy {shape} {t} {x.stride()} to {y.stride()}",
        lambda **how: m.forward(x, y=y, **how),
        names(m.kernels()),
        lambda: [Result("y", y.double(), x.double(), 0)],
        make.tensors,
    )


def rope(make: Maker, m: ModuleType) -> Problem:
    kind, back, pairs = make.dtype(), make.maybe(), make.maybe(0.3)
    t, b, h, s = DTYPES[kind], make.size(4), make.size(8), make.size(40)
    d = make.one_of(16, 64, 128, 2 * make.size(40))
    order = make.one_of((0, 1, 2, 3), (0, 2, 1, 3))
    tt = make.one_of(t, torch.float32)
    tables = [make.operand(n, make.one_of((s, d), (1, 1, s, d)), tt, dense=True)
              for n in ("cos", "sin")]  # fmt: skip
    x = make.operand("x", (b, h, s, d), t, order=order)
    wide, (c, sn) = x.double(), (v.double() for v in tables)

    def rotate(v: torch.Tensor) -> torch.Tensor:
        if pairs:
            return torch.stack((-v[..., 1::2], v[..., ::2]), -1).flatten(-2)
        return torch.cat((-v[..., d // 2 :], v[..., : d // 2]), -1)

    if back:  # the rotation transposed
        leaf = wide.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(leaf * c + rotate(leaf) * sn, leaf, wide)
    else:
        wanted = wide * c + rotate(wide) * sn
    inside = make.maybe(0.4)
    y = make.in_place(x) if inside else make.result("y", (b, h, s, d), t, order=order)

    def call(**how: Any) -> None:
        if back:
            m.backward(x, *tables, dx=y, interleaved=pairs, **how)
        else:
            m.forward(x, *tables, y=y, interleaved=pairs, **how)

    return Problem(
        f"rope {(b, h, s, d)} {kind} backward {back} pairs {pairs} in place {inside}", call,
        names(m.kernels()),
        lambda: [Result("y", y, wanted, tolerance(kind, 2), 8.0)], make.tensors, not inside,
    )  # fmt: skip


def kv_append(make: Maker, m: ModuleType) -> Problem:
    kind = make.dtype()
    t, b, g, s, slots = DTYPES[kind], make.size(5), make.size(6), make.size(9), make.size(60)
    d, order = make.one_of(8, 64, 128, make.size(40)), make.one_of((0, 1, 2, 3), (0, 2, 1, 3))
    new = [make.operand(n, (b, g, s, d), t, order=order) for n in "kv"]
    caches = [make.operand(n, (b, g, slots, d), t) for n in ("k_cache", "v_cache")]
    at = torch.from_numpy(make.rng.integers(-3, slots + 3, b))
    wanted = [c.clone() for c in caches]
    for c in caches:  # of a cache only the rows that are named may change
        for i, start in enumerate(at.tolist()):
            low, high = max(0, start), min(slots, start + s)
            if low < high:
                make.arena.result(c[i, :, low:high])
    for i, start in enumerate(at.tolist()):
        for j in range(s):
            if 0 <= start + j < slots:
                for c, rows in zip(wanted, new, strict=True):
                    c[i, :, start + j] = rows[i, :, j]
    where = make.operand("positions", (b,), make.one_of(torch.int32, torch.int64),
                         value=at.cuda(), dense=True, offset=0)  # fmt: skip
    return Problem(
        f"kv_append {(b, g, s, d)} into {slots} {kind}",
        lambda **how: m.forward(*new, *caches, where, **how),
        names(m.kernels()),
        lambda: [Result(n, c, w, 0) for n, c, w in zip("kv", caches, wanted, strict=True)],
        make.tensors,
    )


def embedding(make: Maker, m: ModuleType) -> Problem:
    kind = make.dtype()
    t, vocabulary, n = DTYPES[kind], make.size(3000), make.size(1500)
    shape = make.one_of((make.size(300),), (make.size(9), make.size(30)))
    ids = torch.from_numpy(make.rng.integers(-1, vocabulary + 1, shape)).cuda()
    at = make.operand("ids", shape, make.one_of(torch.int32, torch.int64), value=ids, dense=True,
                      offset=0)  # fmt: skip
    inside = (ids >= 0) & (ids < vocabulary)
    known = ids.clamp(0, vocabulary - 1)
    if make.maybe(0.6):
        table = make.operand("table", (vocabulary, n), t)
        y = make.result("y", (*shape, n), t, dense=True)
        wanted = table[known].double().masked_fill(~inside[..., None], float("nan"))
        return Problem(
            f"embedding {vocabulary} x {n} {shape} {kind}",
            lambda **how: m.forward(table, at, y=y, **how),
            names(m.kernels()), lambda: [Result("y", y.double(), wanted, 0)], make.tensors,
        )  # fmt: skip
    dy = make.operand("dy", (*shape, n), t, dense=True)
    dtable = make.result("dtable", (vocabulary, n), t, dense=True)
    space = make.workspace(m.backward_workspace(at))
    sums = torch.zeros(vocabulary, n, device="cuda", dtype=torch.float64)
    kept = dy.double() * inside[..., None]
    sums.index_add_(0, known.reshape(-1), kept.reshape(-1, n))
    return Problem(
        f"embedding backward {vocabulary} x {n} {shape} {kind}",
        lambda **how: m.backward(dy, at, dtable=dtable, workspace=space, **how),
        names(m.backward_kernels()),
        lambda: [Result("dtable", dtable, sums, tolerance(kind, 300), 16.0)], make.tensors,
    )  # fmt: skip


def reduction(make: Maker, m: ModuleType) -> Problem:
    kind, op = make.dtype(), make.one_of("sum", "mean", "max", "min", "argmax", "argmin")
    shape = tuple(make.size(90) for _ in range(make.size(4)))
    if make.maybe(0.3):
        shape = make.one_of((3, 50_000), (20_000, 8), (999, 520), (1, 70_001), (5000, 65))
    rank = len(shape)
    axes = [d for d in range(rank) if make.maybe()] or [rank - 1]
    x = make.operand("x", shape, DTYPES[kind], **permuted(make, shape))
    arg = op.startswith("arg")
    y = make.result("y", tuple(1 if d in axes else n for d, n in enumerate(shape)),
                    torch.int64 if arg else DTYPES[kind], dense=True)  # fmt: skip
    space = make.workspace(m.workspace(x, op, y=y)) if make.maybe() else None
    kept = [d for d in range(rank) if d not in axes]
    flat = x.double().permute(*kept, *axes).reshape(*(shape[d] for d in kept), -1)
    wanted = getattr(flat, op)(-1)
    wanted = wanted.values if op in ("max", "min") else wanted
    if arg:  # the first of equal ones
        best = flat.max(-1, keepdim=True) if op == "argmax" else flat.min(-1, keepdim=True)
        wanted = (flat == best.values).to(torch.uint8).argmax(-1)
    count = flat.shape[-1]
    bound = 0 if op not in ("sum", "mean") else tolerance(kind, count)
    scale = 4.0 * (count**0.5 if op == "sum" else 1.0)
    return Problem(
        f"reduction {op} {shape} {x.stride()} {axes} {kind}",
        lambda **how: m.forward(x, op, y=y, workspace=space, **how),
        names(m.kernels()),
        lambda: [Result("y", y.double(), wanted.double().reshape(y.shape), bound, scale)],
        make.tensors,
    )


def ewise(make: Maker, m: ModuleType) -> Problem:
    t = DTYPES[make.dtype("float32", "bfloat16")]
    code, imm, count = chains(int(make.rng.integers(1 << 30)), 1)[0]
    if make.maybe(0.3):
        code, imm, count = [OPCODES["silu"], 0, 0, -1, -1], [], 1
    shape = (make.size(300), make.size(600)) if make.maybe() else (make.size(60_000),)
    operands = []
    for k in range(count):
        full = make.maybe(0.7) or k == 0
        part = shape if full else (1,) * (len(shape) - 1) + shape[-1:]
        operands.append(make.operand(f"operand {k}", part, t))
    wanted = run(code, imm, [v.double().expand(shape) for v in operands])
    rounded = run(code, imm, [v.float().expand(shape) for v in operands])  # what float32 may lose
    lost = float((wanted - rounded.double()).abs().max())
    inside = make.maybe(0.3)
    y = make.in_place(operands[0]) if inside else make.result("y", shape, t)
    bound = EPSILON[str(t)[6:]] + 2.0**-12  # activations of 16-bit results: see docs/cuda_ops.md
    scale = 1.0 + 32 * lost / bound
    return Problem(
        f"ewise {code} {imm} over {[tuple(v.shape) for v in operands]} {t} in place {inside}",
        lambda **how: m.forward(code, imm, operands, y=y, **how),
        names(m.kernels()),
        lambda: [Result("y", y, wanted, bound, scale)], make.tensors, not inside,
    )  # fmt: skip


def sampling(make: Maker, m: ModuleType) -> Problem:
    t, rows, n = DTYPES[make.dtype()], make.size(40), make.size(40_000)
    x = make.operand("logits", (rows, n), t)
    tokens = make.result("tokens", (rows,), torch.int64, dense=True, offset=0)
    best = (x.double() == x.double().max(-1, keepdim=True).values).to(torch.uint8).argmax(-1)
    return Problem(
        f"sampling argmax {rows} x {n} {t}",
        lambda **how: m.forward(x, tokens=tokens, temperature=0.0, **how),
        names(m.kernels()),
        lambda: [Result("tokens", tokens.double(), best.double(), 0)],
        make.tensors,
    )


def optim(make: Maker, m: ModuleType) -> Problem:
    kind, t32 = make.dtype(), torch.float32
    t, sizes = DTYPES[kind], [make.size(5000) for _ in range(make.size(9))]
    p = [make.operand(f"param {k}", (n,), t, dense=True) for k, n in enumerate(sizes)]
    g = [make.operand(f"grad {k}", (n,), t, dense=True) for k, n in enumerate(sizes)]
    s = [make.operand(f"m {k}", (n,), t32, dense=True) for k, n in enumerate(sizes)]
    moved = [0.9 * a.double() + b.double() for a, b in zip(s, g, strict=True)]
    wanted = [a.double() - 0.1 * b for a, b in zip(p, moved, strict=True)]
    for v in (*p, *s):
        make.in_place(v)

    def results() -> list[Result]:
        bound = tolerance(kind, 4)
        return [Result(f"param {k}", a, b, bound, 1.0)
                for k, (a, b) in enumerate(zip(p, wanted, strict=True))] + [
            Result(f"m {k}", a, b, 2.0**-22, 1.0)
            for k, (a, b) in enumerate(zip(s, moved, strict=True))]  # fmt: skip

    return Problem(
        f"optim sgd {sizes} {kind}",
        lambda **how: m.step(p, g, s, (), kind="sgd", lr=0.1, momentum=0.9, **how),
        names(m.kernels()), results, make.tensors, False,
    )  # fmt: skip
