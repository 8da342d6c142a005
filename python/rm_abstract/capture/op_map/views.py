"""Shape operators: views, splits, joins, padding. Result shapes come from the export."""

from __future__ import annotations

from collections.abc import Sequence

from rm_abstract.capture.dims import Dim, as_dim, plus
from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call, Handler
from rm_abstract.capture.op_map.indexing import padded, turned

_END = 2**62  # torch writes "to the end" as 2**63 - 1


def _reshape(c: Call) -> Value:
    return c.b.reshape(c.value("self"), c.dims)


_BYTES = {"f64": 8, "i64": 8, "u64": 8, "f32": 4, "i32": 4, "u32": 4, "i8": 1, "u8": 1, "bool": 1}


def _view_as_type(c: Call) -> Value | None:
    """The same bits as another type of as many bytes; bytes as bool are left to PyTorch."""
    x = c.value("self")
    if x.dtype == c.dtype:
        return x
    if c.dtype == "bool" or _BYTES.get(x.dtype, 2) != _BYTES.get(c.dtype, 2):
        return None
    return c.b.op("bitcast", [x], c.dtype, x.dims)


def _permute(c: Call) -> Value:
    x = c.value("self")
    return c.b.permute(x, [int(a) % x.rank for a in c["dims"]] if x.rank else [])


def _swap(x: Value, i: int, j: int) -> list[int]:
    axes = list(range(x.rank))
    axes[i], axes[j] = axes[j], axes[i]
    return axes


def _transpose(c: Call) -> Value:
    x = c.value("self")
    if x.rank == 0:
        return x
    names = ("axis0", "axis1") if "axis0" in c.args else ("dim0", "dim1")  # swapaxes has its own
    first, second = (c.axis(name, x.rank) for name in names)
    return c.b.permute(x, _swap(x, first, second))


def _t(c: Call) -> Value:
    x = c.value("self")
    return c.b.permute(x, list(range(x.rank))[::-1])


def _movedim(c: Call) -> Value:
    x = c.value("self")
    src, dst = c["source"], c["destination"]
    src = [int(a) % x.rank for a in ([src] if isinstance(src, int) else src)]
    dst = [int(a) % x.rank for a in ([dst] if isinstance(dst, int) else dst)]
    axes = [-1] * x.rank
    for s, d in zip(src, dst, strict=True):
        axes[d] = s
    rest = iter(a for a in range(x.rank) if a not in src)
    return c.b.permute(x, [a if a >= 0 else next(rest) for a in axes])


def _expand(c: Call) -> Value:
    return c.b.expand(c.value("self"), c.dims)


def start_of(start: object, dim: Dim, size: Dim) -> Dim:
    """Where a slice starts: torch's clamping, with the size the export proved."""
    if isinstance(size, int) and size == 0:
        return 0
    begin: Dim = 0 if start is None else as_dim(start)
    if isinstance(begin, int) and begin < 0:
        begin = plus(dim, begin)
        if isinstance(begin, int):
            begin = max(begin, 0)
    elif not isinstance(begin, int) and begin.is_negative:
        begin = plus(dim, begin)
    return begin


def _slice(c: Call) -> Value:
    x = c.value("self")
    axis = c.axis("dim", x.rank)
    size = c.dims[axis]
    step = c["step"] or 1
    return c.b.slice(x, axis, start_of(c["start"], x.dims[axis], size), size, step)


def _narrow(c: Call) -> Value:
    x = c.value("self")
    axis = c.axis("dim", x.rank)
    return c.b.slice(x, axis, start_of(c["start"], x.dims[axis], c.dims[axis]), c.dims[axis])


def _unfold(c: Call) -> Value:
    """Windows of one axis, `step` apart; what is in them is the last axis."""
    x, size = c.value("self"), c.dims[-1]
    if x.rank == 0:
        return c.b.expand(c.b.reshape(x, [1]), c.dims)
    axis = c.axis("dimension", x.rank)
    starts = c.b.reshape(c.b.iota(c.dims[axis], 0, int(c["step"])), [c.dims[axis], 1])
    place = c.b.binary("add", starts, c.b.iota(size))
    dims = [*x.dims[:axis], *place.dims, *x.dims[axis + 1 :]]
    y = c.b.op("index", [x, place], x.dtype, dims, axes=[axis])
    return c.b.permute(y, [*(i for i in range(y.rank) if i != axis + 1), axis + 1])


def _select(c: Call) -> Value:
    x = c.value("self")
    axis = c.axis("dim", x.rank)
    part = c.b.slice(x, axis, start_of(c["index"], x.dims[axis], 1), 1)
    return c.b.reshape(part, c.dims)


def _split(c: Call) -> Sequence[Value]:
    x = c.value("self")
    axis = c.axis("dim", x.rank)
    parts, start = [], as_dim(0)
    for _, dims in c.types:
        parts.append(c.b.slice(x, axis, start, dims[axis]))
        start = plus(start, dims[axis])
    return parts


def _unbind(c: Call) -> Sequence[Value]:
    x = c.value("self")
    axis = c.axis("dim", x.rank)
    return [c.b.reshape(c.b.slice(x, axis, i, 1), dims) for i, (_, dims) in enumerate(c.types)]


def _cat(c: Call) -> Value:
    rank = len(c.dims)
    # torch skips the legacy empty tensor of shape [0] whatever the rank of the others.
    parts = [v for v in c["tensors"] if not (v.rank == 1 and v.dims[0] == 0 and rank > 1)]
    return c.b.concat([c.b.cast(v, c.dtype) for v in parts], c.axis("dim", rank), c.dims)


def _diff(c: Call) -> Value | None:
    """x[1:] - x[:-1] of the joined operands; first order, and not of bool (torch: xor)."""
    x = c.value("self")
    axis = c.axis("dim", x.rank)
    parts = [v for v in (c["prepend"], x, c["append"]) if v is not None]
    if (c["n"] or 1) != 1 or c.dtype == "bool":
        return None
    size = c.dims[axis]
    if size == 0:  # of one element, or of none, as before
        return c.b.full(c.dtype, c.dims, 0)
    dims = [*c.dims[:axis], plus(size, 1), *c.dims[axis + 1 :]]
    joined = c.b.concat([c.b.cast(v, c.dtype) for v in parts], axis, dims)
    after, before = c.b.slice(joined, axis, 1, size), c.b.slice(joined, axis, 0, size)
    return c.b.op("sub", [after, before], c.dtype, c.dims)


def _stack(c: Call) -> Value:
    rank = len(c.dims)
    axis = c.axis("dim", rank)
    one = [*c.dims[:axis], 1, *c.dims[axis + 1 :]]
    parts = [c.b.reshape(c.b.cast(v, c.dtype), one) for v in c["tensors"]]
    return c.b.concat(parts, axis, c.dims)


def _repeat(c: Call) -> Value:
    x = c.value("self")
    counts = [as_dim(r) for r in c["repeats"]]
    x = c.b.reshape(x, [1] * (len(counts) - x.rank) + list(x.dims))
    pairs: list[Dim] = []
    wide: list[Dim] = []
    for count, dim in zip(counts, x.dims, strict=True):
        pairs += [1, dim]
        wide += [count, dim]
    return c.b.reshape(c.b.expand(c.b.reshape(x, pairs), wide), c.dims)


def _repeat_interleave(c: Call) -> Value | None:
    x = c.value("self")
    if c["dim"] is None or isinstance(c["repeats"], Value):
        return None
    axis = c.axis("dim", x.rank)
    inner = [*x.dims[: axis + 1], 1, *x.dims[axis + 1 :]]
    wide = [*x.dims[: axis + 1], as_dim(c["repeats"]), *x.dims[axis + 1 :]]
    return c.b.reshape(c.b.expand(c.b.reshape(x, inner), wide), c.dims)


def _pad(c: Call) -> Value | None:
    pads = [as_dim(p) for p in c["pad"]]
    if c["mode"] not in (None, "constant"):
        return padded(c, c.value("self"), pads, c["mode"])
    fill = c["value"]
    x = c.value("self")
    for i in range(len(pads) // 2):
        axis = x.rank - 1 - i
        for before in (True, False):
            pad = pads[2 * i + (0 if before else 1)]
            if isinstance(pad, int) and pad == 0:
                continue
            if not isinstance(pad, int):
                return None
            dims = list(x.dims)
            if pad < 0:
                size = plus(dims[axis], pad)
                x = c.b.slice(x, axis, -pad if before else 0, size)
                continue
            dims[axis] = pad
            edge = c.b.full(x.dtype, dims, fill if fill is not None else 0)
            dims[axis] = plus(x.dims[axis], pad)
            x = c.b.concat([edge, x] if before else [x, edge], axis, dims)
    return x


def _roll(c: Call) -> Value | None:
    x = c.value("self")
    if not c["dims"]:
        return None
    for shift, axis in zip(c["shifts"], c["dims"], strict=True):
        axis = int(axis) % x.rank
        size = x.dims[axis]
        if not isinstance(size, int) or not isinstance(shift, int):
            x = turned(c, x, axis, shift)
            continue
        cut = (-shift) % size if size else 0
        if cut:
            tail = c.b.slice(x, axis, cut, size - cut)
            x = c.b.concat([tail, c.b.slice(x, axis, 0, cut)], axis, x.dims)
    return x


def _shift(sign: int) -> Handler:
    """fftshift: the middle comes first; ifftshift is its inverse."""

    def handler(c: Call) -> Value:
        x = c.value("self")
        for axis in c.axes("dim", x.rank):
            size = c.b.dim_value(x.dims[axis])
            half = c.b.binary("floor_div", size, c.b.scalar("i64", 2))
            x = turned(c, x, axis, half if sign > 0 else c.b.unary("neg", half))
        return x

    return handler


def _copy(c: Call) -> Value:
    return c.finish(c.value("src"))


def _triangle(upper: bool) -> Handler:
    def handler(c: Call) -> Value:
        x = c.value("self")
        rows = c.b.reshape(c.b.iota(x.dims[-2]), [x.dims[-2], 1])
        cols = c.b.iota(x.dims[-1], start=-as_dim(c["diagonal"]))
        keep = c.b.binary("ge" if upper else "le", cols, rows, "bool")
        return c.b.where(keep, x, c.b.scalar(x.dtype, 0))

    return handler


def _select_scatter(c: Call) -> Value | None:
    x = c.value("self")
    axis = c.axis("dim", x.rank)
    one = [*x.dims[:axis], 1, *x.dims[axis + 1 :]]
    src = c.b.expand(c.b.reshape(c.b.cast(c.value("src"), x.dtype), one), one)
    return _replace(c, x, src, axis, start_of(c["index"], x.dims[axis], 1))


def _slice_scatter(c: Call) -> Value | None:
    x, src = c.value("self"), c.b.cast(c.value("src"), c.dtype)
    axis = c.axis("dim", x.rank)
    if c["step"] not in (None, 1):
        return None
    return _replace(c, x, src, axis, start_of(c["start"], x.dims[axis], src.dims[axis]))


def _replace(c: Call, x: Value, src: Value, axis: int, start: Dim) -> Value:
    """x with `src` written at `start` along one axis."""
    after = plus(start, src.dims[axis])
    rest = plus(x.dims[axis], -after)
    parts = [c.b.slice(x, axis, 0, start)] if start != 0 else []
    parts.append(src)
    if rest != 0:
        parts.append(c.b.slice(x, axis, after, rest))
    return c.b.concat(parts, axis, x.dims)


def _swap_last(c: Call) -> Value:
    x = c.value("self")
    return c.b.permute(x, [*range(x.rank - 2), x.rank - 1, x.rank - 2])


def _broadcast_tensors(c: Call) -> list[Value]:
    return [c.b.expand(t, dims) for t, (_, dims) in zip(c["tensors"], c.types, strict=True)]


TABLE: dict[str, Handler] = {
    "mT.default": _swap_last,
    "broadcast_tensors.default": _broadcast_tensors,
    **dict.fromkeys(
        [
            "view.default",
            "reshape.default",
            "_unsafe_view.default",
            "view_as.default",
            "reshape_as.default",
            "flatten.using_ints",
            "unflatten.int",
            "unsqueeze.default",
            "squeeze.default",
            "squeeze.dim",
            "squeeze.dims",
            *(f"atleast_{rank}d.default" for rank in (1, 2, 3)),
        ],
        _reshape,
    ),
    "permute.default": _permute,
    "view.dtype": _view_as_type,
    "transpose.int": _transpose,
    "swapaxes.default": _transpose,
    "t.default": _t,
    "numpy_T.default": _t,
    "movedim.int": _movedim,
    "movedim.intlist": _movedim,
    "expand.default": _expand,
    "expand_as.default": _expand,
    "broadcast_to.default": _expand,
    "slice.Tensor": _slice,
    "narrow.default": _narrow,
    "narrow_copy.default": _narrow,
    **dict.fromkeys(["unfold.default", "unfold_copy.default"], _unfold),
    "select.int": _select,
    "split.Tensor": _split,
    "split.sizes": _split,
    "split_with_sizes.default": _split,
    "chunk.default": _split,
    "tensor_split.sections": _split,
    "unbind.int": _unbind,
    "cat.default": _cat,
    "concat.default": _cat,
    "stack.default": _stack,
    "diff.default": _diff,
    "repeat.default": _repeat,
    "repeat_interleave.self_int": _repeat_interleave,
    "constant_pad_nd.default": _pad,
    "pad.default": _pad,
    "roll.default": _roll,
    "fft_fftshift.default": _shift(1),
    "fft_ifftshift.default": _shift(-1),
    "copy.default": _copy,
    "tril.default": _triangle(upper=False),
    "triu.default": _triangle(upper=True),
    "select_scatter.default": _select_scatter,
    "slice_scatter.default": _slice_scatter,
}
