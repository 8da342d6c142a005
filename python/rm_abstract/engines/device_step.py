"""A generation step on a device that keeps the cache's buffers: room there, and what was fed.

Every call leaves its tokens in the cache's history before it runs: whoever serves it, a device that
is lost later can be replaced by feeding them again (residence.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import ExecutionError
from rm_abstract.base.scope import disabled_var
from rm_abstract.calls.call import CallSpec, leaf_count, leaf_numbers
from rm_abstract.calls.step_call import StepCall
from rm_abstract.engines.buckets import TOKEN_INPUTS, padded_tokens
from rm_abstract.kv.names import NAMES, cache_name

if TYPE_CHECKING:
    from rm_abstract.engines.specializer import Specializer
    from rm_abstract.kv.history import History

_REPLAYED = {"attention_mask", "position_ids", *NAMES, *TOKEN_INPUTS}


class DeviceStep(StepCall):
    """Where things are among the leaves of a call, for a device with states."""

    def __init__(self, spec: CallSpec) -> None:
        super().__init__(spec)
        if any(s == ("cache", "DevicePair") for s in spec.specs):
            raise Decline("RM114", "a cache that was made for another device")
        numbers = leaf_numbers(spec)
        self._name = next((n for n in TOKEN_INPUTS if numbers.get(n) == self._tokens), "")
        plain = sum(leaf_count(s) for s in spec.specs) == len(numbers)  # nothing in containers
        self._replayable = bool(self._name) and plain and set(numbers) <= _REPLAYED
        self.lengths: Sequence[int] = ()
        self.replay: Callable[[History], list[torch.Tensor]] | None = None
        self.changes = 0  # of the model, before this was made

    def remember(self, leaves: Sequence[Any]) -> None:
        """Notes what the call feeds the cache. Raises Decline for a cache of another device."""
        cache = leaves[self._cache]
        if cache.residence is None:
            raise Decline("RM114", "a cache that was made for another device")
        history, tokens = cache.residence.history, leaves[self._tokens]
        history.whole = history.whole and self._replayable
        positions = leaves[self._positions] if self._positions >= 0 else None
        mask = leaves[self._masks[0]] if self._masks else None
        history.record(cache.length, self._name, tokens, positions, mask, self.changes)
        cache.residence.replay = self.replay

    def _make_room(self, cache: Any, batch: int, new: int) -> None:
        try:
            new = padded_tokens(new, self.lengths)
        except Decline:
            pass  # no program is made for so many: the engine says so
        cache.prepare_on_device(batch, new)


def replaying(engine: Specializer) -> Any:
    """A function that feeds a history to the original and returns the buffers it made."""
    held, held_engine = weakref.ref(engine.module()), weakref.ref(engine)
    names = frozenset(engine.parameters.names)

    def replay(history: History) -> list[torch.Tensor]:
        from transformers.cache_utils import DynamicCache

        from rm_abstract.kv import kv_cache

        model: Any = held()
        if model is None:
            raise ExecutionError(
                "[generation] expected the model a cache belongs to, got none; try generating "
                "again with a model that exists",
                code="RM303",
            )
        known = held_engine()  # none when its session has ended: nobody looks for changes then
        if known is not None and known.changes != history.changes:
            raise ExecutionError(
                "[generation] expected the model that made the keys and values of a lost device, "
                "got one that was changed since; try this generation again",
                code="RM303",
            )
        cache: Any = DynamicCache()
        end = 0
        token = disabled_var.set("compiling")  # nothing inside is routed
        try:
            with torch.no_grad():
                for piece in history.merged():
                    end += piece.tokens.shape[1]
                    given: dict[str, Any] = {piece.name: piece.tokens, cache_name(): cache}
                    if history.mask is not None:
                        given["attention_mask"] = history.mask[:, :end]
                    if piece.positions is not None:
                        given["position_ids"] = piece.positions
                    if "logits_to_keep" in names:
                        given["logits_to_keep"] = 1
                    model._call_impl(**given, use_cache=True)
        finally:
            disabled_var.reset(token)
        content = kv_cache.read(cache)
        assert isinstance(content, list)
        return content

    return replay
