"""Where generation meets transformers: the cache a routed model's `generate` starts with.

`GenerationMixin._prepare_cache_for_generation` runs once a call of generate, after transformers has
resolved the configuration. An empty DynamicCache it made becomes a DeviceCache; everything else,
and every cache of the user's, stays what it is.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rm_abstract.base.errors import ExecutionError
from rm_abstract.hooks.attaching import router_of
from rm_abstract.hooks.host import HookHost
from rm_abstract.kv.names import cache_name

if TYPE_CHECKING:
    from rm_abstract.generation.engine import GenerationEngine, TokenStream
    from rm_abstract.generation.request import GenerationRequest
    from rm_abstract.hooks.router import Router
    from rm_abstract.kv.device_cache import CacheNotes

# Rooms for this many tokens beyond the prompt are made at once; buffers grow when it is not enough.
_FIRST_ROOM = 256

_made = threading.local()  # .cache(): the empty one of the generation that starts in this thread


def preparing_cache(host: HookHost, original: Any) -> Any:
    """The replacement of `_prepare_cache_for_generation`."""
    notes: weakref.WeakKeyDictionary[Any, CacheNotes] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def prepare(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        given = model_kwargs.get(cache_name())
        result = original(self, generation_config, model_kwargs, *args, **kwargs)
        made = model_kwargs.get(cache_name())
        _made.cache = lambda: None
        if not host.active:
            return result
        router = router_of(self)
        if router is not None and router.session is host:
            _decline_modes(router, args, kwargs)
        if given is None and router is not None and router.session is host:
            on_device = _device_keeps_states(host)
            if (on_device or _planned(host)) and str(self.device) in ("cpu", _place(host)):
                _replace(self, generation_config, model_kwargs, made, notes, on_device)
        if given is None:
            cache = model_kwargs.get(cache_name())
            _made.cache = (lambda: None) if cache is None else weakref.ref(cache)
        return result

    return prepare


def sampling(host: HookHost, original: Any) -> Any:
    """The replacement of `_sample`, where greedy and sampled decoding happen."""

    @functools.wraps(original)
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        if host.active:
            router = router_of(self)
            if router is not None and router.session is host:
                stream, repeats = _stream(router, original, self, args, kwargs)
                try:
                    if stream is not None:
                        for _ in stream:  # the tokens are in the result
                            pass
                        return stream.result()
                except ExecutionError as error:
                    if not repeats(error):
                        raise
        return original(self, *args, **kwargs)

    return sample


def _decline_modes(router: Router, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Beams and the like never reach `_sample`: an engine that was asked for says so here."""
    mode = kwargs.get("generation_mode", args[0] if args else None)
    mode = str(getattr(mode, "value", ""))
    if mode and mode not in ("greedy_search", "sample") and router.generation.remote is not None:
        router.generation.remote.decline("RM332", mode.replace("_", " "))


def _stream(
    router: Router, original: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TokenStream | None, Callable[[ExecutionError], bool]]:
    """This call of `_sample` as an engine's, and whether transformers' own loop may run it once
    more after an error; None: it runs it at once."""
    made = getattr(_made, "cache", lambda: None)()
    try:
        from rm_abstract.generation.request import GenerationRequest
        from rm_abstract.generation.token_loop import TokenLoopEngine

        request = GenerationRequest.of(original, model, args, kwargs)
        cache = request.model_kwargs.get(cache_name())
        request.cache_is_new = cache is None or cache is made
        remote = router.generation.remote
        engines: list[GenerationEngine] = [TokenLoopEngine(router)]
        for engine in engines if remote is None else [remote, *engines]:
            declined = engine.eligible(request)
            if not declined:
                again = remote.repeats if engine is remote and remote is not None else _never
                return engine.start(request), functools.partial(again, request)
            if engine is not remote:  # it counts for itself
                router.generation.decline(declined)
    except (ImportError, TypeError, KeyError, AttributeError):
        router.generation.decline("this version of transformers")
    return None, functools.partial(_never, None)


def _never(request: GenerationRequest | None, error: ExecutionError) -> bool:
    return False


def _planned(host: HookHost) -> bool:
    """True when our compiler plans the session's programs: only those append in place."""
    from rm_abstract.engines import registry

    engine = host.settings.text("inference_engine")
    own = engine in ("native", "vllm", "onnxruntime")  # what vLLM does not serve is native's
    return own or (engine == "auto" and registry.has_kernels(host.resolved))


def _place(host: HookHost) -> str:
    """Where models lie, beside the CPU, whose caches programs append to."""
    return host.resolved.name if host.resolved.backend == "cuda" else "cpu"


def _device_keeps_states(host: HookHost) -> bool:
    """True when the session's device compiles whole programs and keeps states between them."""
    from rm_abstract.engines import registry

    engine = host.settings.text("inference_engine")
    return engine in ("whole_program", "auto", "native") and registry.keeps_states(host.resolved)


def _replace(
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    made: Any,
    notes: weakref.WeakKeyDictionary[Any, CacheNotes],
    on_device: bool,
) -> None:
    pair = _plain(made, "EncoderDecoderCache")
    own = made.self_attention_cache if pair else made
    if not _plain(own, "DynamicCache") or own.offloading or not _fits(model, generation_config):
        return
    if pair and on_device:
        return  # the encoder's half does not change: such a device is given both with every step
    from rm_abstract.kv.device_cache import CacheNotes, DevicePair, expected_shape, from_dynamic

    shape = expected_shape(model)
    if shape is None:
        return
    if pair:
        _drop_encoder_layers(model, made)
    longest = int(getattr(generation_config, "max_length", None) or 0)
    mask = model_kwargs.get("decoder_attention_mask" if pair else "attention_mask")
    prompt = int(mask.shape[-1]) if mask is not None else 0
    reserve = min(longest, prompt + _FIRST_ROOM) if longest else 0
    found = notes.setdefault(model, CacheNotes())
    cache: Any = from_dynamic(own, shape, reserve, found, on_device, model.device)
    if cache is not None:
        cache = DevicePair(cache, made.cross_attention_cache) if pair else cache
        model_kwargs[cache_name()] = cache


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
    """Models written for static caches (positions and masks from tensors)."""
    return bool(getattr(model, "_can_compile_fullgraph", False)) and not getattr(
        generation_config, "is_assistant", False
    )
