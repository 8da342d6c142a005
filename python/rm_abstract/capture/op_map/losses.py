"""Losses as the operators they are made of. Formulas as in torch's documentation of each.

Where a formula has a kink that its function has not (the logits' binary cross entropy at 0), a form
without it is used: these nodes are differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rm_abstract.capture.dims import product
from rm_abstract.capture.ir_builder import Value
from rm_abstract.capture.op_map.call import Call, Handler

_NONE, _MEAN, _SUM = 0, 1, 2


def _reduced(c: Call, loss: Value) -> Value:
    how = c["reduction"]
    if how == _NONE:
        return c.finish(loss)
    kind = "mean" if how in (None, _MEAN) else "sum"
    axes = list(range(loss.rank))
    return c.b.reduce(kind, loss, axes, False, loss.dtype) if axes else loss


def _scaled(c: Call, x: Value, factor: float) -> Value:
    return c.b.binary("mul", x, c.b.scalar(x.dtype, factor))


def _pointwise(formula: Callable[[Call, Value, Value], Value | None]) -> Handler:
    """A loss of each element of `self` and `target`, which broadcast."""

    def handler(c: Call) -> Value | None:
        x, target = c.value("self"), c.value("target")
        if x.dtype != c.dtype or x.dtype not in ("f32", "f64"):
            return None
        loss = formula(c, x, c.b.cast(target, x.dtype))
        return None if loss is None else _reduced(c, loss)

    return handler


def _squared(c: Call, x: Value, target: Value) -> Value:
    d = c.b.binary("sub", x, target)
    return c.b.binary("mul", d, d)


def _absolute(c: Call, x: Value, target: Value) -> Value:
    return c.b.unary("abs", c.b.binary("sub", x, target))


def _parabola(c: Call, z: Value, bound: float, height: float, slope: float) -> Value:
    """height z² up to `bound`, from there on a line of this slope that continues it."""
    inner = _scaled(c, c.b.binary("mul", z, z), height)
    offset = slope * bound - height * bound * bound
    outer = c.b.binary("sub", _scaled(c, z, slope), c.b.scalar(z.dtype, offset))
    return c.b.where(c.b.binary("le", z, c.b.scalar(z.dtype, bound), "bool"), inner, outer)


def _huber(c: Call, x: Value, target: Value) -> Value:
    delta = float(c["delta"])
    return _parabola(c, _absolute(c, x, target), delta, 0.5, delta)


def _smooth_l1(c: Call, x: Value, target: Value) -> Value:
    beta = float(c["beta"])
    z = _absolute(c, x, target)
    return z if beta == 0 else _parabola(c, z, beta, 0.5 / beta, 1.0)


def _bce_logits(c: Call, x: Value, target: Value) -> Value | None:
    """(1 - t) x + (1 + (w - 1) t) softplus(-x) with w = pos_weight."""
    if any(isinstance(c[n], Value) and c[n].dtype != x.dtype for n in ("weight", "pos_weight")):
        return None
    one = c.b.scalar(x.dtype, 1.0)
    tail = c.b.unary("softplus", c.b.unary("neg", x))
    if c["pos_weight"] is not None:
        more = c.b.binary("mul", c.b.binary("sub", c.value("pos_weight"), one), target)
        tail = c.b.binary("mul", c.b.binary("add", more, one), tail)
    loss = c.b.binary("add", c.b.binary("mul", c.b.binary("sub", one, target), x), tail)
    return loss if c["weight"] is None else c.b.binary("mul", loss, c.value("weight"))


def _kl(c: Call, x: Value, target: Value) -> Value:
    """t (log t - x), 0 where t is 0; with log_target exp(t) (t - x)."""
    if c["log_target"]:
        return c.b.binary("mul", c.b.unary("exp", target), c.b.binary("sub", target, x))
    zero = c.b.scalar(x.dtype, 0.0)
    nothing = c.b.binary("eq", target, zero, "bool")
    log = c.b.unary("log", c.b.where(nothing, c.b.scalar(x.dtype, 1.0), target))
    own = c.b.binary("mul", target, log)
    return c.b.binary("sub", own, c.b.binary("mul", target, x))


def _rows(c: Call, x: Value) -> Value:
    """[N,C,...] with the classes last, as [rows, classes]; [C] as one row."""
    if x.rank == 1:
        return c.b.reshape(x, [1, *x.dims])
    last = c.b.permute(x, [0, *range(2, x.rank), 1])
    return c.b.reshape(last, [product(last.dims[:-1]), last.dims[-1]])


def _supported(c: Call, x: Value) -> bool:
    weight = c["weight"]
    return x.dtype in ("f32", "f64") and (weight is None or weight.dtype == x.dtype)


def _of_classes(c: Call, log_p: Value, smoothing: float) -> Value:
    """The loss for class numbers; `log_p` [rows, classes]. Its mean is weighted by the rows'
    classes, as torch's is; without weights each row counts as one."""
    b, dtype, weight = c.b, log_p.dtype, c["weight"]
    target = b.cast(c.value("target"), "i64")
    ids = b.reshape(target, [log_p.dims[0], 1])
    zero = b.scalar(dtype, 0.0)
    counts = b.binary("ne", ids, b.scalar("i64", int(c["ignore_index"])), "bool")
    safe = b.where(counts, ids, b.scalar("i64", 0))
    weighed = log_p if weight is None else b.binary("mul", log_p, weight)
    picked = b.op("gather", [weighed, safe], dtype, ids.dims, axis=1)
    loss = b.unary("neg", picked)
    if smoothing:
        even = b.unary("neg", b.reduce("mean", weighed, [1], True, dtype))
        loss = b.binary("add", _scaled(c, loss, 1.0 - smoothing), _scaled(c, even, smoothing))
    loss = b.where(counts, loss, zero)
    if c["reduction"] == _NONE:
        return b.reshape(loss, c.dims)
    total = b.reduce("sum", loss, [0, 1], False, dtype)
    if c["reduction"] == _SUM:
        return total
    shares = b.cast(counts, dtype)
    if weight is not None:
        own = b.op("gather", [b.reshape(weight, [log_p.dims[1], 1]), safe], dtype, ids.dims, axis=0)
        shares = b.where(counts, own, zero)
    return b.binary("div", total, b.reduce("sum", shares, [0, 1], False, dtype))


def _cross_entropy(c: Call) -> Value | None:
    x, target = c.value("self"), c.value("target")
    if not _supported(c, x):
        return None
    rows = _rows(c, x)
    log_p = c.b.op("softmax", [rows], x.dtype, rows.dims, axis=1, log=1)
    smoothing = float(c["label_smoothing"] or 0.0)
    if not target.is_float:
        return _of_classes(c, log_p, smoothing)
    chosen: Any = _rows(c, c.b.cast(target, x.dtype))
    if smoothing:
        classes = x.dims[1 if x.rank > 1 else 0]
        if not isinstance(classes, int):
            return None
        even = c.b.scalar(x.dtype, smoothing / classes)
        chosen = c.b.binary("add", _scaled(c, chosen, 1.0 - smoothing), even)
    if c["weight"] is not None:
        chosen = c.b.binary("mul", chosen, c.value("weight"))
    product_ = c.b.binary("mul", chosen, log_p)
    loss = c.b.unary("neg", c.b.reduce("sum", product_, [1], False, x.dtype))
    return c.b.reshape(loss, c.dims) if c["reduction"] == _NONE else _reduced(c, loss)


def _nll(c: Call) -> Value | None:
    x = c.value("self")
    if not _supported(c, x):
        return None
    return _of_classes(c, _rows(c, x), 0.0)


def _bce(c: Call) -> None:
    """The checks that torch leaves out where it writes this loss in other operators, as it does
    here. In training it stays whole."""
    x, target, b = c.value("self"), c.value("target"), c.b
    if b.for_training or x.dtype != target.dtype:
        return
    zero, one = b.scalar(x.dtype, 0), b.scalar(x.dtype, 1)
    for what, p in (("input", x), ("target", target)):
        low, high = b.binary("ge", p, zero, "bool"), b.binary("le", p, one, "bool")
        b.check_all(b.binary("and", low, high), f"binary_cross_entropy: {what} between 0 and 1")


TABLE: dict[str, Handler] = {
    "mse_loss.default": _pointwise(_squared),
    "l1_loss.default": _pointwise(_absolute),
    "huber_loss.default": _pointwise(_huber),
    "smooth_l1_loss.default": _pointwise(_smooth_l1),
    "binary_cross_entropy.default": _bce,
    "binary_cross_entropy_with_logits.default": _pointwise(_bce_logits),
    "kl_div.default": _pointwise(_kl),
    "cross_entropy_loss.default": _cross_entropy,
    "nll_loss.default": _nll,
    "nll_loss_nd.default": _nll,
    "nll_loss2d.default": _nll,
}
