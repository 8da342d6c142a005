"""Recurrent layers while a module is captured: each direction of each layer is one call of
``rm_abstract::recurrent`` behind a product of all steps at once (docs/decisions/0100-*.md).

torch.export follows a layer's steps one by one, so it fixes the length and takes seconds for long
sequences. Under `RecurrentLayers` the length stays a size like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from rm_abstract.capture.errors import capture_error

_LIBRARY = torch.library.Library("rm_abstract", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "recurrent(Tensor x, Tensor w, Tensor h, Tensor? c, Tensor? bias, Tensor? proj, str cell, "
    "bool reverse, bool batch_first) -> (Tensor, Tensor, Tensor)"
)
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.register_fake("rm_abstract::recurrent", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _shapes(
    x: torch.Tensor,
    w: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    proj: torch.Tensor | None,
    cell: str,
    reverse: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The outputs of all steps, the last state, the last cell state (nothing without one)."""
    y = x.new_empty((x.shape[0], x.shape[1], w.shape[1]))
    return y, torch.empty_like(h), x.new_empty(0) if c is None else torch.empty_like(c)


class RecurrentLayers(TorchFunctionMode):
    """Replaces what ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells call.

    Left alone, and so to PyTorch (RM206, RM207): dropout between layers in training mode, f64,
    other devices than the CPU. Packed sequences end the capture (RM203).
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # traces this, too: for the branches of torch.cond
            return func(*args, **(kwargs or {}))
        replacement = _REPLACED.get(func)
        if replacement is not None and not kwargs:
            result = replacement(func, *args)
            if result is not None:
                return result
        return func(*args, **(kwargs or {}))


_CELLS = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "tanh",
    torch.rnn_relu: "relu",
}


def _layers(func: Callable[..., Any], x: torch.Tensor, *rest: Any) -> Any:
    if isinstance(rest[2], (list, tuple)):
        return None  # of packed data: (data, batch sizes, states, weights, ...)
    hx, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = rest
    if x.dtype not in _TYPES or x.device.type != "cpu" or (train and dropout and num_layers > 1):
        return None
    if any(w.dtype != x.dtype or not all(type(s) is int for s in w.shape) for w in weights):
        return None
    cell = _CELLS[func]
    states, cells = hx if cell == "lstm" else (hx, None)
    directions = 2 if bidirectional else 1
    each = len(weights) // (num_layers * directions)
    last: list[list[torch.Tensor]] = [[], []]
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            w, recurrent, *others = weights[at * each : (at + 1) * each]
            bias = others[:2] if has_biases else [None, None]
            y, h, c = torch.ops.rm_abstract.recurrent(
                linear(x, w, bias[0]),
                recurrent,
                states[at],
                None if cells is None else cells[at],
                bias[1],
                others[-1] if each in (3, 5) else None,  # the projection
                cell,
                direction == 1,
                batch_first,
            )
            outputs.append(y)
            last[0].append(h)
            last[1].append(c)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    result = (x, torch.stack(last[0]))
    return result if cells is None else (*result, torch.stack(last[1]))


def _gates(
    x: torch.Tensor, h: torch.Tensor, weights: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    w, recurrent, bias, recurrent_bias = (*weights, None, None)[:4]
    return linear(x, w, bias), linear(h, recurrent, recurrent_bias)


def _lstm_cell(func: Any, x: torch.Tensor, hx: Sequence[torch.Tensor], *weights: Any) -> Any:
    given, kept = _gates(x, hx[0], weights)
    i, f, g, o = (given + kept).chunk(4, 1)
    c = f.sigmoid() * hx[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(func: Any, x: torch.Tensor, h: torch.Tensor, *weights: Any) -> torch.Tensor:
    given, kept = _gates(x, h, weights)
    (xr, xz, xn), (hr, hz, hn) = given.chunk(3, 1), kept.chunk(3, 1)
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return n + (xz + hz).sigmoid() * (h - n)


def _plain_cell(func: Any, x: torch.Tensor, h: torch.Tensor, *weights: Any) -> torch.Tensor:
    given, kept = _gates(x, h, weights)
    total = given + kept
    return total.tanh() if func is torch.rnn_tanh_cell else total.relu()


def _pack(func: Any, *args: Any) -> None:
    raise capture_error(
        "RM203",
        "expected sizes that do not depend on the values of tensors, got a packed sequence, whose "
        "size is the sum of its lengths",
        "the padded sequence, where the states behind each end do not matter",
    )


_REPLACED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_CELLS, _layers),
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: _plain_cell,
    torch.rnn_relu_cell: _plain_cell,
    torch._VF._pack_padded_sequence: _pack,
}
