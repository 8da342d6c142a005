"""The foreign attributes we change, all of them; `patches()` prints this list with its reasons.

Invariant: every replacement calls the original with the very arguments it got and returns its very
result. Once its session is closed it does nothing else, in case somebody patched over it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rm_abstract.base.stay_out import staying_out
from rm_abstract.hooks.host import SLOT, HookHost
from rm_abstract.hooks.imports import ImportWatch
from rm_abstract.hooks.patches import PatchSet
from rm_abstract.hooks.weight_writes import WeightWrites, weight_writes

# Of this thread: modules whose call is in progress, and how many loads and train() calls are. The
# outermost attaches a router.
_calls = threading.local()
_depth = threading.local()


class Installation:
    """Every foreign attribute that is changed for one session, and the watch for later imports."""

    def __init__(self, host: HookHost) -> None:
        self._host = host
        self.patches = PatchSet()
        self.watch = ImportWatch(
            {
                "torch.nn.modules.module": _quiet(self._patch_module),
                "torch.jit._recursive": _quiet(self._patch_script),
                "transformers.modeling_utils": _quiet(self._patch_transformers),
                "transformers.generation.utils": _quiet(self._patch_generation),
                "sentence_transformers.base.modules.transformer": _quiet(
                    self._patch_sentence_transformers
                ),
            }
        )

    def install(self) -> None:
        """Patches what is imported and watches for what is not."""
        weight_writes.start(self, self._host.cannot_watch)
        self.watch.install()

    def remove(self) -> list[str]:
        """Restores everything; returns a line for each attribute somebody patched over."""
        self.watch.remove()
        return self.patches.restore() + weight_writes.stop(self)

    def listed(self) -> list[dict[str, str]]:
        """Every change that is in place: target, before, after, why, state."""
        patches = [*weight_writes.patches, *self.patches]
        listed = [patch.to_dict() for patch in patches]
        if weight_writes.optimizer_hook is not None:
            listed.append(
                _in_place(
                    "torch.optim.optimizer._global_optimizer_post_hooks",
                    f"{WeightWrites.__module__}.WeightWrites",
                    "fused optimisers change weights without counting versions",
                )
            )
        if self.watch.installed:
            listed.append(
                _in_place(
                    "sys.meta_path",
                    f"{ImportWatch.__module__}.ImportWatch",
                    "torch and transformers are patched when they are imported",
                )
            )
        return listed

    def _patch_module(self, torch_module: ModuleType) -> None:
        module_class = torch_module.Module
        for name, why in (
            ("train", "eval() ends in train(False): a plain module is ready there"),
            ("to", "a module that was loaded before init() is caught when it is moved"),
        ):
            self.patches.replace(
                module_class,
                name,
                functools.partial(_attaching_method, self._host, source=name),
                why,
            )
        if self._host.settings.text("hook") == "all":
            self.patches.replace(
                module_class,
                "__call__",
                functools.partial(_attaching_call, self._host),
                "hook='all': a module that nothing else caught is caught when it is called",
            )
        self.patches.replace(
            module_class,
            "_replicate_for_data_parallel",
            _replicating_without_slot,
            "a replica copies the slot, and a router there would serve the original's weights",
        )

    def _patch_script(self, recursive: ModuleType) -> None:
        self.patches.replace(
            recursive,
            "ignored_attributes",
            lambda before: [*before, SLOT],
            "torch.jit.script asks for a type of what a module holds, and a slot has none",
        )

    def _patch_transformers(self, modeling_utils: ModuleType) -> None:
        for name, why in (
            ("from_pretrained", "the loaded root is routed"),
            ("_from_config", "a model made from a configuration is routed"),
        ):
            self.patches.replace(
                modeling_utils.PreTrainedModel,
                name,
                functools.partial(_attaching_constructor, self._host, source=name),
                why,
            )

    def _patch_generation(self, utils: ModuleType) -> None:
        from rm_abstract.hooks.generate import preparing_cache, sampling

        self.patches.replace(
            utils.GenerationMixin,
            "_prepare_cache_for_generation",
            functools.partial(preparing_cache, self._host),
            "a routed model's generate gets a cache that programs append to in place",
        )
        self.patches.replace(
            utils.GenerationMixin,
            "_sample",
            functools.partial(sampling, self._host),
            "tokens of a routed model come from a loop over its program's steps",
        )

    def _patch_sentence_transformers(self, module: ModuleType) -> None:
        from rm_abstract.hooks.sentence_transformers import transformer_forward

        self.patches.replace(
            module.Transformer,
            "forward",
            transformer_forward,
            "it calls model.forward itself, which would pass the router by",
        )


def _tried(body: Callable[[Any], Any], argument: Any) -> bool:
    """Runs a hook of ours; False, and one line in the log, when it failed."""
    done = False
    with staying_out(getattr(body, "__qualname__", "a hook")):
        body(argument)
        done = True
    return done


def _quiet(patch: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """A patch that never raises into the user's import."""

    def call(module: ModuleType) -> None:
        _tried(patch, module)

    return call


def _in_place(target: str, after: str, why: str) -> dict[str, str]:
    return {"target": target, "before": "", "after": after, "why": why, "state": "in place"}


def _outermost(body: Callable[[], Any]) -> tuple[Any, bool]:
    """Runs ``body``; the flag says that no other hook of ours was on this thread's stack."""
    depth = getattr(_depth, "value", 0)
    _depth.value = depth + 1
    try:
        return body(), depth == 0
    finally:
        _depth.value = depth


def _attaching_constructor(host: HookHost, original: Any, *, source: str) -> Any:
    function = original.__func__

    @functools.wraps(function)
    def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
        result, outermost = _outermost(lambda: function(cls, *args, **kwargs))
        with staying_out("catching a loaded model"):
            root = result[0] if isinstance(result, tuple) else result
            if outermost and host.active:
                host.attach(root, source)
        return result

    return classmethod(construct)


def _attaching_method(host: HookHost, original: Any, *, source: str) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result, outermost = _outermost(lambda: original(self, *args, **kwargs))
        with staying_out("catching a module"):
            if outermost and not self.training and host.active:
                host.attach(self, source)
        return result

    return method


def _attaching_call(host: HookHost, original: Any) -> Any:
    from rm_abstract.hooks.host import SLOT

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.compiler import is_dynamo_compiling  # torch is still being imported above

        if is_dynamo_compiling():
            return original(self, *args, **kwargs)
        depth = getattr(_calls, "depth", 0)
        if depth == 0 and not self.training and vars(self).get(SLOT) is None and host.active:
            with staying_out("catching a called module"):
                host.attach(self, "call")
        _calls.depth = depth + 1
        try:
            return original(self, *args, **kwargs)
        finally:
            _calls.depth = depth

    return call


def _replicating_without_slot(original: Any) -> Any:
    from rm_abstract.hooks.slot import drop_slot

    @functools.wraps(original)
    def replicate(self: Any) -> Any:
        return drop_slot(original(self))

    return replicate
