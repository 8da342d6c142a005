"""Optimisers: rules of the core (src/autograd/optimizers.cpp) applied to parameters and states in
place. They know numbers, not layers.

Rates, decays and bias corrections are one small tensor for all parameters that took as many steps.
It is filled before every step and every replay, so ``optimizer.lr = ...`` takes effect in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rm_abstract import _core
from rm_abstract.base.errors import Error
from rm_abstract.framework import programs, saving
from rm_abstract.framework.backends import Numbers
from rm_abstract.framework.recording import each_time, once_a_step
from rm_abstract.framework.tensor import Tensor, executor

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]


class Optimizer:
    """Updates parameters from their ``grad``. ``lr`` may be set between steps."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, rule: dict[str, object]) -> None:
        self.parameters = list(parameters)
        if not self.parameters:
            raise ValueError("[optim] expected a parameter, got none")
        if not all(isinstance(p, Tensor) for p in self.parameters):
            raise TypeError("[optim] expected tensors of rm_abstract as parameters")
        if len({id(p) for p in self.parameters}) != len(self.parameters):
            raise ValueError("[optim] expected each parameter once")
        if not lr >= 0.0:
            raise ValueError(f"[optim] expected a rate of at least 0, got {lr}")
        self.lr = lr
        self.counts = [0] * len(self.parameters)  # steps that each parameter took
        self._rule = tuple(rule.items())
        names = _core.autograd.states(rule)
        self.states = [{n: torch.zeros_like(p.data) for n in names} for p in self.parameters]
        self._width = len(_core.autograd.columns(rule["algorithm"]))
        self._numbers: list[Numbers] = []  # of as many groups as a step had

    @property
    def steps(self) -> int:
        """Those of the parameter that took most."""
        return max(self.counts)

    def numbers(self, step: int) -> list[float]:
        """The row of the rule for this step, the first is 1, in the order of its columns."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """One update of every parameter that has a gradient. Raises Error RM709 for a second one
        in a step that is recorded."""
        once_a_step(self)
        groups: dict[int, list[int]] = {}  # places of parameters, by the steps that they took
        for i, p in enumerate(self.parameters):  # before the first of them is updated
            if p.grad is not None:
                groups.setdefault(self.counts[i], []).append(i)
            if p.grad is not None and (p.grad.shape, p.grad.dtype) != (p.shape, p.dtype):
                raise ValueError(
                    f"[optim] expected a gradient {p.shape} of {p.dtype}, got {p.grad.shape} of "
                    f"{p.grad.dtype}"
                )
        members, by = list(groups.values()), executor()
        while len(self._numbers) < len(members):
            self._numbers.append(Numbers(torch.zeros(self._width, dtype=torch.float64)))
        each_time(before=lambda: self._fill(members))
        for group, numbers in zip(members, self._numbers, strict=False):
            there = numbers.at(by.backend)
            for i in group:
                p = self.parameters[i]
                assert p.grad is not None
                program = programs.update(self._rule, p.data)
                by.execute(program, [p.data, *self.states[i].values(), p.grad.data, there])
        each_time(after=lambda: self._count(members))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """``steps``, ``lr``, and the states by parameter, which share memory with the own."""
        held = {f"{i}.{n}": t for i, row in enumerate(self.states) for n, t in row.items()}
        lr = torch.tensor(self.lr, dtype=torch.float64)
        return {"steps": torch.tensor(self.counts), "lr": lr, **held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what another `state_dict` gave, all or nothing. Raises ValueError when names or
        shapes differ."""
        own = self.state_dict()
        given = saving.matching("load_state_dict", own, state)
        self.counts, self.lr = given.pop("steps").tolist(), float(given.pop("lr"))
        for name, value in given.items():
            own[name].copy_(value)

    def _fill(self, members: list[list[int]]) -> None:
        for group, numbers in zip(members, self._numbers, strict=False):
            counts = {self.counts[i] for i in group}
            if len(counts) > 1:
                raise Error(
                    "[optim] expected parameters that take part in a recorded step as they did "
                    f"when it was recorded, got some that took {min(counts)} and others "
                    f"{max(counts)} steps; try rm_abstract.record anew",
                    code="RM709",
                )
            row = self.numbers(counts.pop() + 1)
            numbers.host.copy_(torch.tensor(row, dtype=torch.float64))
            numbers.send(executor().backend)

    def _count(self, members: list[list[int]]) -> None:
        for i in (i for group in members for i in group):
            self.counts[i] += 1


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as torch.optim.SGD."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        self.momentum, self.dampening, self.weight_decay = momentum, dampening, weight_decay
        rule = {
            "algorithm": "sgd",
            "momentum": momentum != 0,
            "nesterov": nesterov,
            "weight_decay": weight_decay != 0,
        }
        super().__init__(parameters, lr, rule)

    def numbers(self, step: int) -> list[float]:
        # The first gradient fills the buffer undamped, as in torch.
        undamped = 1.0 if step == 1 else 1.0 - self.dampening
        return [self.lr, self.weight_decay, self.momentum, undamped]


class Adam(Optimizer):
    """Kingma & Ba 2015, as torch.optim.Adam: ``weight_decay`` is added to the gradient."""

    _decoupled = False

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"[optim] expected betas of at least 0 and below 1, got {betas}")
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        rule = {
            "algorithm": "adam",
            "weight_decay": weight_decay != 0,
            "decoupled": self._decoupled,
        }
        super().__init__(parameters, lr, rule)

    def numbers(self, step: int) -> list[float]:
        b1, b2 = self.betas
        size = self.lr / (1.0 - b1**step)
        root = math.sqrt(1.0 - b2**step)
        keep = 1.0 - self.lr * self.weight_decay
        return [self.weight_decay, keep, 1.0 - b1, b2, 1.0 - b2, self.eps, size, root]


class AdamW(Adam):
    """Loshchilov & Hutter 2019, as torch.optim.AdamW: the decay shrinks the parameter itself."""

    _decoupled = True

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(parameters, lr, betas=betas, eps=eps, weight_decay=weight_decay)
