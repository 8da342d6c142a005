"""Functions of tensors: every one is a few operators of docs/operators.md, asked of the backend.

Shapes are in row order, ``*`` is any number of leading axes. Operands of one function have one
floating type; class numbers and ids are i64 or i32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rm_abstract.base.errors import Error
from rm_abstract.framework.programs import Ints
from rm_abstract.framework.random import Generator, default_generator
from rm_abstract.framework.tensor import Tensor, apply, axis_of, move, no_grad

__all__ = [
    "abs",
    "avg_pool2d",
    "batch_norm",
    "binary_cross_entropy_with_logits",
    "concat",
    "conv2d",
    "cos",
    "cross_entropy",
    "dropout",
    "embedding",
    "erf",
    "exp",
    "gelu",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "linear",
    "log",
    "log_softmax",
    "matmul",
    "max_pool2d",
    "maximum",
    "minimum",
    "mse_loss",
    "relu",
    "rms_norm",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "sin",
    "softmax",
    "softplus",
    "sqrt",
    "stack",
    "tanh",
    "where",
]

# ---- element by element -------------------------------------------------------------------------


def relu(x: Tensor) -> Tensor:
    return apply("relu", (x,))


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """``approximate``: "none" (by erf) or "tanh". Raises ValueError for another."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"[gelu] expected 'none' or 'tanh', got {approximate!r}")
    return apply("gelu" if approximate == "none" else "gelu_tanh", (x,))


def silu(x: Tensor) -> Tensor:
    return apply("silu", (x,))


def sigmoid(x: Tensor) -> Tensor:
    return apply("sigmoid", (x,))


def tanh(x: Tensor) -> Tensor:
    return apply("tanh", (x,))


def softplus(x: Tensor) -> Tensor:
    return apply("softplus", (x,))


def exp(x: Tensor) -> Tensor:
    return apply("exp", (x,))


def log(x: Tensor) -> Tensor:
    return apply("log", (x,))


def sqrt(x: Tensor) -> Tensor:
    return apply("sqrt", (x,))


def sin(x: Tensor) -> Tensor:
    return apply("sin", (x,))


def cos(x: Tensor) -> Tensor:
    return apply("cos", (x,))


def erf(x: Tensor) -> Tensor:
    return apply("erf", (x,))


def abs(x: Tensor) -> Tensor:
    return apply("abs", (x,))


def maximum(a: Tensor, b: Tensor | float) -> Tensor:
    return apply("maximum", (a, b))


def minimum(a: Tensor, b: Tensor | float) -> Tensor:
    return apply("minimum", (a, b))


def where(condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """``a`` where the logical ``condition``, else ``b``; one of them at least is a tensor."""
    return apply("where", (condition, a, b))


# ---- products -----------------------------------------------------------------------------------


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """[*,M,K], [*,K,N] -> [*,M,N]."""
    return apply("matmul", (a, b))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[*,K], [N,K], [N]? -> [*,N]."""
    if x.ndim == 1:
        return linear(x.reshape(1, -1), weight, bias).reshape(-1)
    return apply("linear", (x, weight) if bias is None else (x, weight, bias))


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """[B,H,S,D], [B,G,T,D], [B,G,T,E] -> [B,H,S,E]; H is a multiple of G.

    ``mask`` broadcasts to [B,H,S,T]: logical (true: attend) or added. ``scale``: 1/sqrt(D).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    attrs = (("is_causal", int(is_causal)), ("scale", scale))
    return apply("sdpa", (q, k, v) if mask is None else (q, k, v, mask), attrs)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> Tensor:
    """[N,C,H,W], [K,C/groups,h,w], [K]? -> [N,K,H',W']. Raises ValueError for sizes that do not
    fit."""
    if padding < 0:
        raise ValueError(f"[conv2d] expected a padding of at least 0, got {padding}")
    attrs = (
        ("dilation", Ints((dilation,) * 2)),
        ("groups", groups),
        ("padding", Ints((padding,) * 4)),
        ("stride", Ints((stride,) * 2)),
    )
    return apply("conv", (x, weight) if bias is None else (x, weight, bias), attrs)


def avg_pool2d(x: Tensor, size: int) -> Tensor:
    """[N,C,H,W] -> [N,C,H/size,W/size]: means of squares side by side. Raises ValueError when the
    size does not divide H and W."""
    return _squares(x, size).mean((3, 5))


def max_pool2d(x: Tensor, size: int) -> Tensor:
    """[N,C,H,W] -> [N,C,H/size,W/size]: the largest of squares side by side; equal ones share the
    gradient. Raises ValueError when the size does not divide H and W."""
    return _squares(x, size).max((3, 5))


def _squares(x: Tensor, size: int) -> Tensor:
    n, c, h, w = x.shape
    if size < 1 or h % size or w % size:
        raise ValueError(f"[pool] expected sides that {size} divides, got {h} and {w}")
    return x.reshape(n, c, h // size, size, w // size, size)


# ---- rows ---------------------------------------------------------------------------------------


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    return apply("softmax", (x,), (("axis", axis_of(axis, x.ndim)), ("log", 0)))


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    return apply("softmax", (x,), (("axis", axis_of(axis, x.ndim)), ("log", 1)))


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """[*,N], [N]?, [N]? -> [*,N]: mean 0 and variance 1 over the last axis."""
    operands = tuple(t for t in (x, weight, bias) if t is not None)
    if weight is None and bias is not None:
        raise ValueError("[layer_norm] expected a weight beside the bias")
    return apply("layer_norm", operands, (("eps", float(eps)), ("num_axes", 1)))


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """[*,N], [N]? -> [*,N]."""
    operands = (x,) if weight is None else (x, weight)
    return apply("rms_norm", operands, (("eps", float(eps)), ("weight_offset", 0.0)))


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """ids [*], [V,N] -> [*,N]. Raises when an id is outside 0 .. V-1."""
    return apply("embedding", (table, ids))


def batch_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """[N,C,*], four times [C] -> [N,C,*]: mean 0 and variance 1 in every channel.

    In ``training`` of this batch, and the running values move towards the batch's (the variance of
    a sample, with n - 1) by ``momentum``, in place. Raises ValueError for one value a channel then.
    """
    wide = (1, -1, *(1,) * (x.ndim - 2))
    mean, variance = running_mean.reshape(*wide), running_var.reshape(*wide)
    if training:
        axes = [a for a in range(x.ndim) if a != 1]
        count = math.prod(x.shape[a] for a in axes)
        if count < 2:
            raise ValueError(f"[batch_norm] expected two values a channel, got {x.shape}")
        mean = x.mean(axes, keepdim=True)
        centred = x - mean
        variance = (centred * centred).mean(axes, keepdim=True)
        with no_grad():
            sample = variance.detach() * (count / (count - 1))
            for running, value in ((running_mean, mean.detach()), (running_var, sample)):
                move(running, value.reshape(-1), momentum)
    y = (x - mean) * apply("rsqrt", (variance + eps,))
    y = y if weight is None else y * weight.reshape(*wide)
    return y if bias is None else y + bias.reshape(*wide)


def dropout(
    x: Tensor, p: float = 0.5, training: bool = True, generator: Generator | None = None
) -> Tensor:
    """In ``training`` every element is 0 with probability ``p``, else divided by 1 - p. Draws from
    ``generator``, else from the one of `rm_abstract.manual_seed`. Raises ValueError for another p.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"[dropout] expected a probability, got {p}")
    if not training or p == 0.0:
        return x
    drawn = (generator or default_generator()).uniform(x.shape)
    return where(drawn >= p, x * (1.0 / (1.0 - p) if p < 1.0 else 0.0), 0.0)


# ---- pieces -------------------------------------------------------------------------------------


def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors one behind the other along an axis that they have. Raises ValueError for none."""
    if not tensors:
        raise ValueError("[concat] expected a tensor, got none")
    return apply("concat", tuple(tensors), (("axis", axis_of(axis, tensors[0].ndim)),))


def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors of one shape along a new axis. Raises ValueError for several shapes, or none."""
    shapes = {t.shape for t in tensors}
    if len(shapes) != 1:
        raise ValueError(f"[stack] expected tensors of one shape, got {sorted(shapes)}")
    axis = axis_of(axis, tensors[0].ndim + 1)
    shape = tensors[0].shape
    wide = (*shape[:axis], 1, *shape[axis:])
    return concat([t.reshape(wide) for t in tensors], axis)  # type: ignore[arg-type]


# ---- losses: `reduction` is "mean", "sum" or "none" ---------------------------------------------


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"[loss] expected 'mean', 'sum' or 'none', got {reduction!r}")
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """[*,C] and class numbers [*], or probabilities [*,C], [C]? -> the mean over all rows whose
    number is not ``ignore_index``, each as heavy as its class's ``weight``; NaN when there is none,
    as in torch. ``label_smoothing``: the part of the target that all classes share. Raises when a
    number is outside 0 .. C-1, and ValueError for other shapes."""
    wanted = logits.shape if target.dtype.is_floating_point else logits.shape[:-1]
    if not logits.ndim or target.shape != wanted:
        raise ValueError(f"[cross_entropy] expected targets {wanted}, got {target.shape}")
    count = logits.shape[-1]
    rows = log_softmax(logits.reshape(-1, count))
    weighed = rows if weight is None else rows * weight
    if target.dtype.is_floating_point:
        given = target.reshape(-1, count)
        if label_smoothing:
            given = given * (1.0 - label_smoothing) + label_smoothing / count
        return _reduced(-(given * weighed).sum(1).reshape(*logits.shape[:-1]), reduction)
    numbers = target.reshape(-1)
    counted: Tensor = numbers != ignore_index
    taken = apply("where", (counted, numbers, 0)).reshape(-1, 1)
    loss = -apply("gather", (weighed, taken), (("axis", 1),)).reshape(-1)
    if label_smoothing:
        loss = loss * (1.0 - label_smoothing) - weighed.sum(1) * (label_smoothing / count)
    loss = where(counted, loss, 0.0)
    if reduction != "mean":
        return _reduced(loss.reshape(*target.shape), reduction)
    weights = counted.to(logits.dtype)
    if weight is not None:
        weights = where(counted, weight[taken.reshape(-1)], 0.0)
    return loss.sum() / weights.sum()


def mse_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    difference = x - target
    return _reduced(difference * difference, reduction)


def l1_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return _reduced(abs(x - target), reduction)


def huber_loss(x: Tensor, target: Tensor, delta: float = 1.0, reduction: str = "mean") -> Tensor:
    """d²/2 where d = abs(x - target) is at most ``delta``, else delta (d - delta / 2)."""
    distance = abs(x - target)
    near = distance * distance * 0.5
    loss = where(distance <= delta, near, distance * delta - 0.5 * delta * delta)
    return _reduced(loss, reduction)


def binary_cross_entropy_with_logits(
    x: Tensor, target: Tensor, *, pos_weight: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """``target``: probabilities, of x's type. softplus(x) - x target, without overflow;
    ``pos_weight``: what the part of the positive ones is multiplied with."""
    rest = softplus(-abs(x))
    if pos_weight is None:
        return _reduced(maximum(x, 0.0) - x * target + rest, reduction)
    heavy = target * (pos_weight - 1.0) + 1.0
    return _reduced(x * (1.0 - target) + (maximum(-x, 0.0) + rest) * heavy, reduction)


def kl_div(
    log_p: Tensor, target: Tensor, *, log_target: bool = False, reduction: str = "batchmean"
) -> Tensor:
    """target (log target - log_p), summed and divided by the size of the first axis;
    ``target``: probabilities, of which those that are 0 count nothing, or their logarithms."""
    if log_p.shape != target.shape:
        raise Error(f"[kl_div] expected one shape, got {log_p.shape} and {target.shape}")
    if log_target:
        loss = exp(target) * (target - log_p)
    else:
        logs = log(maximum(target, math.ulp(0.0) if target.dtype.itemsize == 8 else 1e-38))
        loss = target * (logs - log_p)
    return loss.sum() / log_p.shape[0] if reduction == "batchmean" else _reduced(loss, reduction)
