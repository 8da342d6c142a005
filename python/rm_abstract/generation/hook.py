"""Where generation meets transformers: the cache an armed model's `generate` starts with.

`GenerationMixin._prepare_cache_for_generation` runs once a call of generate, after transformers has
resolved the configuration. An empty DynamicCache it made becomes a DeviceCache; everything else,
and every cache of the user's, stays what it is.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from rm_abstract.hooks.arming import armed_of
from rm_abstract.hooks.scope import disabled_var

if TYPE_CHECKING:
    from rm_abstract.generation.device_cache import CacheNotes, LayerShape
    from rm_abstract.session import Session

# Rooms for this many tokens beyond the prompt are made at once; buffers grow when it is not enough.
_FIRST_ROOM = 256


def preparing_cache(session: Session, original: Any) -> Any:
    """The replacement of `_prepare_cache_for_generation`."""
    notes: weakref.WeakKeyDictionary[Any, CacheNotes] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def prepare(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        given = model_kwargs.get("past_key_values")
        result = original(self, generation_config, model_kwargs, *args, **kwargs)
        made = model_kwargs.get("past_key_values")
        if session.closed or disabled_var.get() is not None:
            return result
        armed = armed_of(self)
        if given is None and armed is not None and armed.session is session:
            away = _kept_away(session)
            if away or _planned(session):
                _replace(self, generation_config, model_kwargs, made, notes, away)
        return result

    return prepare


def sampling(session: Session, original: Any) -> Any:
    """The replacement of `_sample`, where greedy and sampled decoding happen."""

    @functools.wraps(original)
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not session.closed and disabled_var.get() is None:
            armed = armed_of(self)
            if armed is not None and armed.session is session:
                try:
                    from rm_abstract.generation import token_loop

                    call = token_loop.bound_call(original, self, args, kwargs)
                    declined = token_loop.why_not(self, call)
                except (ImportError, TypeError, KeyError, AttributeError):
                    declined = "this version of transformers"
                if not declined:
                    return token_loop.TokenLoop(self, armed, call).run()
        return original(self, *args, **kwargs)

    return sample


def _planned(session: Session) -> bool:
    """True when our compiler plans the session's programs: only those append in place."""
    from rm_abstract.engines import registry

    engine = session.settings.text("inference_engine")
    return engine == "native" or (engine == "auto" and registry.has_kernels(session))


def _kept_away(session: Session) -> bool:
    """True when the session's device compiles whole programs and keeps states between them."""
    from rm_abstract.engines import registry

    engine = session.settings.text("inference_engine")
    return engine in ("whole_program", "auto", "native") and registry.keeps_states(session)


def _replace(
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    made: Any,
    notes: weakref.WeakKeyDictionary[Any, CacheNotes],
    away: bool,
) -> None:
    pair = _plain(made, "EncoderDecoderCache")
    own = made.self_attention_cache if pair else made
    if not _plain(own, "DynamicCache") or own.offloading or not _fits(model, generation_config):
        return
    if pair and away:
        return  # the encoder's half does not change: such a device is given both with every step
    from rm_abstract.generation.device_cache import CacheNotes, DevicePair, from_dynamic

    shape = _shape(model)
    if shape is None:
        return
    if pair:
        _drop_encoder_layers(model, made)
    longest = int(getattr(generation_config, "max_length", None) or 0)
    mask = model_kwargs.get("decoder_attention_mask" if pair else "attention_mask")
    prompt = int(mask.shape[-1]) if mask is not None else 0
    reserve = min(longest, prompt + _FIRST_ROOM) if longest else 0
    found = notes.setdefault(model, CacheNotes())
    cache: Any = from_dynamic(own, shape, reserve, found, away)
    if cache is not None:
        cache = DevicePair(cache, made.cross_attention_cache) if pair else cache
        model_kwargs["past_key_values"] = cache


def _plain(value: Any, name: str) -> bool:
    kind = type(value)
    return kind.__name__ == name and kind.__module__ == "transformers.cache_utils"


def _drop_encoder_layers(model: Any, pair: Any) -> None:
    """Where a configuration's number of layers is the encoder's, caches have too many (Whisper)."""
    count = getattr(model.config, "decoder_layers", None)
    if isinstance(count, int):
        for half in (pair.self_attention_cache, pair.cross_attention_cache):
            del half.layers[count:]


def _fits(model: Any, generation_config: Any) -> bool:
    """Models written for static caches (positions and masks from tensors), on the CPU."""
    return (
        bool(getattr(model, "_can_compile_fullgraph", False))
        and not getattr(generation_config, "is_assistant", False)
        and model.device.type == "cpu"
    )


def _shape(model: Any) -> LayerShape | None:
    """Heads, sizes and type of keys and values by the configuration; None when it does not say."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        return None
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return (int(kv_heads), int(size), int(size), model.dtype)
