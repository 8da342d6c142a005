"""The whole table: ATen overload ("add.Tensor") to handler."""

from __future__ import annotations

from rm_abstract.capture.op_map import creation, elementwise, nn, reduction, views
from rm_abstract.capture.op_map.call import Handler

HANDLERS: dict[str, Handler] = {
    **elementwise.TABLE,
    **views.TABLE,
    **creation.TABLE,
    **reduction.TABLE,
    **nn.TABLE,
}
