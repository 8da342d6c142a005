"""Reductions, softmax, cumulative sums, sorting and indexing."""

from __future__ import annotations

from collections.abc import Sequence

from rm_abstract.capture.dims import plus, product
from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call, Handler


def _reduce(kind: str) -> Handler:
    def handler(c: Call) -> Value | None:
        x = c.value("self")
        if kind in ("any", "all"):
            x = c.b.cast(x, "bool")
        elif kind not in ("argmax", "argmin"):
            x = c.b.cast(x, c.dtype)
        if x.rank == 0:
            arg = kind in ("argmax", "argmin")
            return c.b.full("i64", [], 0) if arg else c.b.cast(x, c.dtype)
        if kind in ("argmax", "argmin") and c["dim"] is None:
            flat = c.b.reshape(x, [product(x.dims)])
            return c.b.reshape(c.b.reduce(kind, flat, [0], False, c.dtype), c.dims)
        axes = c.axes("dim", x.rank)
        return c.b.reduce(kind, x, axes, bool(c["keepdim"]), c.dtype)

    return handler


def _extreme(kind: str) -> Handler:
    """max/min along one axis: values and indices."""

    def handler(c: Call) -> Sequence[Value] | None:
        x = c.value("self")
        if x.rank == 0:
            return None
        axis, keep = c.axis("dim", x.rank), bool(c["keepdim"])
        return [
            c.b.reduce(kind, x, [axis], keep, x.dtype),
            c.b.reduce("arg" + kind, x, [axis], keep, "i64"),
        ]

    return handler


def _amax(kind: str) -> Handler:
    def handler(c: Call) -> Value:
        x = c.value("self")
        if x.rank == 0:
            return x
        return c.b.reduce(kind, x, c.axes("dim", x.rank), bool(c["keepdim"]), x.dtype)

    return handler


def _nanmean(c: Call) -> Value | None:
    x = c.value("self")
    if x.dtype not in ("f32", "f64") or c.dtype != x.dtype or x.rank == 0:
        return None
    axes, keep = c.axes("dim", x.rank), bool(c["keepdim"])
    missing = c.b.unary("isnan", x, "bool")
    total = c.b.where(missing, c.b.scalar(x.dtype, 0), x)
    total = c.b.reduce("sum", total, axes, keep, x.dtype)
    count = c.b.reduce("sum", c.b.unary("logical_not", missing, "bool"), axes, keep, "i64")
    return c.b.binary("div", total, c.b.cast(count, x.dtype))


def _trace(c: Call) -> Value:
    x = c.value("self")
    rows = c.b.reshape(c.b.iota(x.dims[0]), [x.dims[0], 1])
    on = c.b.binary("eq", rows, c.b.iota(x.dims[1]), "bool")
    kept = c.b.cast(c.b.where(on, x, c.b.scalar(x.dtype, 0)), c.dtype)
    return c.b.reduce("sum", kept, [0, 1], False, c.dtype)


def _logsumexp(c: Call) -> Value | None:
    """The largest is taken out first, where it is finite: powers do not overflow then."""
    x = c.b.cast(c.value("self"), c.dtype)
    if c.dtype not in ("f32", "f64"):
        return None  # double rounding in a half type: left to the bridge
    axes = c.axes("dim", x.rank)
    if x.rank == 0 or not axes:
        return None
    most = c.b.reduce("max", x, axes, True, x.dtype)
    zero = c.b.scalar(x.dtype, 0.0)
    finite = c.b.binary("lt", c.b.unary("abs", most), c.b.scalar(x.dtype, float("inf")), "bool")
    most = c.b.where(finite, most, zero)
    powers = c.b.unary("exp", c.b.binary("sub", x, most))
    total = c.b.unary("log", c.b.reduce("sum", powers, axes, True, x.dtype))
    y = c.b.binary("add", total, most)
    return c.b.reshape(y, c.dims)


def _softmax(log: int) -> Handler:
    def handler(c: Call) -> Value:
        x = c.b.cast(c.value("self"), c.dtype)
        if x.rank == 0:
            return c.b.full(c.dtype, [], 0.0 if log else 1.0)
        return c.b.op("softmax", [x], c.dtype, x.dims, axis=c.axis("dim", x.rank), log=log)

    return handler


def _cumsum(c: Call) -> Value:
    # Integers are summed in 64 bits whatever the result: wrapping around gives the same low bits.
    narrow = c.dtype in ("i32", "i16", "i8", "u8")
    x = c.b.cast(c.value("self"), "i64" if narrow else c.dtype)
    if x.rank == 0:
        return c.b.cast(x, c.dtype)
    total = c.b.op("cumsum", [x], x.dtype, x.dims, axis=c.axis("dim", x.rank))
    return c.b.cast(total, c.dtype)


def _variance(root: bool) -> Handler:
    def handler(c: Call) -> Value | None:
        x = c.value("self")
        correction = c["correction"]
        if correction is None:
            correction = 1 if c["unbiased"] in (None, True) else 0
        axes = c.axes("dim", x.rank)
        if x.dtype != "f32":
            return None  # double rounding in a half type: left to the bridge
        count = product([x.dims[a] for a in axes])
        if isinstance(count, int) and count <= correction:
            return None
        mean = c.b.reduce("mean", x, axes, True, x.dtype)
        centred = c.b.binary("sub", x, mean)
        total = c.b.reduce(
            "sum", c.b.binary("mul", centred, centred), axes, bool(c["keepdim"]), x.dtype
        )
        freedom = c.operand(plus(count, -int(correction)), x.dtype)
        y = c.b.binary("div", total, freedom)
        return c.b.unary("sqrt", y) if root else y

    return handler


def _with_mean(root: bool) -> Handler:
    """var_mean and std_mean: the variance or its root, and the mean."""

    def handler(c: Call) -> Sequence[Value] | None:
        spread = _variance(root)(c)
        if not isinstance(spread, Value):
            return None
        x = c.value("self")
        keep = bool(c["keepdim"])
        return [spread, c.b.reduce("mean", x, c.axes("dim", x.rank), keep, x.dtype)]

    return handler


def _vector_norm(c: Call) -> Value | None:
    x = c.value("self")
    if c["ord"] not in (None, 2, 2.0) or x.dtype not in ("f32", "f64") or c.dtype != x.dtype:
        return None
    total = c.b.reduce(
        "sum", c.b.binary("mul", x, x), c.axes("dim", x.rank), bool(c["keepdim"]), x.dtype
    )
    return c.b.unary("sqrt", total)


def _sort(c: Call) -> Sequence[Value] | None:
    x = c.value("self")
    if x.rank == 0:
        return None
    return c.b.multi(
        "sort",
        [x],
        c.types,
        axis=c.axis("dim", x.rank),
        descending=int(bool(c["descending"])),
        k=-1,
    )


def _topk(c: Call) -> Sequence[Value] | None:
    x = c.value("self")
    if x.rank == 0 or not isinstance(c["k"], int):
        return None
    return c.b.multi(
        "sort",
        [x],
        c.types,
        axis=c.axis("dim", x.rank),
        descending=int(c["largest"] is not False),
        k=c["k"],
    )


def _gather(c: Call) -> Value | None:
    x, index = c.value("self"), c.value("index")
    if x.rank == 0 or index.rank == 0:
        return None
    return c.b.op("gather", [x, index], x.dtype, index.dims, axis=c.axis("dim", x.rank))


def _index_select(c: Call) -> Value | None:
    x, index = c.value("self"), c.value("index")
    if x.rank == 0 or index.rank != 1:
        return None
    # Unlike x[index] it takes none that count from the end.
    natural = c.b.binary("ge", index, c.b.scalar(index.dtype, 0), "bool")
    c.b.check_all(natural, "index_select: indices that are not negative")
    return c.b.op("index", [x, index], x.dtype, c.dims, axes=[c.axis("dim", x.rank)])


def _index(c: Call) -> Value | None:
    x = c.value("self")
    axes = [i for i, v in enumerate(c["indices"]) if v is not None]
    indices = [c["indices"][i] for i in axes]
    if axes != list(range(axes[0], axes[0] + len(axes))):
        return None
    if any(v.dtype not in ("i64", "i32") for v in indices):
        return None
    return c.b.op("index", [x, *indices], x.dtype, c.dims, axes=axes)


def _index_copy(c: Call) -> Value | None:
    x, index, source = c.value("self"), c.value("index"), c.value("source")
    if x.rank == 0 or index.rank != 1 or index.dtype not in ("i64", "i32"):
        return None
    axis = c.axis("dim", x.rank)
    return c.b.op("index_copy", [x, index, source], x.dtype, x.dims, axis=axis)


def _scatter(kind: str) -> Handler:
    def handler(c: Call) -> Value | None:
        x, index = c.value("self"), c.value("index")
        if x.rank == 0 or index.dtype != "i64" or c["reduce"] is not None:
            return None
        src = c["src"] if c["src"] is not None else c["value"]
        source = c.operand(src, x.dtype)
        if source.rank == 0:
            source = c.b.expand(source, index.dims)
        else:  # of a larger source, the part before the index's end
            for i, size in enumerate(index.dims):
                source = c.b.slice(source, i, 0, size)
        axis = c.axis("dim", x.rank)
        return c.b.op("scatter", [x, index, source], x.dtype, x.dims, axis=axis, kind=kind)

    return handler


TABLE: dict[str, Handler] = {
    "sum.default": _reduce("sum"),
    "sum.dim_IntList": _reduce("sum"),
    "mean.default": _reduce("mean"),
    "mean.dim": _reduce("mean"),
    "prod.default": _reduce("prod"),
    "prod.dim_int": _reduce("prod"),
    "max.default": _reduce("max"),
    "min.default": _reduce("min"),
    "amax.default": _amax("max"),
    "amin.default": _amax("min"),
    "max.dim": _extreme("max"),
    "min.dim": _extreme("min"),
    "logsumexp.default": _logsumexp,
    "any.default": _reduce("any"),
    "any.dim": _reduce("any"),
    "any.dims": _reduce("any"),
    "all.default": _reduce("all"),
    "_is_all_true.default": _reduce("all"),
    "_is_any_true.default": _reduce("any"),
    "all.dim": _reduce("all"),
    "all.dims": _reduce("all"),
    "argmax.default": _reduce("argmax"),
    "argmin.default": _reduce("argmin"),
    "softmax.int": _softmax(0),
    "_softmax.default": _softmax(0),
    "log_softmax.int": _softmax(1),
    "_log_softmax.default": _softmax(1),
    "cumsum.default": _cumsum,
    "var.correction": _variance(root=False),
    "var.dim": _variance(root=False),
    "std.correction": _variance(root=True),
    "std.dim": _variance(root=True),
    "var.default": _variance(root=False),
    "std.default": _variance(root=True),
    **{f"var_mean.{kind}": _with_mean(root=False) for kind in ("correction", "dim", "default")},
    **{f"std_mean.{kind}": _with_mean(root=True) for kind in ("correction", "dim", "default")},
    "linalg_vector_norm.default": _vector_norm,
    "norm.ScalarOpt_dim": _vector_norm,
    "nanmean.default": _nanmean,
    "trace.default": _trace,
    "sort.default": _sort,
    "sort.stable": _sort,
    "topk.default": _topk,
    "gather.default": _gather,
    "index_select.default": _index_select,
    "index.Tensor": _index,
    "index_copy.default": _index_copy,
    "scatter.src": _scatter("set"),
    "scatter.value": _scatter("set"),
    "scatter_add.default": _scatter("add"),
}
