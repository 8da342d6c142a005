"""The operators that `rebel` registers with torch: torch.ops.rbln_custom_ops.

Source: the calls of optimum-rbln 0.12 (models/decoderonly), which registers none of them itself.
q is [rows, KV heads, queries a KV head, tokens, width], k and v have one query, a cache is
[blocks, KV heads, 1, tokens a block, width] and is updated in place; ``seq`` has the position of
each row's first token, ``block_table`` the blocks of a row (one row without that dim in a prompt).
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("rbln_custom_ops", "DEF")
_ATTENTION = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) kcache, Tensor(b!) vcache, Tensor seq, "
    "Tensor scale, Tensor block_table, int block_size{partition}{bidirectional}) -> Tensor"
)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kcache: torch.Tensor,
    vcache: torch.Tensor,
    seq: torch.Tensor,
    scale: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Writes k and v behind what the cache has, and attends to everything up to each token."""
    tables = block_table.reshape(q.shape[0], -1).long()
    result = torch.empty_like(q)
    for row in range(q.shape[0]):
        start, tokens = int(seq.reshape(q.shape[0], -1)[row, 0]), q.shape[3]
        blocks = tables[row]
        room = blocks.numel() * block_size
        places = torch.arange(start, min(start + tokens, room))
        at, offset = blocks[places // block_size], places % block_size
        for cache, new in ((kcache, k), (vcache, v)):
            cache[at, :, 0, offset] = new[row, :, 0, : places.numel()].transpose(0, 1)
        length = int(places[-1]) + 1
        past = torch.arange(length)
        at, offset = blocks[past // block_size], past % block_size
        keys = kcache[at, :, 0, offset].permute(1, 2, 0)[:, None]
        values = vcache[at, :, 0, offset].transpose(0, 1)[:, None]
        scores = torch.matmul(q[row], keys) * scale
        seen = past[None] <= torch.arange(start, start + tokens)[:, None]
        scores = scores.masked_fill(~seen, float("-inf"))
        result[row] = torch.matmul(torch.softmax(scores, -1), values)
    return result


def _define(name: str, *, flash: bool, prompt: bool) -> None:
    schema = _ATTENTION.format(
        partition=", int partition" if flash else "",
        bidirectional=", bool is_bidirectional" if prompt else "",
    )
    _LIBRARY.define(name + schema)

    def attend(*given: torch.Tensor) -> torch.Tensor:
        if prompt and given[-1]:
            raise NotImplementedError("attention in both directions")
        return _attention(*given[:9])  # type: ignore[arg-type]

    _LIBRARY.impl(name, attend, "CPU")
    torch.library.register_fake(
        f"rbln_custom_ops::{name}", lambda q, *others: torch.empty_like(q), lib=_LIBRARY
    )


for _phase in ("prefill", "decode"):
    _define(f"paged_causal_attn_{_phase}", flash=False, prompt=_phase == "prefill")
    _define(f"paged_flash_causal_attn_{_phase}", flash=True, prompt=_phase == "prefill")

_LIBRARY.define("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor")
# torch.nn.functional.linear itself is this operator while optimum-rbln compiles.
_LIBRARY.impl("linear", torch.ops.aten.linear.default, "CompositeImplicitAutograd")
