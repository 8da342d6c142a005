"""Which fixed sizes a call of free sizes is compiled for, and how it is padded to them.

A whole-program device runs static shapes. Batch and token dims of a call are rounded up to a
bucket and padded; padding that would change a result is found out before a bucket serves (the
engine's gate). Without lists from the user, buckets are powers of two: few compiles, and less than
half of the work wasted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.capture.dims import evaluate

MIN_TOKENS = 16  # a smaller bucket costs a compile and saves nothing
_SYMBOL = re.compile(r"s\d+")
BATCH, TOKENS, PAST = "batch", "tokens", "past"
TOKEN_INPUTS = ("input_ids", "inputs_embeds")


@dataclass(frozen=True)
class InputRole:
    """One input of the program: the argument it belongs to, and whether it is a cache's tensor."""

    name: str
    is_past: bool = False

    @property
    def is_mask(self) -> bool:
        return "mask" in self.name


@dataclass(frozen=True)
class Bucket:
    """The sizes a program is compiled for; ``padded`` symbols may be smaller in a call."""

    sizes: tuple[tuple[str, int], ...]
    padded: frozenset[str] = frozenset()

    def shapes(self, dims: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
        values = dict(self.sizes)
        return [tuple(evaluate(d, values) for d in row) for row in dims]


@dataclass
class Buckets:
    """The rule for one capture: what each symbol stands for, and the lists to choose from."""

    input_dims: Sequence[Sequence[str]]
    roles: Sequence[InputRole]
    batch_sizes: Sequence[int] = ()
    lengths: Sequence[int] = ()
    resident: bool = False  # the cache's tensors stay on the device: room for a fixed length
    kinds: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.kinds = {}
        has_past = any(role.is_past for role in self.roles)
        for dims, role in zip(self.input_dims, self.roles, strict=True):
            if dims and _SYMBOL.fullmatch(dims[0]):
                self.kinds.setdefault(dims[0], BATCH)
            if role.is_past and len(dims) == 4 and _SYMBOL.fullmatch(dims[2]) and not self.resident:
                self.kinds.setdefault(dims[2], PAST)
        if self.resident:
            self._name_new_tokens()
        elif not has_past and any(role.is_mask for role in self.roles):
            # Tokens can be padded only where a mask says which ones are real.
            for dims, role in zip(self.input_dims, self.roles, strict=True):
                if role.is_mask and len(dims) == 2 and _SYMBOL.fullmatch(dims[1]):
                    self.kinds.setdefault(dims[1], TOKENS)

    def _name_new_tokens(self) -> None:
        """The new tokens of a step, which can be padded when a mask over all says which count."""
        masks = [d for d, role in zip(self.input_dims, self.roles, strict=True) if role.is_mask]
        if not masks or any(len(dims) != 2 for dims in masks):
            return
        for dims, role in zip(self.input_dims, self.roles, strict=True):
            if role.name in TOKEN_INPUTS and len(dims) >= 2 and _SYMBOL.fullmatch(dims[1]):
                self.kinds.setdefault(dims[1], TOKENS)

    def sizes_of(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The symbols' values in a call. Raises Decline when the shapes do not say them."""
        values: dict[str, int] = {}
        for dims, shape in zip(self.input_dims, shapes, strict=True):
            for dim, size in zip(dims, shape, strict=True):
                if _SYMBOL.fullmatch(dim):
                    values.setdefault(dim, int(size))
        try:
            expected = [tuple(evaluate(d, values) for d in dims) for dims in self.input_dims]
        except KeyError as error:
            raise Decline("RM105", f"size {error} does not follow from the inputs") from None
        if expected != [tuple(shape) for shape in shapes]:
            raise Decline("RM105", "sizes of the inputs that do not belong together")
        return values

    def choose(self, sizes: Mapping[str, int]) -> Bucket:
        """The smallest bucket that holds the call. Raises Decline RM105 when no listed one does."""
        chosen: dict[str, int] = {}
        padded: set[str] = set()
        for symbol, size in sizes.items():
            kind = self.kinds.get(symbol)
            if kind is None:
                chosen[symbol] = size
                continue
            listed = self.batch_sizes if kind == BATCH else self.lengths
            chosen[symbol] = _round_up(size, listed, kind)
            padded.add(symbol)
        return Bucket(tuple(sorted(chosen.items())), frozenset(padded))

    def exact(self, sizes: Mapping[str, int]) -> Bucket:
        """The bucket of this very shape."""
        return Bucket(tuple(sorted(sizes.items())))

    def sides(self, bucket: Bucket, sizes: Mapping[str, int]) -> list[str]:
        """The sides to try for padding tokens, best first; one when there are none to pad."""
        values = dict(bucket.sizes)
        short = {s for s in bucket.padded if values[s] != sizes[s]}
        if any(self.kinds[s] == PAST for s in short):
            return ["left"]  # behind the past come the new tokens
        if any(self.kinds[s] == TOKENS for s in short):
            return ["right", "left"]  # left for models that return their last position
        return ["right"]


def padded_tokens(new: int, lengths: Sequence[int]) -> int:
    """The size the new tokens of a generation step are padded to. Raises Decline RM105."""
    return _round_up(new, lengths, TOKENS) if new > 1 else new


def _round_up(size: int, listed: Sequence[int], kind: str) -> int:
    if listed:
        fitting = [n for n in sorted(listed) if n >= size]
        if not fitting:
            option = "batch_size" if kind == BATCH else "sequence_length"
            raise Decline("RM105", f"{kind} {size} is above {option}={','.join(map(str, listed))}")
        return fitting[0]
    floor = 1 if kind == BATCH else MIN_TOKENS
    return max(floor, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class Padding:
    """Where a call's tensors lie in the bucket's: the offset per input or output and axis."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    start: int = 0  # of a generation step: where its new tokens go in the cache,
    gap: int = 0  # and how many positions of padding come in front of them


def padding_of(
    bucket: Bucket,
    kinds: Mapping[str, str],
    sizes: Mapping[str, int],
    input_dims: Sequence[Sequence[str]],
    output_dims: Sequence[Sequence[str]],
    side: str,
) -> Padding:
    """Batch rows are added at the end, tokens on ``side``."""
    values = dict(bucket.sizes)

    def offset(dim: str) -> int:
        grown = evaluate(dim, values) - evaluate(dim, sizes)
        on_left = side == "left" and any(
            kinds.get(s) in (TOKENS, PAST) for s in _SYMBOL.findall(dim)
        )
        return grown if on_left else 0

    return Padding(
        tuple(tuple(offset(d) for d in dims) for dims in input_dims),
        tuple(tuple(offset(d) for d in dims) for dims in output_dims),
        tuple(tuple(evaluate(d, sizes) for d in dims) for dims in output_dims),
    )


def place(
    slot: torch.Tensor, tensor: torch.Tensor, offsets: Sequence[int], fill: float, rows: float
) -> None:
    """Copies a tensor into its larger slot: ``fill`` around it, ``rows`` in rows added to the
    batch (axis 0)."""
    if slot.shape == tensor.shape:
        slot.copy_(tensor)
        return
    slot.fill_(fill)
    window = slot
    for axis, (offset, size) in enumerate(zip(offsets, tensor.shape, strict=True)):
        window = window.narrow(axis, offset, size)
    if slot.shape[0] != tensor.shape[0]:
        slot[tensor.shape[0] :].fill_(rows)
    window.copy_(tensor)


def take(slot: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """A copy of the real part of an output, in memory of its own."""
    window = slot
    for axis, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        window = window.narrow(axis, offset, size)
    return window.clone(memory_format=torch.contiguous_format)
