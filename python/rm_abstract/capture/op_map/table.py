"""The whole table: ATen overload ("add.Tensor") to handler."""

from __future__ import annotations

from rm_abstract.capture.op_map import (
    activations,
    bags,
    creation,
    einsum,
    elementwise,
    experts,
    functions,
    indexing,
    losses,
    nn,
    order,
    pointwise,
    prims,
    recurrent,
    reduction,
    running,
    special,
    views,
    vision,
    windows,
)
from rm_abstract.capture.op_map.call import Handler

_ATEN: dict[str, Handler] = {
    **elementwise.TABLE,
    **activations.TABLE,
    **views.TABLE,
    **indexing.TABLE,
    **functions.TABLE,
    **creation.TABLE,
    **reduction.TABLE,
    **nn.TABLE,
    **einsum.TABLE,
    **bags.TABLE,
    **experts.TABLE,
    **losses.TABLE,
    **vision.TABLE,
    **recurrent.TABLE,
    **pointwise.TABLE,
    **order.TABLE,
    **special.TABLE,
    **running.TABLE,
    **windows.TABLE,
}
HANDLERS: dict[str, Handler] = {**_ATEN, **prims.table(_ATEN)}
