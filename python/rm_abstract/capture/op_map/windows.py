"""im2col and col2im: windows of an image as columns, and columns added up into an image."""

from __future__ import annotations

from rm_abstract.capture.dims import Dim, floordiv, plus, product, times
from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call, Handler

_MOST_SLICES = 64  # places of a window that are slices of the image; more are gathered


def _window(c: Call) -> tuple[list[int], ...] | None:
    """kernel, dilation, padding and stride, of two axes each; None where one is no plain number."""
    found = []
    for name in ("kernel_size", "dilation", "padding", "stride"):
        given = c[name]
        sizes = list(given) * 2 if len(given) == 1 else list(given)
        if len(sizes) != 2 or not all(isinstance(n, int) for n in sizes):
            return None
        found.append([int(n) for n in sizes])
    return tuple(found)


def _im2col(c: Call) -> Value | None:
    """[N,C,H,W] -> [N, C kh kw, places]: column p has what the window at place p sees."""
    window, x, b = _window(c), c.value("self"), c.b
    if window is None:
        return None
    kernel, dilation, padding, stride = window
    images = x if x.rank == 4 else b.reshape(x, [1, *x.dims])
    counts: list[Dim] = []
    for i, axis in enumerate((2, 3)):
        size, reach = images.dims[axis], dilation[i] * (kernel[i] - 1) + 1
        wide = plus(size, 2 * padding[i])
        counts.append(plus(floordiv(plus(wide, -reach), stride[i]), 1))
        if padding[i]:
            dims = list(images.dims)
            dims[axis] = padding[i]
            edge = b.full(x.dtype, dims, 0)
            dims[axis] = wide
            images = b.concat([edge, images, edge], axis, dims)
    batch, channels = images.dims[:2]
    places = times(counts[0], counts[1])
    taps = kernel[0] * kernel[1]
    if taps > _MOST_SLICES:
        rows, columns = (
            b.binary(
                "add",
                b.reshape(b.iota(kernel[i], 0, dilation[i]), [kernel[i], 1]),
                b.iota(counts[i], 0, stride[i]),
            )
            for i in (0, 1)
        )
        rows = b.reshape(rows, [kernel[0], 1, counts[0], 1])
        columns = b.reshape(columns, [1, kernel[1], 1, counts[1]])
        dims = [batch, channels, *kernel, *counts]
        y = b.op("index", [images, rows, columns], x.dtype, dims, axes=[2, 3])
    else:
        seen = []
        for i in range(kernel[0]):
            rows = b.slice(images, 2, i * dilation[0], counts[0], stride[0])
            for j in range(kernel[1]):
                part = b.slice(rows, 3, j * dilation[1], counts[1], stride[1])
                seen.append(b.reshape(part, [batch, channels, 1, places]))
        y = b.concat(seen, 2, [batch, channels, taps, places])
    return b.reshape(y, c.dims)


def _col2im(c: Call) -> Value | None:
    """The transpose of im2col: what windows have of one element is added up."""
    window, x, b = _window(c), c.value("self"), c.b
    if window is None or x.dtype not in ("f32", "f64") or b.for_training or b.on_gpu:
        return None
    kernel, dilation, padding, stride = window
    size = list(c.dims[-2:])
    wide = [plus(size[i], 2 * padding[i]) for i in (0, 1)]
    at = []
    for i in (0, 1):
        reach = dilation[i] * (kernel[i] - 1) + 1
        count = plus(floordiv(plus(wide[i], -reach), stride[i]), 1)
        tap = b.reshape(b.iota(kernel[i], 0, dilation[i]), [kernel[i], 1])
        place = b.binary("add", tap, b.iota(count, 0, stride[i]))
        line = [kernel[0], 1, count, 1] if i == 0 else [1, kernel[1], 1, count]
        at.append(b.reshape(place, line))
    index = b.binary("add", b.binary("mul", at[0], b.dim_value(wide[1])), at[1])
    count = product(index.dims)
    batch = c.dims[:-2]
    index = b.expand(b.reshape(index, [*([1] * len(batch)), count]), [*batch, count])
    zeros = b.full(x.dtype, [*batch, product(wide)], 0)
    source = b.reshape(x, [*batch, count])
    y = b.op("scatter", [zeros, index, source], x.dtype, zeros.dims, axis=len(batch), kind="add")
    y = b.reshape(y, [*batch, *wide])
    for i in (0, 1):
        y = b.slice(y, len(batch) + i, padding[i], size[i])
    return y


TABLE: dict[str, Handler] = {"im2col.default": _im2col, "col2im.default": _col2im}
