"""Convolutions, pools, group norms and interpolation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rm_abstract.capture.dims import floordiv, product
from rm_abstract.capture.ir_builder import Shape, Value
from rm_abstract.capture.op_map.adaptive import adaptive, cubic, nearest
from rm_abstract.capture.op_map.call import Call, Handler
from rm_abstract.guards import torch_state

# What our kernels compute fast: on the host, f16 and f64 images stay with PyTorch's kernels.
_FAST = ("f32", "bf16")
_FAST_ON_GPU = (*_FAST, "f16")


def _is_fast(c: Call, dtype: str) -> bool:
    return dtype in (_FAST_ON_GPU if c.b.on_gpu else _FAST)


def _precision(c: Call, dtype: str) -> dict[str, Any]:
    """On a GPU, torch may round the operands of float32 convolutions to tf32: so may we then."""
    if dtype != "f32" or not c.b.on_gpu:
        return {}
    c.b.asks_tf32 = True
    return {"tf32": 1} if torch_state.allows_tf32_convolutions() else {}


def _ints(value: Any, count: int, otherwise: int) -> list[int] | None:
    """An int or a list of one or `count` ints as a list; None when one is no plain integer."""
    if value is None or value == []:
        return [otherwise] * count
    given = list(value) if isinstance(value, (list, tuple)) else [value]
    given = given * count if len(given) == 1 else given
    plain = len(given) == count and all(isinstance(v, int) for v in given)
    return given if plain else None


def _batched(c: Call, x: Value, rank: int) -> Value:
    return x if x.rank == rank else c.b.reshape(x, [1, *x.dims])


def _convolve(c: Call, transposed: bool, padding: Any) -> Value | None:
    x, w, bias = c.value("input"), c.value("weight"), c["bias"]
    axes = w.rank - 2
    if not _is_fast(c, x.dtype) or w.dtype != x.dtype or not 1 <= axes <= 3:
        return None
    if not all(isinstance(d, int) and d > 0 for d in w.dims):
        return None
    stride, dilation = _ints(c["stride"], axes, 1), _ints(c["dilation"], axes, 1)
    extra = _ints(c["output_padding"], axes, 0)
    kernel = [int(d) for d in w.dims[2:]]
    if padding == "same" and dilation is not None:
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        ends = [*(t // 2 for t in total), *(t - t // 2 for t in total)]
    else:
        begin = _ints(0 if padding == "valid" else padding, axes, 0)
        ends = [] if begin is None else [*begin, *begin]
    if stride is None or dilation is None or extra is None or not ends:
        return None
    groups = int(c["groups"])
    images = _batched(c, x, w.rank)
    dims = c.dims if x.rank == w.rank else (1, *c.dims)
    attrs: dict[str, Any] = {"stride": stride, "padding": ends, "dilation": dilation}
    attrs |= _precision(c, x.dtype)
    if transposed:
        attrs |= {"transposed": 1, "output_padding": extra}
    operands = [images, w] if bias is None else [images, w, bias]
    y = c.b.op("conv", operands, c.dtype, dims, groups=groups, **attrs)
    return c.b.reshape(y, c.dims)


def _conv(c: Call) -> Value | None:
    return _convolve(c, False, c["padding"])


def _conv_transpose(c: Call) -> Value | None:
    return _convolve(c, True, c["padding"])


def _convolution(c: Call) -> Value | None:
    return _convolve(c, bool(c["transposed"]), c["padding"])


def _ends(c: Call, x: Value, spec: dict[str, list[int]]) -> list[int] | None:
    """Padding at begins and ends; ceil_mode is more (or less) of it at the ends."""
    begin = spec["padding"]
    if not c["ceil_mode"]:
        return [*begin, *begin]
    ends = []
    for a, start in enumerate(begin):
        size, count = x.dims[2 + a], c.dims[len(c.dims) - len(begin) + a]
        if not isinstance(size, int) or not isinstance(count, int):
            return None
        reach = (count - 1) * spec["stride"][a] + spec["dilation"][a] * (spec["kernel"][a] - 1) + 1
        ends.append(reach - size - start)
    return [*begin, *ends]


def _pool(c: Call, kind: str, axes: int, **attrs: Any) -> Value | None:
    x = c.value("self")
    kernel = _ints(c["kernel_size"], axes, 1)
    if kernel is None or x.dtype not in (*_FAST, "f16", "f64"):
        return None
    stride = kernel if c["stride"] in (None, []) else _ints(c["stride"], axes, 1)
    padding, dilation = _ints(c["padding"], axes, 0), _ints(c["dilation"], axes, 1)
    if stride is None or padding is None or dilation is None:
        return None
    images = _batched(c, x, axes + 2)
    spec = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    ends = _ends(c, images, spec)
    if ends is None:
        return None
    dims = c.dims if x.rank == axes + 2 else (1, *c.dims)
    spec["padding"] = ends
    y = c.b.op("pool", [images], c.dtype, dims, kind=kind, **spec, **attrs)
    return c.b.reshape(y, c.dims)


def _max_pool(axes: int) -> Handler:
    return lambda c: _pool(c, "max", axes)


def _max_pool_with_indices(axes: int) -> Handler:
    def handler(c: Call) -> Sequence[Value | None] | None:
        y = _pool(c, "max", axes)
        return None if y is None else [y, None]

    return handler


def _avg_pool(axes: int) -> Handler:
    def handler(c: Call) -> Value | None:
        divisor = c["divisor_override"]
        return _pool(
            c,
            "mean",
            axes,
            count_include_pad=int(bool(c["count_include_pad"])),
            divisor=0 if divisor is None else int(divisor),
        )

    return handler


def _adaptive(c: Call, kind: str, axes: int) -> Value | None:
    """To one element: a reduction. To a divisor of the size: a pool without overlap."""
    x = c.value("self")
    sizes = c["output_size"]
    wanted = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]
    if x.dtype not in (*_FAST, "f16", "f64"):
        return None
    if x.rank != axes + 2:
        return adaptive(c, kind, axes)
    if all(isinstance(w, int) and w == 1 for w in wanted):
        return c.b.reduce(kind, x, range(2, x.rank), True, c.dtype)
    kernel = []
    for size, count in zip(x.dims[2:], c.dims[2:], strict=True):
        if not isinstance(size, int) or not isinstance(count, int) or count == 0 or size % count:
            return adaptive(c, kind, axes)
        kernel.append(size // count)
    return c.b.op(
        "pool",
        [x],
        c.dtype,
        c.dims,
        kind=kind,
        kernel=kernel,
        stride=kernel,
        padding=[0] * (2 * axes),
        dilation=[1] * axes,
    )


def _adaptive_avg(axes: int) -> Handler:
    return lambda c: _adaptive(c, "mean", axes)


def _adaptive_max(axes: int) -> Handler:
    def handler(c: Call) -> Sequence[Value | None] | None:
        y = _adaptive(c, "max", axes)
        return None if y is None else [y, None]

    return handler


def _normed(c: Call, groups: int, weight: Any, bias: Any) -> Value | None:
    x = c.value("input")
    operands = [x, weight, bias]
    if not _is_fast(c, x.dtype) or any(o is not None and o.dtype != x.dtype for o in operands):
        return None
    while operands[-1] is None:
        operands.pop()
    return c.b.op("group_norm", operands, c.dtype, x.dims, groups=groups, eps=float(c["eps"]))


def _group_norm(c: Call) -> Value | None:
    return _normed(c, int(c["num_groups"]), c["weight"], c["bias"])


def _native_group_norm(c: Call) -> Sequence[Value] | None:
    """The norm, and what it took away and multiplied by: [samples, groups]."""
    groups, x = int(c["group"]), c.value("input")
    y = _normed(c, groups, c["weight"], c["bias"])
    if y is None or x.dtype != "f32":
        return None
    lines = c.b.reshape(x, [*c.types[1][1], floordiv(product(x.dims[1:]), groups)])
    mean = c.b.reduce("mean", lines, [2], True, x.dtype)
    centred = c.b.binary("sub", lines, mean)
    variance = c.b.reduce("mean", c.b.binary("mul", centred, centred), [2], False, x.dtype)
    above = c.b.binary("add", variance, c.b.scalar(x.dtype, float(c["eps"])))
    return [y, c.b.reshape(mean, c.types[1][1]), c.b.unary("rsqrt", above)]


def _instance_norm(c: Call) -> Value | None:
    x = c.value("input")
    if not c["use_input_stats"] or x.rank < 3 or not isinstance(x.dims[1], int):
        return None
    return _normed(c, x.dims[1], c["weight"], c["bias"])


def _resize(c: Call, mode: str, axes: int, factors: Any) -> Value | None:
    x = c.value("input" if c["input"] is not None else "self")
    if not _is_fast(c, x.dtype) or x.rank != axes + 2:
        return None
    corners = bool(c["align_corners"])
    ratios = []
    for a in range(axes):
        size, count = x.dims[2 + a], c.dims[2 + a]
        factor = factors[a] if factors else None
        if factor and not corners:
            ratios.append(1.0 / factor)
            continue
        if not isinstance(size, int) or not isinstance(count, int) or size == 0 or count == 0:
            return None
        if corners and mode == "linear":
            ratios.append((size - 1) / (count - 1) if count > 1 else 0.0)
        else:
            ratios.append(size / count)
    attrs = {"align_corners": 1} if corners else {}
    return c.b.op(
        "resize", [x], c.dtype, c.dims, mode=mode, size=Shape(c.dims[2:]), ratio=ratios, **attrs
    )


def _resize_vec(mode: str, axes: int) -> Handler:
    return lambda c: _resize(c, mode, axes, c["scale_factors"])


def _nearest_vec(axes: int) -> Handler:
    """By our kernel where the ratio is known, else by computed places."""

    def handler(c: Call) -> Value | None:
        y = _resize(c, "nearest", axes, c["scale_factors"])
        return nearest(axes, 0.0)(c) if y is None else y  # type: ignore[return-value]

    return handler


def _resize_sized(mode: str, axes: int) -> Handler:
    """The overload with one factor an axis (`scales`, or `scales_d`, `scales_h`, `scales_w`)."""
    names = ["scales"] if axes == 1 else ["scales_d", "scales_h", "scales_w"][-axes:]

    def handler(c: Call) -> Value | None:
        return _resize(c, mode, axes, [c[name] for name in names])

    return handler


def _pixel_shuffle(c: Call) -> Value | None:
    """[*, C r r, H, W] -> [*, C, H r, W r]."""
    x, r = c.value("self"), int(c["upscale_factor"])
    if x.rank < 3 or not isinstance(x.dims[-3], int):
        return None
    channels, height, width = x.dims[-3] // (r * r), x.dims[-2], x.dims[-1]
    batch = product(x.dims[:-3])
    split = c.b.reshape(x, [batch, channels, r, r, height, width])
    return c.b.reshape(c.b.permute(split, [0, 1, 4, 2, 5, 3]), c.dims)


def _pixel_unshuffle(c: Call) -> Value | None:
    """[*, C, H r, W r] -> [*, C r r, H, W]."""
    x, r = c.value("self"), int(c["downscale_factor"])
    channels, height, width = c.dims[-3], c.dims[-2], c.dims[-1]
    if x.rank < 3 or not isinstance(channels, int):
        return None
    batch = product(x.dims[:-3])
    split = c.b.reshape(x, [batch, channels // (r * r), height, r, width, r])
    return c.b.reshape(c.b.permute(split, [0, 1, 3, 5, 2, 4]), c.dims)


def _channel_shuffle(c: Call) -> Value | None:
    x, groups = c.value("self"), int(c["groups"])
    if x.rank < 3 or not isinstance(x.dims[1], int):
        return None
    split = c.b.reshape(x, [x.dims[0], groups, x.dims[1] // groups, *x.dims[2:]])
    order = [0, 2, 1, *range(3, split.rank)]
    return c.b.reshape(c.b.permute(split, order), c.dims)


TABLE: dict[str, Handler] = {
    "convolution.default": _convolution,
    "group_norm.default": _group_norm,
    "native_group_norm.default": _native_group_norm,
    "instance_norm.default": _instance_norm,
    "pixel_shuffle.default": _pixel_shuffle,
    "pixel_unshuffle.default": _pixel_unshuffle,
    "channel_shuffle.default": _channel_shuffle,
}
for _axes in (1, 2, 3):
    TABLE |= {
        f"conv{_axes}d.default": _conv,
        f"conv{_axes}d.padding": _conv,
        f"conv_transpose{_axes}d.default" if _axes == 1 else f"conv_transpose{_axes}d.input": (
            _conv_transpose
        ),
        f"max_pool{_axes}d.default": _max_pool(_axes),
        f"max_pool{_axes}d_with_indices.default": _max_pool_with_indices(_axes),
        f"avg_pool{_axes}d.default": _avg_pool(_axes),
        f"adaptive_avg_pool{_axes}d.default": _adaptive_avg(_axes),
        f"adaptive_max_pool{_axes}d.default": _adaptive_max(_axes),
        f"upsample_nearest{_axes}d.vec": _nearest_vec(_axes),
        f"_upsample_nearest_exact{_axes}d.vec": nearest(_axes, 0.5),
        f"upsample_nearest{_axes}d.default": _resize_sized("nearest", _axes),
    }
TABLE["upsample_bicubic2d.vec"] = cubic(None)
TABLE["upsample_bicubic2d.default"] = cubic(("scales_h", "scales_w"))
for _name, _axes in (("linear1d", 1), ("bilinear2d", 2), ("trilinear3d", 3)):
    TABLE[f"upsample_{_name}.vec"] = _resize_vec("linear", _axes)
    TABLE[f"upsample_{_name}.default"] = _resize_sized("linear", _axes)
