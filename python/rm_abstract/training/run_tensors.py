"""The tensors of one run of a step's program, looked up anew for every run: what it updates, the
gradients of earlier micro-batches, and the optimizer's numbers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.decline import Decline
from rm_abstract.training import optimizers
from rm_abstract.training.batch import is_dense
from rm_abstract.training.place import Place
from rm_abstract.training.program import StepProgram
from rm_abstract.training.routed import named


def donated(
    found: StepProgram, module: Any, optimizer: torch.optim.Optimizer
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """What the program updates, in its order, and the optimizer's counters by group.

    Without an update the parameters, which are only read, are there in the same place.
    """
    written = [named(module, name) for name in found.written]
    rules = found.wanted.rules
    if not rules:
        return [*(t.tensor for t in found.trained), *written], []
    tensors: list[torch.Tensor] = []
    counters: list[list[torch.Tensor]] = [[] for _ in rules]
    names = found.state_names
    adam = optimizers.is_adam(optimizer)
    state = optimizer.state
    for t in found.trained:
        p, group = t.tensor, t.group
        held = state.get(p, {})
        tensors.append(p)
        for name in names[group]:
            value = held.get(name)
            if value is None:
                raise Decline("RM701", f"the optimizer has no state of {t.names[0]}")
            tensors.append(value)
        if adam:
            counters[group].append(held["step"])
    return [*tensors, *written], counters


def check_dense(tensors: Iterable[torch.Tensor]) -> None:
    """Raises Decline for a tensor whose memory is not its value."""
    if not all(map(is_dense, tensors)):
        raise Decline("RM703", "a parameter or state that is no dense tensor")


def check_frozen(found: StepProgram, frozen: Sequence[torch.Tensor]) -> None:
    """Raises Decline where a weight that is only read wants a gradient since the first run."""
    wants = [t.requires_grad for t in frozen]
    if found.gradients_of_frozen is None:
        found.gradients_of_frozen = wants
    if wants != found.gradients_of_frozen:
        raise Decline("RM703", "a weight outside the optimizer that wants a gradient now")


@contextmanager
def buffers_kept(found: StepProgram, donated: Sequence[torch.Tensor]) -> Iterator[None]:
    """What the forward writes into the host's memory, as it was before where the step fails: a loss
    may refuse its targets when running means have moved already."""
    written = donated[len(donated) - len(found.written) :]
    held = [(t, t.clone()) for t in written if t.device.type == "cpu"]
    try:
        yield
    except _core.CoreError:
        with torch.no_grad():
            for tensor, before in held:
                tensor.copy_(before)
        raise


def lacks_state(found: StepProgram, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has yet to make the state of a parameter: its own step does."""
    rules = found.wanted.rules
    return any(
        optimizers.states(optimizer, t.tensor, rules[t.group]) is None for t in found.trained
    )


def sums(
    found: StepProgram, optimizer: torch.optim.Optimizer, accumulated: int
) -> list[torch.Tensor]:
    """Gradients of the step's `accumulated` earlier micro-batches, by parameter; zeros where there
    are none.

    Raises Decline where a program would lose some.
    """
    if found.wanted.micro_batches == 1:
        return []
    gradients = []
    for t in found.trained:
        p, held = t.tensor, t.tensor.grad
        if accumulated == 0 or held is None:
            held = torch.zeros_like(p, memory_format=torch.preserve_format)
        elif held.dtype != p.dtype or not is_dense(held) or held.requires_grad:
            raise Decline("RM703", f"the gradient of {t.names[0]} is {held.dtype}")
        gradients.append(held)
    if accumulated and found.wanted.rules:
        reached = {id(t.tensor) for t in found.trained}
        for group in optimizer.param_groups:
            if any(p.grad is not None and id(p) not in reached for p in group["params"]):
                raise Decline("RM703", "a gradient of a parameter that this batch has none of")
    return gradients


class HyperRows:
    """The program's input ``hyper``: a row of numbers a parameter group, then one of the limits of
    clipping where there are some. Its memory stays the same while its shape does."""

    def __init__(self) -> None:
        self._cells = array("d")
        self._held = torch.empty(0)  # the cells as a tensor
        self._place: Place | None = None  # that they were sent to
        self.tensor = self._held  # where programs read it

    def forget(self) -> None:
        """Somebody else wrote the numbers: `fill` may not rely on what it wrote."""
        self._place = None

    def fill(
        self, numbers: list[float], groups: int, limits: Sequence[float | None], place: Place
    ) -> None:
        """``limits``: the largest norm and the largest value of gradients, where they have one."""
        height = groups
        if any(limit is not None for limit in limits):
            width = len(numbers) // groups
            most = [float(limit or 0.0) for limit in limits]
            numbers = [*numbers, *most, *([0.0] * (width - len(most)))]
            height += 1
        cells = array("d", numbers)
        if cells == self._cells and height == len(self._held) and place is self._place:
            return  # they are there
        self._place = place
        if len(cells) == len(self._cells) and height == len(self._held):
            self._cells[:] = cells
        else:
            self._cells = cells
            self._held = torch.frombuffer(cells, dtype=torch.float64).reshape(height, -1)
        self.tensor = place.follow("hyper", self._held)
