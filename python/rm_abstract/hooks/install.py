"""The foreign attributes we change, all of them; `patches()` prints this list with its reasons.

Invariant: every replacement calls the original with the very arguments it got and returns its very
result. Once its session is closed it does nothing else, in case somebody patched over it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rm_abstract.hooks.imports import ImportWatch
from rm_abstract.hooks.scope import disabled_var

if TYPE_CHECKING:
    from rm_abstract.session import Session

_depth = threading.local()  # loads and train() calls in progress in this thread: outermost arms


def install(session: Session) -> None:
    """Patches what is imported and watches for what is not."""
    session.watch = ImportWatch(
        {
            "torch._tensor": lambda module: _patch_tensor(session, module),
            "torch.optim.optimizer": lambda module: _watch_optimizers(session, module),
            "torch.nn.modules.module": lambda module: _patch_module(session, module),
            "transformers.modeling_utils": lambda module: _patch_transformers(session, module),
            "transformers.generation.utils": lambda module: _patch_generation(session, module),
            "sentence_transformers.base.modules.transformer": (
                lambda module: _patch_sentence_transformers(session, module)
            ),
        }
    )
    session.watch.install()


def uninstall(session: Session) -> list[str]:
    """Restores everything; returns a line for each attribute somebody patched over."""
    if session.watch is not None:
        session.watch.remove()
    if session.optimizer_hook is not None:
        session.optimizer_hook.remove()
        session.optimizer_hook = None
    return session.patches.restore()


def _patch_tensor(session: Session, tensor_module: ModuleType) -> None:
    session.patches.replace(
        tensor_module.Tensor,
        "data",
        session.writes.data_attribute,
        "what is written through it is seen nowhere: reading it of a weight that a program has "
        "counts as a change",
    )


def _watch_optimizers(session: Session, module: ModuleType) -> None:
    """torch's own registration for all optimisers: fused steps change weights without a trace."""
    note = session.writes.note

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        from torch.compiler import is_dynamo_compiling  # torch is still being imported above

        if not is_dynamo_compiling():  # a compiled step counts versions
            note(optimizer.param_groups)

    session.optimizer_hook = module.register_optimizer_step_post_hook(stepped)


def _patch_module(session: Session, torch_module: ModuleType) -> None:
    replace = session.patches.replace
    module_class = torch_module.Module
    replace(
        module_class,
        "train",
        lambda original: _arming_method(session, original, "train"),
        "eval() ends in train(False): a plain module is ready there",
    )
    replace(
        module_class,
        "to",
        lambda original: _arming_method(session, original, "to"),
        "a module that was loaded before init() is caught when it is moved",
    )
    replace(
        module_class,
        "_replicate_for_data_parallel",
        _replicating_without_slot,
        "a replica copies the slot, and a router there would serve the original's weights",
    )


def _patch_transformers(session: Session, modeling_utils: ModuleType) -> None:
    replace = session.patches.replace
    for name, why in (
        ("from_pretrained", "the loaded root is armed"),
        ("_from_config", "a model made from a configuration is armed"),
    ):
        replace(
            modeling_utils.PreTrainedModel,
            name,
            functools.partial(_arming_constructor, session, source=name),
            why,
        )


def _patch_generation(session: Session, utils: ModuleType) -> None:
    from rm_abstract.generation.hook import preparing_cache, sampling

    session.patches.replace(
        utils.GenerationMixin,
        "_prepare_cache_for_generation",
        functools.partial(preparing_cache, session),
        "an armed model's generate gets a cache that programs append to in place",
    )
    session.patches.replace(
        utils.GenerationMixin,
        "_sample",
        functools.partial(sampling, session),
        "tokens of an armed model come from a loop over its program's steps",
    )


def _patch_sentence_transformers(session: Session, module: ModuleType) -> None:
    from rm_abstract.hooks.direct import transformer_forward

    session.patches.replace(
        module.Transformer,
        "forward",
        transformer_forward,
        "it calls model.forward itself, which would pass the router by",
    )


def _active(session: Session) -> bool:
    return not session.closed and disabled_var.get() is None


def _outermost(body: Callable[[], Any]) -> tuple[Any, bool]:
    """Runs ``body``; the flag says that no other hook of ours was on this thread's stack."""
    depth = getattr(_depth, "value", 0)
    _depth.value = depth + 1
    try:
        return body(), depth == 0
    finally:
        _depth.value = depth


def _arming_constructor(session: Session, original: Any, *, source: str) -> Any:
    function = original.__func__

    @functools.wraps(function)
    def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
        result, outermost = _outermost(lambda: function(cls, *args, **kwargs))
        root = result[0] if isinstance(result, tuple) else result
        if outermost and _active(session):
            session.arm(root, source)
        return result

    return classmethod(construct)


def _arming_method(session: Session, original: Any, source: str) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result, outermost = _outermost(lambda: original(self, *args, **kwargs))
        if outermost and not self.training and _active(session):
            session.arm(self, source)
        return result

    return method


def _replicating_without_slot(original: Any) -> Any:
    from rm_abstract.hooks.slot import drop_slot

    @functools.wraps(original)
    def replicate(self: Any) -> Any:
        return drop_slot(original(self))

    return replicate
