"""What compiled steps and compiled losses share: the captured module with its loss, the watch over
what it reads, programs by batch, and why something ran eager.

A program is used only while nothing that its capture read has changed; then all programs go.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base import listed_steps
from rm_abstract.base.config import Settings
from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import Error, RoutingWarning
from rm_abstract.base.reasons import remedy_of
from rm_abstract.base.scope import disabled_var
from rm_abstract.capture.ir_builder import RANDOM
from rm_abstract.capture.training import Forward, capture_forward
from rm_abstract.guards import sources
from rm_abstract.hooks.route import make_facts
from rm_abstract.training import batch as batches
from rm_abstract.training.batch import is_dense
from rm_abstract.training.dropout import new_state
from rm_abstract.training.place import Place, place_of
from rm_abstract.training.program import StepProgram, Tied
from rm_abstract.training.pure_forward import PureForward
from rm_abstract.training.stored import Stored

PASSING = ("RM108", "RM103")  # somebody asked for eager


class Routed:
    """For one thread at a time. ``name`` is what errors and warnings call it."""

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        loss_fn: Any,
        settings: Settings,
        precision: str = "auto",
        scaler: Any = None,
    ) -> None:
        if precision != "auto" and precision not in batches.HALF:
            raise ValueError(
                f"[{name}] expected precision 'auto', 'bf16' or 'fp16', got {precision!r}"
            )
        self.scaler = scaler  # torch.amp.GradScaler, or None: losses are not scaled
        self._scale = torch.empty(())  # f32, an input of programs whose loss is scaled
        self._place = Place(torch.device("cpu"))  # known at the first step
        self._name, self._settings = name, settings
        self._module = batches.StepModule(model, loss_fn, precision)
        self._programs: dict[Hashable, StepProgram] = {}
        self._refused: dict[Hashable, Decline] = {}
        self._stored: Stored | None = None  # opened by the first program
        self._random = new_state()
        self._tree: Any = None
        self._facts: Any = None  # of torch, as the tree's guard reads it
        self._hook_dicts: list[Any] = []
        self._signature: Hashable = None  # of what else programs were made for
        self._pure = PureForward()
        self._reasons: dict[str, str] = {}
        self._counts = {"compiled": 0, "eager": 0}
        listed_steps.add(self)

    @property
    def name(self) -> str:
        """Of the function that made it."""
        return self._name

    # What programs are made of, and so nothing that could be set.

    @property
    def model(self) -> torch.nn.Module:
        return self._module.model

    @property
    def loss_fn(self) -> Any:
        return self._module.loss_fn

    @property
    def precision(self) -> str:
        return self._module.precision

    # ---- making programs ---------------------------------------------------------------------

    def _make(
        self,
        tensors: list[torch.Tensor],
        key: Hashable,
        structure: Any,
        compile_program: Callable[[Forward, list[Tied], Stored], StepProgram],
        batch: Hashable = None,
    ) -> StepProgram:
        """The program for batches like this one, not yet checked.

        ``key`` is the program's, ``batch`` the batch's, where one has several programs.
        """
        try:
            forward, parameters = self._forward(tensors, batch or key, structure)
            assert self._stored is not None
            found = compile_program(forward, parameters, self._stored)
        except Decline as decline:
            self._refused[key] = decline
            raise
        except Error as error:
            self._refused[key] = Decline(error.code or "RM306", str(error))
            raise self._refused[key] from error
        self._programs[key] = found
        return found

    def _forward(
        self, tensors: list[torch.Tensor], key: Hashable, structure: Any
    ) -> tuple[Forward, list[Tied]]:
        parameters = self._parameters()
        with original():
            module = batches.OfTensors(self._module, structure)
            names = {n for t in parameters for n in t.names}
            if self._stored is None:
                self._stored = Stored(self._settings)
            forward = self._stored.forward(
                self._module,
                (self.precision, self._place.kind, key),
                names,
                lambda: capture_forward(module, tensors, names),
            )
        used = set(forward.weights)
        tied = [Tied(t.tensor, [n for n in t.names if n in used], t.group) for t in parameters]
        return forward, [t for t in tied if t.names]

    def _parameters(self) -> list[Tied]:
        """What is trained, under its names in the capture. Raises Decline."""
        raise NotImplementedError

    def _names(self) -> dict[int, list[str]]:
        """All names of each parameter, by its identity."""
        names: dict[int, list[str]] = {}
        for name, p in self._module.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), []).append("step." + name)
        return names

    def _frozen(self, found: StepProgram) -> list[torch.Tensor]:
        return [
            self._place.follow("random", self._random)
            if n == RANDOM
            else found.constants[n]
            if n in found.constants
            else named(self._module, n)
            for n in found.frozen
        ]

    def _scales(self) -> list[torch.Tensor]:
        """The input behind the batch: what the loss is multiplied with before its gradients."""
        if self.scaler is None:
            return []
        self._scale.fill_(self.scaler.get_scale())
        return [self._scale]

    # ---- is everything as it was? --------------------------------------------------------------

    def _anchor(self) -> Any:
        """A parameter, which shows where the model lies; None without any."""
        raise NotImplementedError

    def _locate(self) -> None:
        """Follows a model that was moved: programs are for one device."""
        anchor = self._anchor()
        if anchor is None or anchor.device == self._place.device:
            return
        self._place = place_of(anchor)
        self._module.kind = self._place.kind
        self._scale = torch.empty((), device=self._place.device)
        self._signature = None

    def _check_module(self, signature: Hashable) -> None:
        """Drops all programs when the model, the loss or ``signature`` is not what it was."""
        why = self._tree.why_not() if self._tree is not None else None
        if why is not None:
            self._tree = None
            self._pure.changed(why[1])
        if self._tree is None or signature != self._signature:
            self._watch(signature)
        if any(self._hook_dicts):
            raise Decline("RM706", "backward hooks of a module")

    def _watch(self, signature: Hashable) -> None:
        self._programs.clear()
        self._refused.clear()
        self._tree = None
        self._module.training = self.model.training
        found = sources.of_module(self._module)
        if found.unseen:
            raise Decline("RM210", found.unseen[0])
        own = {id(p) for p in self._module.parameters()}
        for tensor, where in found.tensors:
            if tensor.requires_grad and id(tensor) not in own:  # eager leaves it its gradient
                raise Decline("RM703", f"{where} requires a gradient and is not the module's")
        self._facts = make_facts()
        tree = _core.router.TrainedTree(self._facts, self._module, found.rows())
        why = tree.why_not()
        if why is not None:
            raise Decline(*why)
        self._hook_dicts = [
            hooks
            for m in self._module.modules()
            for hooks in (m._backward_hooks, m._backward_pre_hooks)
        ]
        self._tree, self._signature = tree, signature

    # ---- what happened -------------------------------------------------------------------------

    def _judge(
        self, found: StepProgram, key: Hashable, difference: str, loss: torch.Tensor
    ) -> None:
        """What a batch that eager and the program computed says of the program."""
        if difference and found.trial.refuses():
            self._refused[key] = Decline("RM705", difference)
            del self._programs[key]
            self._note(self._refused[key])
        elif not difference and bool(loss == loss):  # NaN shows nothing
            found.checked = found.trial.trusts()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Programs, and what they were compared with, are of this process and of these tensors."""
        raise Error(
            f"[{self._name}] expected no copy and no pickle of what was compiled, got one; try to "
            f"copy or save model and optimizer, and call rm_abstract.{self._name} with the copies"
        )

    def _note(self, decline: Decline) -> None:
        if decline.code in self._reasons:
            return
        self._reasons[decline.code] = decline.detail
        if decline.code in PASSING:
            return
        text = f"{decline.code} {decline.detail}; try {remedy_of(decline.code)}"
        policy = self._settings.fallback_for("training")
        if policy == "error":
            raise Error(
                f"[{self._name}] expected a step that compiles, got {text}", code=decline.code
            )
        if policy == "warn":
            warnings.warn(f"rm_abstract: steps run eager: {text}", RoutingWarning, stacklevel=4)

    def report(self) -> dict[str, Any]:
        """How many steps were compiled and eager, why eager, how many forwards were captured and
        how many came from the compile cache, and each program's figures."""
        return {
            **self._counts,
            **(self._stored.sources if self._stored is not None else {}),
            "reasons": dict(self._reasons),
            "programs": [{"runs": p.runs, **p.program.report()} for p in self._programs.values()],
        }


def check_parameter(p: torch.Tensor, name: str, device: torch.device) -> None:
    """Raises Decline for a parameter that no program on the device trains."""
    dense = is_dense(p) and p.device == device
    if not dense or p.dtype not in (torch.float32, torch.float64):
        raise Decline("RM703", f"{name} is {p.dtype} on {p.device}")


def named(module: Any, name: str) -> torch.Tensor:
    """A weight by its name in the capture."""
    found: Any = module
    for part in name.removeprefix("step.").split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def span(t: torch.Tensor) -> tuple[int, int]:
    """First byte and the one behind the last that the tensor touches."""
    start = t.data_ptr()
    if t.is_contiguous() or not t.numel():
        return start, start + t.nbytes
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return start, start + (last + 1) * t.element_size()


def _has_memory(t: torch.Tensor) -> bool:
    start = t.untyped_storage().data_ptr()
    return not t.numel() or span(t)[1] <= start + t.untyped_storage().nbytes()


def check_apart(found: StepProgram, batch: Collection[torch.Tensor], donated: Any) -> None:
    """Raises Decline where tensors that are updated share memory with each other or the batch."""
    memory = [t.data_ptr() for t in donated]
    if memory != found.memory:
        if not all(map(_has_memory, donated)):
            raise Decline("RM703", "a parameter or state whose storage was freed or cut")
        spans = sorted(span(t) for t in donated if t.numel())
        if any(a[1] > b[0] for a, b in pairwise(spans)):
            raise Decline("RM703", "parameters or states that share memory")
        found.memory, found.spans = memory, spans
    if not found.spans:
        return
    for t in batch:
        start, end = span(t)
        before = bisect_left(found.spans, (end, 0))  # spans that begin in front of its end
        if before and found.spans[before - 1][1] > start:
            raise Decline("RM703", "a batch that shares memory with a parameter")


@contextmanager
def original() -> Iterator[None]:
    """Nothing inside is routed."""
    token = disabled_var.set("compiling")
    try:
        yield
    finally:
        disabled_var.reset(token)
