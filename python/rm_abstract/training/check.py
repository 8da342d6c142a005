"""The gate of a step: did the program do to copies what eager did to the tensors themselves?

The loss and the optimiser's moments are compared with eager's: they are smooth in the gradients. A
parameter under Adam is not (an element whose gradient is rounding noise moves by the learning rate
either way), so its new value is compared with what the optimiser's formula makes of the program's
own moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rm_abstract.training.optimizers import Rule

_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-7}  # of a change, relative to the largest
_LOSS = {torch.float32: 1e-4, torch.float64: 1e-9}
# Of programs with values of half types, in which eager rounds at other places than we do.
_HALF_TOLERANCE, _HALF_LOSS = 0.1, 2e-2
_SMALL = 1e-2  # a tensor whose changes are below this part of the largest counts as that large


@dataclass
class Trial:
    """What the batches so far showed of a program.

    A unit whose input is rounding noise may be on either side of a ReLU's corner: one batch in
    which a gradient differs is no proof. A program is refused at the second such batch, and behind
    the first it has to agree in two others.
    """

    differences: int = 0
    agreements: int = 0

    def refuses(self) -> bool:
        """Counts a batch that differed; True where no other one is looked at."""
        self.differences += 1
        self.agreements = 0
        return self.differences > 1

    def trusts(self) -> bool:
        """Counts a batch that agreed; True where it was enough of them."""
        self.agreements += 1
        return self.agreements > self.differences


def differs(
    loss: torch.Tensor,
    reference: torch.Tensor,
    before: Sequence[Sequence[torch.Tensor]],
    now: Sequence[Sequence[torch.Tensor]],
    eager: Sequence[Sequence[torch.Tensor]],
    rules: Sequence[Rule],
    rows: Sequence[Sequence[float]],
    names: Sequence[str],
    half: bool = False,
) -> str:
    """What differs, or "". By parameter: itself and its states, before, after both."""
    why = _losses_differ(loss, reference, half)
    if why or float(reference) != float(reference):  # NaN both: nothing to compare
        return why
    compared = [1 if len(b) > 1 else 0 for b in before]
    changes = [
        float((e[k] - b[k]).abs().max()) if b[k].numel() else 0.0
        for b, e, k in zip(before, eager, compared, strict=True)
    ]
    largest = max((c for c in changes if c == c), default=0.0)
    for i, (b, n, e) in enumerate(zip(before, now, eager, strict=True)):
        k = compared[i]
        if not b[k].numel():
            continue
        tolerance = _HALF_TOLERANCE if half else _TOLERANCE[b[k].dtype]
        scale = max(changes[i], _SMALL * largest)
        noise = 8 * torch.finfo(b[k].dtype).eps * float(b[k].abs().max())
        error = (n[k] - e[k]).abs()
        same_nan = torch.equal(n[k].isnan(), e[k].isnan())
        if not same_nan or float(error.nan_to_num(0.0).max()) > tolerance * scale + noise:
            return f"{names[i]}: {float(error.max()):.3g} apart after a change of {scale:.3g}"
        if k == 0:
            continue
        wanted = _updated(b, n, rules[i], rows[i])
        error = (n[0] - wanted).abs()
        change = float((wanted - b[0]).abs().max())
        tolerance = _TOLERANCE[b[0].dtype]  # the program's own moments: nothing else is rounded
        noise = 8 * torch.finfo(b[0].dtype).eps * float(b[0].abs().max())
        if float(error.nan_to_num(0.0).max()) > tolerance * change + noise:
            return f"{names[i]}: its update is {float(error.max()):.3g} away from the formula"
    return ""


def gradients_differ(
    loss: torch.Tensor,
    reference: torch.Tensor,
    ours: Sequence[torch.Tensor | None],
    eager: Sequence[torch.Tensor | None],
    names: Sequence[str],
    half: bool = False,
) -> str:
    """What differs, or "". None: the loss does not depend on that parameter."""
    why = _losses_differ(loss, reference, half)
    if why or float(reference) != float(reference):
        return why
    sizes = [0.0 if g is None or not g.numel() else float(g.abs().max()) for g in eager]
    largest = max((s for s in sizes if s == s), default=0.0)
    for mine, theirs, size, name in zip(ours, eager, sizes, names, strict=True):
        if mine is None or theirs is None:
            if mine is not theirs:
                return f"{name}: one has a gradient, the other none"
            continue
        if not theirs.numel():
            continue
        error = (mine - theirs).abs()
        tolerance = _HALF_TOLERANCE if half else _TOLERANCE[theirs.dtype]
        bound = tolerance * max(size, _SMALL * largest)
        same_nan = torch.equal(mine.isnan(), theirs.isnan())
        if not same_nan or float(error.nan_to_num(0.0).max()) > bound:
            return f"{name}: gradients are {float(error.max()):.3g} apart, the largest {size:.3g}"
    return ""


def _losses_differ(loss: torch.Tensor, reference: torch.Tensor, half: bool) -> str:
    ours, theirs = float(loss), float(reference)
    if (ours != ours) != (theirs != theirs):
        return f"the loss is {ours}, eager's {theirs}"
    if theirs != theirs:
        return ""
    tolerance = _HALF_LOSS if half else _LOSS.get(loss.dtype, 1e-4)
    if abs(ours - theirs) > tolerance * max(abs(theirs), 1e-3):
        return f"the loss is {ours}, eager's {theirs}"
    return ""


def buffers_differ(
    now: Sequence[torch.Tensor],
    eager: Sequence[torch.Tensor],
    names: Sequence[str],
    half: bool = False,
) -> str:
    """What differs between buffers that the forward updated, or ""."""
    for ours, theirs, name in zip(now, eager, names, strict=True):
        scale = float(theirs.nan_to_num().abs().max()) if theirs.numel() else 0.0
        relative = _HALF_LOSS if half and theirs.is_floating_point() else None
        tolerance = (_LOSS.get(theirs.dtype, 0.0) if relative is None else relative) * scale
        if not torch.allclose(ours, theirs, rtol=0.0, atol=tolerance, equal_nan=True):
            return f"{name}: up to {float((ours - theirs).abs().max()):.3g} apart"
    return ""


def _updated(
    before: Sequence[torch.Tensor], now: Sequence[torch.Tensor], rule: Rule, row: Sequence[float]
) -> torch.Tensor:
    """The new parameter from the old one and the new states; ``row`` as in optimizers.numbers."""
    p = before[0].double()
    if rule.algorithm == "adam":
        keep, eps, size, root = row[1], *row[-3:]
        if rule.weight_decay and rule.decoupled:
            p = p * keep
        second = now[3] if rule.amsgrad else now[2]
        return p - size * now[1].double() / (second.double().sqrt() / root + eps)
    lr, _, momentum, undamped = row
    buffer = now[1].double()
    if not rule.nesterov:
        return p - lr * buffer
    # buffer' = momentum buffer + undamped g, so g is what remains of it.
    g = (buffer - momentum * before[1].double()) / undamped
    return p - lr * (g + momentum * buffer)
