"""Calls of a model in evaluation mode that are made with gradients enabled.

A compiled program computes no gradients. Such a call is therefore served in two halves: the
program gives the outputs, and `Recomputed`, an autograd function, runs the original forward again
when the outputs are differentiated. Between the two nothing but the inputs is kept, so the
activations take no memory.

What decides whether a call is served this way:
* The first call of a kind runs the original with gradients and learns which outputs require them
  and whether the forward is pure (`Learned`). Only pure forwards may run a second time.
* Where the outputs are differentiated, the original would have been faster: after each backward
  the next calls stay with the original (`EagerPeriod`). Who forgot `torch.no_grad()` never calls
  backward, and keeps the compiled program.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import ExecutionError
from rm_abstract.base.scope import disabled_var
from rm_abstract.guards.purity import Effects
from rm_abstract.kv import kv_cache
from rm_abstract.verification import parity

_OF_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_HOOKS = (*_OF_FORWARD, "_backward_hooks", "_backward_pre_hooks")
_OF_TRANSFORMERS = "transformers.utils.output_capturing"  # its hooks do nothing in a served call
_MAX_KINDS = 64  # kinds of calls remembered a model; more are left to the original
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 1024  # calls left to the original after a backward


Hooks = list[tuple[nn.Module, str, Any]]


def _hooks_of(module: nn.Module, names: tuple[str, ...]) -> Hooks:
    """Where parts of the module have hooks, and a copy of these."""
    return [
        (part, name, OrderedDict(held))
        for part in module.modules()
        for name in names
        if (held := vars(part)[name])
    ]


def _forward_hooks(module: nn.Module) -> bool:
    """Whether forward hooks of the user's would run."""
    held = [hook for _, _, hooks in _hooks_of(module, _OF_FORWARD) for hook in hooks.values()]
    return any([getattr(hook, "__module__", None) != _OF_TRANSFORMERS for hook in held])


def _forward(module: nn.Module) -> Callable[..., Any]:
    """What `module(...)` calls when no router is in its slot."""
    call: Callable[..., Any] = module._call_impl
    return call


def output_tensors(output: Any) -> list[torch.Tensor] | None:
    """The tensors of an output in a fixed order, those of caches too; None: it holds others."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(output, is_leaf=kv_cache.is_cache):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif kv_cache.is_cache(leaf):
            held = kv_cache.contents(leaf)
            if isinstance(held, Decline):
                return None
            found += [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
        elif leaf is not None and not isinstance(leaf, (bool, int, float, str)):
            return None
    return found


def input_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """The tensors among the arguments; None when one is a cache, which a second run would move."""
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=kv_cache.is_cache)
    if any(kv_cache.is_cache(leaf) for leaf in leaves):
        return None
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class Learned:
    """What the first call of a kind showed. ``refused`` is a reason, empty when it may be served;
    ``differentiable`` says for each output tensor whether it requires gradients."""

    refused: str = ""
    differentiable: tuple[bool, ...] = ()


class Needed(NamedTuple):
    """What requires gradients in one call."""

    inputs: list[torch.Tensor] | None  # None: an argument is a cache, which a second run would move
    of_inputs: tuple[bool, ...]
    weights: Weights
    of_weights: tuple[bool, ...]
    looked_at: bool  # whether the module agrees with a snapshot, which has no forward hooks


class EagerPeriod:
    """How many calls stay with the original because the last ones were differentiated."""

    def __init__(self) -> None:
        self._left, self._next = 0, _FIRST_PAUSE

    def paused(self) -> bool:
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def differentiated(self) -> None:
        if self._left == 0:  # of several backwards between two calls the first counts
            self._left, self._next = self._next, min(2 * self._next, _LONGEST_PAUSE)


class Weights:
    """The parameters and buffers of a module at one moment, and how to run forward with them."""

    def __init__(self, module: nn.Module) -> None:
        self._named = [*module.named_parameters(), *module.named_buffers()]
        by_id = {id(tensor): tensor for _, tensor in self._named}
        self.ids, self.tensors = by_id.keys(), list(by_id.values())  # each once
        self.of_inference = any(tensor.is_inference() for tensor in self.tensors)

    def wanted(self) -> tuple[bool, ...]:
        """Which of `tensors` require gradients just now."""
        return tuple([tensor.requires_grad for tensor in self.tensors])

    def replaced(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """By name, the tensors of then that the module no longer has."""
        now = dict([*module.named_parameters(), *module.named_buffers()])
        return {name: tensor for name, tensor in self._named if now.get(name) is not tensor}

    def named(self, wanted: set[int]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self._named if id(tensor) in wanted}


class GradientCalls:
    """Serves one model's calls that need gradients.

    ``describe`` gives the router's key of a call, ``routed`` the number of calls it has served.
    """

    def __init__(
        self,
        module: nn.Module,
        describe: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]],
        routed: Callable[[], int],
    ) -> None:
        self._module = weakref.ref(module)
        self._describe, self._routed = describe, routed
        self._known: dict[Any, Learned] = {}
        self._unsettled: set[Any] = set()  # kinds whose first call changed something
        self._eager_period = EagerPeriod()
        self._weights: Weights | None = None
        self._state: int | None = None  # the snapshot that `_weights` are of, if any
        self.why = ""  # the last call that was left to the original: for the report

    def weights_changed(self, structure: bool) -> None:
        """The router found other weights, or (``structure``) another module: learn again."""
        self._weights = self._state = None
        if structure:
            self._known.clear()

    def needed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: int | None
    ) -> Needed | None:
        """None where no weight and no argument of the call requires gradients. ``state``: the
        number of the snapshot that the module agrees with; None: its weights are read again."""
        if state is None or state != self._state:
            self._weights, self._state = None, state
        weights, inputs = self._current(), input_tensors(args, kwargs)
        tensors = pytree.tree_leaves((args, kwargs)) if inputs is None else inputs
        of_inputs = tuple([isinstance(t, torch.Tensor) and t.requires_grad for t in tensors])
        of_weights = weights.wanted()
        if not any(of_weights) and not any(of_inputs):
            return None
        return Needed(inputs, of_inputs, weights, of_weights, state is not None)

    def _current(self) -> Weights:
        if self._weights is None:
            module = self._module()
            assert module is not None  # its own call is running
            self._weights = Weights(module)
        return self._weights

    def serve(
        self,
        route: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        needed: Needed,
    ) -> Any:
        """The outputs, connected to a gradient; NotImplemented: the original must serve the call.

        ``route(*args, **kwargs)`` serves a call when gradients are disabled. With NotImplemented,
        `why` has the reason, and nothing of the user's ran.
        """
        module = self._module()
        inputs, weights = needed.inputs, needed.weights
        if module is None or inputs is None:
            return self._leave("gradients are enabled and an argument is a cache")
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return self._leave("hooks see the tensors that a backward needs")
        if self._eager_period.paused():
            return self._leave("its gradients are computed: PyTorch's own forward is faster then")
        if any([t._backward_hooks for t in compress(weights.tensors, needed.of_weights)]):
            return self._leave("a weight has gradient hooks")
        if weights.of_inference or any([t.is_inference() for t in inputs]):
            return self._leave("a tensor of inference mode cannot be kept for a backward")
        if not needed.looked_at and _forward_hooks(module):
            return self._leave("forward hooks are registered")
        kind = self._kind(args, kwargs, needed)
        if kind is None:
            return self._leave("gradients are enabled")
        known = self._known.get(kind)
        if known is None:
            if len(self._known) >= _MAX_KINDS:
                return self._leave("more than 64 kinds of calls with gradients enabled")
            return self._learn(kind, module, args, kwargs, inputs, weights)
        if known.refused:
            return self._leave(known.refused)
        return self._connected(route, known, module, args, kwargs, needed)

    def _leave(self, why: str) -> Any:
        self.why = why
        return NotImplemented

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any], needed: Needed) -> Any:
        """What decides which outputs require gradients; None: the router takes no such call."""
        with torch.no_grad():
            described = self._describe(args, kwargs)
        if len(described) == 2:
            return None
        return described[1], needed.of_inputs, needed.of_weights

    def _learn(
        self,
        kind: Any,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        weights: Weights,
    ) -> Any:
        """Runs the original with gradients, watched for effects; the user gets its output."""
        token = disabled_var.set("learning")
        try:
            with Effects(module) as effects:
                output = _forward(module)(*args, **kwargs)
        finally:
            disabled_var.reset(token)
        if effects.found and effects.settles and kind not in self._unsettled:
            self._unsettled.add(kind)  # a first call may set something up: look once more
        else:
            self._known[kind] = _learned(output, effects, [*inputs, *weights.tensors])
        return output

    def _connected(
        self,
        route: Callable[..., Any],
        known: Learned,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        needed: Needed,
    ) -> Any:
        served = self._routed()
        with torch.no_grad():
            output = route(*args, **kwargs)
        if self._routed() == served:  # compiled, compared or declined: the weights may be others
            self._weights, self._state = Weights(module), None
        weights, of_weights = self._current(), needed.of_weights
        if weights is not needed.weights:
            of_weights = weights.wanted()
        output = _without_views(output)
        tensors = output_tensors(output)
        if tensors is None or len(tensors) != len(known.differentiable):
            raise ExecutionError(
                "[gradients] the forward gave other outputs than in its first call with gradients "
                "enabled; try torch.no_grad()",
                code="RM503",
            )
        results = [t for t, wanted in zip(tensors, known.differentiable, strict=True) if wanted]
        inputs = {id(t): t for t in needed.inputs or () if id(t) not in weights.ids}
        given = [*inputs.values(), *weights.tensors]  # each once
        towards = [t for t in inputs.values() if t.requires_grad]
        towards += compress(weights.tensors, of_weights)
        if results and towards:
            hooks = _hooks_of(module, _HOOKS)
            call = _Call(
                module, args, kwargs, weights, known, towards, results, self._eager_period, hooks
            )
            _connect(call, given, *towards)
        return output


def _without_views(output: Any) -> Any:
    """The output with tensors that are nobody's views: of an autograd function's outputs such may
    not be changed in place. Those of the original are views of what nobody else holds."""

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf._is_view():
            return leaf
        value = leaf.resolve_conj().resolve_neg()  # memory is to be the value
        made = value.new_empty(0)
        return made.set_(
            value.untyped_storage(), value.storage_offset(), value.shape, value.stride()
        )

    leaves = pytree.tree_leaves(output, is_leaf=kv_cache.is_cache)
    if not any([isinstance(t, torch.Tensor) and t._is_view() for t in leaves]):
        return output
    with torch.no_grad():
        return pytree.tree_map(own, output, is_leaf=kv_cache.is_cache)


def _learned(output: Any, effects: Effects, given: list[torch.Tensor]) -> Learned:
    if effects.found:
        return Learned(effects.found)
    if "is_grad_enabled" in effects.state_reads or "requires_grad" in effects.state_reads:
        return Learned("forward asks whether gradients are wanted")
    tensors = output_tensors(output)
    if tensors is None:
        return Learned("an output is no tensor, cache or container of them")
    storages = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
    taken = {t.untyped_storage().data_ptr() for t in given if t.numel()}
    if len(set(storages)) != len(storages) or taken.intersection(storages):
        return Learned("outputs share memory with each other, an input or a weight")
    return Learned("", tuple(t.requires_grad for t in tensors))


@dataclass
class _Call:
    """One served call, as its backward needs it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: Weights
    known: Learned
    towards: list[torch.Tensor]  # inputs and weights that gradients are wanted for
    results: list[torch.Tensor]  # the differentiable outputs, until they are connected
    eager_period: EagerPeriod
    hooks: Hooks  # as they were in the call
    given_out: list[tuple[Any, int]] = field(default_factory=list)  # weak references, versions

    def hand_out(self) -> tuple[torch.Tensor, ...]:
        """The results, which this object keeps weakly from now on: they may be large."""
        results, self.results = tuple(self.results), []
        self.given_out = [(weakref.ref(t), t._version) for t in results]
        return results

    def gradients(
        self, given: tuple[torch.Tensor | None, ...], create: bool
    ) -> list[torch.Tensor | None]:
        """The gradients of the results with respect to `towards`, by running forward again.

        `given` has a gradient, or None, for each result.
        """
        stand_ins = self._stand_ins(create)
        targets = [stand_ins.get(id(t), t) for t in self.towards]
        tensors = output_tensors(self._again(stand_ins)) or []
        again = [t for t, wanted in zip(tensors, self.known.differentiable, strict=True) if wanted]
        self._compare(again)
        pairs = [
            (t, g) for t, g in zip(again, given, strict=True) if g is not None and t.requires_grad
        ]
        if not pairs:
            return [None] * len(targets)
        outputs, slopes = zip(*pairs, strict=True)
        return list(
            torch.autograd.grad(outputs, targets, slopes, create_graph=create, allow_unused=True)
        )

    def _stand_ins(self, create: bool) -> dict[int, torch.Tensor]:
        """For inputs, replaced weights and weights with hooks: another tensor of the same values.

        Differentiating with respect to the tensor itself would run its hooks, which autograd runs
        anyway when it passes our result on.
        """
        inputs = input_tensors(self.args, self.kwargs) or []
        apart = {id(t) for t in inputs}
        apart |= {id(t) for t in self.towards if t._backward_hooks or not t.requires_grad}
        apart |= {id(t) for t in self.weights.replaced(self.module).values()}
        return {
            id(t): t.view_as(t) if create and t.requires_grad else t.detach().requires_grad_()
            for t in self.towards
            if id(t) in apart
        }

    def _again(self, stand_ins: dict[int, torch.Tensor]) -> Any:
        def swap(leaf: Any) -> Any:
            return stand_ins.get(id(leaf), leaf)

        args, kwargs = pytree.tree_map(swap, (self.args, self.kwargs))
        others = {name: swap(t) for name, t in self.weights.replaced(self.module).items()}
        others.update((n, swap(t)) for n, t in self.weights.named(set(stand_ins)).items())
        if others:
            return torch.func.functional_call(self.module, others, args, kwargs)
        return _forward(self.module)(*args, **kwargs)

    def _compare(self, again: list[torch.Tensor]) -> None:
        """Raises when forward computes something else now: gradients of another function."""
        precision = parity.working_precision(again)
        for tensor, (reference, version) in zip(again, self.given_out, strict=True):
            before = reference()
            if before is None or before._version != version:  # gone, or changed by the user
                continue
            # The question is whether it is the same function: rounding counts for nothing here.
            verdict = parity.compare(before.detach(), tensor.detach(), precision, 8)
            if not verdict.passed:
                raise ExecutionError(
                    "[gradients] forward gives other values in backward than it gave in the call: "
                    f"{verdict.detail}; the model was changed in between, or it is not a function "
                    "of its inputs and weights; try rm_abstract.disabled() around the call",
                    code="RM503",
                )


class Recomputed(torch.autograd.Function):
    """Connects outputs that a program computed to the inputs and weights they depend on."""

    @staticmethod
    def forward(ctx: Any, call: _Call, given: list[torch.Tensor], *towards: torch.Tensor) -> Any:
        """`given`: all inputs and weights, whose versions autograd checks in backward."""
        ctx.call = call
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        return call.hand_out()

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Any:
        _ = ctx.saved_tensors  # raises where eager does: freed already, or changed in place since
        call: _Call = ctx.call
        call.eager_period.differentiated()
        create = torch.is_grad_enabled()
        with torch.enable_grad(), _as_in_the_call(call.module, call.hooks):
            return (None, None, *call.gradients(given, create))


# What `apply` calls once it has looked at every argument for tensors of a transform of torch.func
# that has ended, which takes a fifth of such a call's time beside its program. The router takes no
# such tensor.
_connect: Callable[..., Any] = super(torch.autograd.Function, Recomputed).apply


@contextlib.contextmanager
def _as_in_the_call(module: nn.Module, hooks: Hooks) -> Iterator[None]:
    """Evaluation mode, the hooks of the call, no autocast and no routing, whatever the state around
    `backward` is."""
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        raise ExecutionError(
            "[gradients] expected no hooks of all modules in backward, as there were none in the "
            "call; try to remove them before, or rm_abstract.disabled() around the call",
            code="RM503",
        )
    training = [part for part in module.modules() if part.training]
    now = [(part, name, vars(part)[name]) for part, name, _ in hooks]
    now += [(part, name, vars(part)[name]) for part, name, _ in _hooks_of(module, _HOOKS)]
    token = disabled_var.set("backward")
    for part in training:
        part.training = False
    for part, name, _ in now:
        vars(part)[name] = OrderedDict()
    for part, name, held in hooks:
        vars(part)[name] = held
    try:
        with torch.autocast("cpu", enabled=False):
            yield
    finally:
        for part in training:
            part.training = True
        for part, name, held in now:
            vars(part)[name] = held
        disabled_var.reset(token)
