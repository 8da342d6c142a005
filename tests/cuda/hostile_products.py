"""Random problems of the operators that sum products: gemm, gemv, sdpa, conv2d."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from hostile import Maker, Problem, Result
from hostile_rows import names
from problems import ACTIVATIONS, DTYPES, tolerance

F = torch.nn.functional


def epilogue(
    make: Maker, t: torch.dtype, shape: tuple[int, ...], kinds: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, torch.Tensor | None]]:
    """Options, and the tensors bias, residual, c, aux; c may be the residual."""
    name, _ = make.one_of(*ACTIVATIONS)
    kind = make.one_of(*kinds)
    size = {"column": shape[-1], "row": shape[-2], "scalar": 1}.get(kind)
    bias = None if size is None else make.operand("bias", (size,), t, dense=True)
    residual = make.operand("residual", shape, t) if make.maybe(0.4) else None
    inside = residual is not None and make.maybe()
    c = make.in_place(residual) if inside and residual is not None else make.result("c", shape, t)
    aux = make.result("aux", shape, t) if make.maybe(0.3) else None
    scale = make.one_of(1.0, 0.5)
    options = {"activation": name, "bias_kind": kind, "scale": scale, "slope": 0.1}
    before = None if residual is None else residual.double()
    return options, {"bias": bias, "residual": residual, "c": c, "aux": aux, "added": before}


def finished(
    product: torch.Tensor, options: dict[str, Any], part: dict[str, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the activation gets, c) in float64."""
    value = product * options["scale"]
    if part["bias"] is not None:
        bias = part["bias"].double()
        value = value + (bias[:, None] if options["bias_kind"] == "row" else bias)
    c = dict(ACTIVATIONS)[options["activation"]](value)
    return value, c if part["added"] is None else c + part["added"]


def matrix(
    make: Maker, name: str, lead: tuple[int, ...], rows: int, columns: int, trans: bool,
    t: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    shape = (*lead, columns, rows) if trans else (*lead, rows, columns)
    return make.operand(name, shape, t)


def gemm(make: Maker, m: ModuleType) -> Problem:
    kind = make.dtype()
    t, rows, columns, depth = DTYPES[kind], make.size(700), make.size(700), make.size(1200)
    lead = make.one_of((), (), (3,), (2, 2))
    ta, tb = make.maybe(), make.maybe()
    shared = bool(lead) and make.maybe()
    a = matrix(make, "a", lead, rows, depth, ta, t)
    b = matrix(make, "b", () if shared else lead, depth, columns, tb, t)
    if make.maybe(0.4):
        return gemm_backward(make, m, kind, a, b, ta, tb, (*lead, rows, columns))
    options, part = epilogue(make, t, (*lead, rows, columns), ("none", "column", "row", "scalar"))
    space = make.workspace(make.one_of(m.workspace(), 0, 65536))
    wide = [v.double().mT if trans else v.double() for v, trans in ((a, ta), (b, tb))]
    before, wanted = finished(wide[0] @ wide[1], options, part)
    scale = float((wide[0].square() @ wide[1].square()).sqrt().max()) + 1
    if part["added"] is not None:
        scale += float(part["added"].abs().max())
    bound = tolerance(kind, depth, 3) + 16 * 2.0**-23
    inside = part["residual"] is part["c"] and part["c"] is not None

    def results() -> list[Result]:
        out = [Result("c", part["c"], wanted, bound, scale)]
        return out + ([Result("aux", part["aux"], before, bound, scale)] if part["aux"] is not None
                      else [])  # fmt: skip

    tune = make.maybe(0.2)
    return Problem(
        f"gemm {lead} {rows} x {columns} x {depth} {kind} trans {ta} {tb} {options} tune {tune}",
        lambda **how: m.forward(a, b, part["bias"], part["residual"], c=part["c"],
                                aux=part["aux"], trans_a=ta, trans_b=tb, workspace=space,
                                tune=tune, **options, **how),
        names(m.kernels()), results, make.tensors, not inside and not tune,
    )  # fmt: skip


def gemm_backward(
    make: Maker, m: ModuleType, kind: str, a: torch.Tensor, b: torch.Tensor, ta: bool, tb: bool,
    shape: tuple[int, ...],
) -> Problem:  # fmt: skip
    t = DTYPES[kind]
    if ta and a.ndim != b.ndim:  # a documented limit
        return gemm(make, m)
    name, function = make.one_of(*ACTIVATIONS)
    dc = make.operand("dc", shape, t)
    aux = make.operand("aux", shape, t) if name != "none" else None
    bias_kind = make.one_of("none", "column", "row", "scalar")
    size = {"column": shape[-1], "row": shape[-2], "scalar": 1}.get(bias_kind)
    dbias = None if size is None else make.result("dbias", (size,), t, dense=True)
    shared = a.ndim != b.ndim
    if shared and not (
        a.is_contiguous() and dc.is_contiguous() and (aux is None or aux.is_contiguous())
    ):
        a, dc = (make.operand(n, tuple(v.shape), t, dense=True) for n, v in (("a", a), ("dc", dc)))
    da = make.result("da", tuple(a.shape), t, dense=shared)
    db = make.result("db", tuple(b.shape), t)
    space = make.workspace(m.backward_workspace(dc, a, b, has_bias=dbias is not None,
                                                bias_kind=bias_kind, activation=name))  # fmt: skip
    leaves = [v.double().requires_grad_() for v in (a, b)]
    product = (leaves[0].mT if ta else leaves[0]) @ (leaves[1].mT if tb else leaves[1])
    dt = dc.double()
    if aux is not None:
        x = aux.double().requires_grad_()
        (dt,) = torch.autograd.grad(function(x), x, dc.double())
    wanted = torch.autograd.grad(product, leaves, dt)
    flat = dt.reshape(-1, *dt.shape[-2:])
    sums = {"column": lambda: flat.sum((0, 1)), "row": lambda: flat.sum((0, 2)),
            "scalar": lambda: flat.sum().reshape(1)}  # fmt: skip

    def results() -> list[Result]:
        out = []
        pairs = (("da", da, wanted[0], shape[-1]), ("db", db, wanted[1], dt.numel() // shape[-1]))
        for n, got, right, depth in pairs:
            bound = tolerance(kind, depth, 3) + 2.0**-18
            out.append(Result(n, got, right, bound, float(right.abs().max()) + 1))
        if dbias is not None:
            right = sums[bias_kind]()
            scale = float(right.abs().max()) + 1 + float(dt.norm())
            bound = tolerance(kind, dt.numel(), 3) + 2.0**-18
            out.append(Result("dbias", dbias, right, bound, scale))
        return out

    return Problem(
        f"gemm backward {tuple(a.shape)} {tuple(b.shape)} {kind} {ta} {tb} {name} {bias_kind}",
        lambda **how: m.backward(dc, a, b, aux, da=da, db=db, dbias=dbias, trans_a=ta, trans_b=tb,
                                 bias_kind=bias_kind, activation=name, slope=0.1, workspace=space,
                                 **how),
        names(m.backward_kernels()), results, make.tensors,
    )  # fmt: skip


def gemv(make: Maker, m: ModuleType) -> Problem:
    kind, bits = make.dtype(), make.one_of(16, 16, 8, 4)
    kind = "bfloat16" if bits != 16 and kind == "float32" else kind
    t, rows, columns = DTYPES[kind], make.size(9), make.size(1500)
    depth = make.size(9000)
    if make.maybe(0.7):
        depth = max(128, depth // 128 * 128)
    scales = None
    if bits == 16:
        w = make.operand("w", (columns, depth), t)
        full = w.double()
    else:
        depth += depth % 2
        groups = [g for g in (128, 256, 512, depth) if depth % g == 0]
        group = make.one_of(*groups)
        low, high = (-128, 128) if bits == 8 else (-8, 8)
        q = torch.from_numpy(make.rng.integers(low, high, (columns, depth))).cuda()
        value = torch.rand(depth // group, columns, device="cuda") * 0.1 + 0.01
        scales = make.operand("scales", (depth // group, columns), t, value=value)
        full = q.double() * scales.double().T.repeat_interleave(group, 1)
        if bits == 8:
            w = make.operand("w", (columns, depth), torch.int8, value=q)
        else:
            u = q + 8
            packed = (u[:, ::2] | (u[:, 1::2] << 4)).to(torch.uint8)
            w = make.operand("w", (columns, depth // 2), torch.uint8, value=packed)
    x = make.operand("x", (rows, depth), t)
    options, part = epilogue(make, t, (rows, columns), ("none", "column", "row", "scalar"))
    before, wanted = finished(x.double() @ full.T, options, part)
    scale = float((x.double().square() @ full.square().T).sqrt().max()) + 1
    if part["added"] is not None:
        scale += float(part["added"].abs().max())
    bound = tolerance(kind, depth) + 8 * 2.0**-23
    inside = part["residual"] is part["c"] and part["c"] is not None
    early = {"overlap": make.maybe(), "stable_weights": make.maybe()}

    def results() -> list[Result]:
        out = [Result("y", part["c"], wanted, bound, scale)]
        return out + ([Result("aux", part["aux"], before, bound, scale)] if part["aux"] is not None
                      else [])  # fmt: skip

    return Problem(
        f"gemv {rows} x {columns} x {depth} {kind} {bits} bits {options} {early} in place {inside}",
        lambda **how: m.forward(x, w, scales, part["bias"], part["residual"], y=part["c"],
                                aux=part["aux"], **options, **early, **how),
        names(m.kernels()), results, make.tensors, not inside,
    )  # fmt: skip


def heads(
    make: Maker, name: str, shape: tuple[int, ...], t: torch.dtype, order: tuple[int, ...],
    value: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    if make.maybe(0.6):
        return make.operand(name, shape, t, order=order, value=value)
    return make.operand(name, shape, t, value=value)


def sdpa(make: Maker, m: ModuleType) -> Problem:
    kind = make.dtype()
    t, batch, groups = DTYPES[kind], make.size(3), make.size(4)
    ratio, dim = make.one_of(1, 2, 4), make.one_of(64, 64, 128, 80, 256, make.size(256))
    rows = make.size(16 // ratio if make.maybe() else 300)
    keys = make.size(1500 if rows < 17 else 400)
    order = make.one_of((0, 1, 2, 3), (0, 2, 1, 3))
    q_shape, k_shape = (batch, groups * ratio, rows, dim), (batch, groups, keys, dim)
    seen = torch.ones(batch, groups * ratio, rows, keys, dtype=torch.bool, device="cuda")
    options: dict[str, Any] = {"overlap": make.maybe()}
    values = [make.random(k_shape) for _ in "kv"]
    if make.maybe(0.4):
        lengths = torch.from_numpy(make.rng.integers(0, keys + 1, batch)).cuda()
        inside = torch.arange(keys, device="cuda") < lengths[:, None]
        seen = seen & inside[:, None, None]
        for v in values:  # what lies behind a length may be anything
            v.masked_fill_(~inside[:, None, :, None], float("nan"))
        options["lengths"] = make.operand("lengths", (batch,), make.one_of(
            torch.int32, torch.int64), value=lengths, dense=True, offset=0)  # fmt: skip
    if make.maybe(0.4):
        offset = int(make.rng.integers(-2, keys))
        at = torch.arange(keys, device="cuda")
        seen = seen & (at <= torch.arange(rows, device="cuda")[:, None] + offset)
        options |= {"causal": True, "causal_offset": offset}
    mask = None
    if make.maybe(0.3):
        value = torch.rand(batch, 1, rows, keys, device="cuda") < 0.7
        mask = make.operand("mask", (batch, 1, rows, keys), torch.bool, value=value)
        mask = mask.expand(seen.shape)
        seen = seen & mask
    q = heads(make, "q", q_shape, t, order)
    k, v = (heads(make, n, k_shape, t, order, x) for n, x in zip("kv", values, strict=True))
    wide = [x.double().nan_to_num(0.0).repeat_interleave(ratio, 1) for x in (k, v)]
    score = (q.double() @ wide[0].mT / dim**0.5).masked_fill(~seen, -float("inf"))
    weights = torch.softmax(score, -1).nan_to_num(0.0)
    lse_wanted, o_wanted = torch.logsumexp(score, -1), weights @ wide[1]
    rounding = 2.0**-18 if kind == "float32" else 2 * tolerance(kind, keys)
    largest = float(wide[1].abs().max()) + 1e-3
    o = make.result("o", q_shape, t, order=order)
    lse = make.result("lse", q_shape[:-1], torch.float32, dense=True, offset=0)
    space = make.workspace(m.workspace(q, k))
    return Problem(
        f"sdpa {q_shape} x {keys} groups {groups} {kind} {options} mask {mask is not None}",
        lambda **how: m.forward(q, k, v, mask, o=o, lse=lse, workspace=space, **options, **how),
        names(m.kernels()),
        lambda: [Result("o", o, o_wanted, rounding, largest),
                 Result("lse", lse, lse_wanted, 2.0**-16, 8.0)],
        make.tensors,
    )  # fmt: skip


def conv2d(make: Maker, m: ModuleType) -> Problem:
    kind = make.dtype()
    t, groups = DTYPES[kind], make.one_of(1, 1, 1, 2, 4)
    n, c = make.size(4), groups * make.one_of(1, 3, 8, 16, 24, 64, make.size(40))
    o = groups * make.one_of(1, 3, 8, 16, 64, 130, make.size(40))
    taps, stride = (make.size(4), make.size(4)), (make.size(3), make.size(3))
    padding, dilation = (int(make.rng.integers(0, 3)), 1), (make.size(2), make.size(2))
    image = tuple(d * (s - 1) + 1 + make.size(20) for d, s in zip(dilation, taps, strict=True))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}

    def order() -> tuple[int, ...]:
        return make.one_of((0, 2, 3, 1), (0, 2, 3, 1), (0, 1, 2, 3))  # type: ignore[no-any-return]

    depth = c // groups * taps[0] * taps[1]
    x = make.operand("x", (n, c, *image), t, order=order())
    w = make.operand("w", (o, c // groups, *taps), t, order=order(), scale=depth**-0.5)
    leaves = [v.double().requires_grad_() for v in (x, w)]
    y = F.conv2d(*leaves, None, stride, padding, dilation, groups)
    shape = tuple(y.shape)
    bound = tolerance(kind, depth, 3) + 2.0**-18
    if make.maybe():
        layout = order()
        name, function = make.one_of(*ACTIVATIONS)
        bias = make.operand("bias", (o,), t, dense=True) if make.maybe() else None
        residual = make.operand("residual", shape, t, order=layout) if make.maybe(0.4) else None
        added = None if residual is None else residual.double()
        inside = residual is not None and make.maybe()
        out = make.in_place(residual) if inside and residual is not None else make.result(
            "y", shape, t, order=layout)  # fmt: skip
        before = y.detach() + (0 if bias is None else bias.double()[:, None, None])
        wanted = function(before) + (0 if added is None else added)
        call = {"y": out, "activation": name, "slope": 0.1, **options}
        room = make.workspace(m.workspace(x, w, y=out, **options))

        def forward(**how: Any) -> None:
            space = room
            if how.get("kernel"):  # a forced row asks for its own
                space = make.workspace(m.workspace(x, w, y=out, kernel=how["kernel"], **options))
                make.arena.freeze()
            m.forward(x, w, bias, residual, workspace=space, **call, **how)

        return Problem(
            f"conv2d {tuple(x.shape)} {x.stride()} {tuple(w.shape)} {w.stride()} {options} {name} "
            f"{kind} in place {inside}", forward, names(m.kernels()),
            lambda: [Result("y", out, wanted, bound, 6.0)], make.tensors, not inside,
        )  # fmt: skip
    dy = make.operand("dy", shape, t, order=order())
    grads = torch.autograd.grad(y, leaves, dy.double())
    dx, dw = (make.result(a, tuple(v.shape), t, order=order()) for a, v in (("dx", x), ("dw", w)))
    dbias = make.result("dbias", (o,), t, dense=True)
    room = make.workspace(m.backward_workspace(dy, x, w, **options))

    def backward(**how: Any) -> None:
        space = room
        if how.get("kernel"):
            size = m.backward_workspace(dy, x, w, kernel=how["kernel"], **options)
            space = make.workspace(size)
            make.arena.freeze()
        m.backward(dy, x, w, dx=dx, dw=dw, dbias=dbias, workspace=space, **options, **how)

    places = dy.numel() // o

    def results() -> list[Result]:
        out = [
            Result(
                "dbias",
                dbias,
                dy.double().sum((0, 2, 3)),
                tolerance(kind, places) + 2.0**-18,
                4 * places**0.5,
            )
        ]
        for name, got, right, terms in (
            ("dx", dx, grads[0], o * taps[0] * taps[1]),
            ("dw", dw, grads[1], places),
        ):
            scale = float(right.abs().max()) + 1
            out.append(Result(name, got, right, tolerance(kind, terms, 3) + 2.0**-17, scale))
        return out  # fmt: skip

    return Problem(
        f"conv2d backward {tuple(x.shape)} {tuple(w.shape)} {dx.stride()} {dw.stride()} "
        f"{options} {kind}", backward, names(m.backward_kernels()), results, make.tensors,
    )  # fmt: skip
