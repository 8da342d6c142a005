"""Steps that run without Python: whatever somebody changes between two of them, the next step is
eager's (decision 0220)."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

import rm_abstract as rm

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8, bias=False), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)  # a bias before it would have gradients of noise
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))) * self.factor)
        return out


@dataclass
class Loop:
    """A model that somebody trains, compiled or eager."""

    model: Net
    optimizer: Any
    step: Any  # None: eager
    kept: list[Any]

    def train(self, x: torch.Tensor, y: torch.Tensor) -> float:
        if self.step is not None:
            return float(self.step(x, y).detach())
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "groups": lambda p: torch.optim.Adam(
        [{"params": p[:2], "lr": 0.02}, {"params": p[2:]}], lr=0.01
    ),
}


def loops(name: str, device: str = "cpu") -> tuple[Loop, Loop]:
    torch.manual_seed(3)
    first = Net().to(device)
    found = []
    for compiled in (True, False):
        model = copy.deepcopy(first)
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        step = rm.compile_step(model, F.cross_entropy, optimizer) if compiled else None
        found.append(Loop(model, optimizer, step, []))
    return found[0], found[1]


def batch(
    rng: random.Random, rows: int = 5, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    x, y = torch.randn(rows, 6, generator=g), torch.randint(0, 3, (rows,), generator=g)
    return x.to(device), y.to(device)


def first(loop: Loop) -> nn.Parameter:
    return loop.model.first.weight


def _set(group: str, value: Any) -> Callable[[Loop], None]:
    def edit(loop: Loop) -> None:
        if group in loop.optimizer.param_groups[0]:
            loop.optimizer.param_groups[0][group] = value

    return edit


def _states(loop: Loop) -> Any:
    return loop.optimizer.state[first(loop)]


def _replace_state(loop: Loop) -> None:
    held = _states(loop)
    name = next(n for n in held if n != "step")
    held[name] = held[name] * 0.5


def _count_on(loop: Loop) -> None:
    for held in loop.optimizer.state.values():
        if "step" in held:
            held["step"].add_(7)


def _count_anew(loop: Loop) -> None:
    for held in loop.optimizer.state.values():
        if "step" in held:
            held["step"] = torch.tensor(2.0)


def _load(loop: Loop) -> None:
    loop.model.load_state_dict(
        {k: v * 0.9 if v.is_floating_point() else v for k, v in loop.model.state_dict().items()}
    )
    loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))


def _drop_states(loop: Loop) -> None:
    loop.optimizer.state.clear()


def _scheduler(loop: Loop) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1, 0.5)
    loop.kept.append(scheduler)
    loop.optimizer.step = loop.optimizer.step
    scheduler.step()


def _hook_scales(loop: Loop) -> None:
    loop.kept.append(first(loop).register_hook(lambda g: g * 2))


def _hook_behind(loop: Loop) -> None:
    def halve(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    loop.kept.append(first(loop).register_post_accumulate_grad_hook(halve))


def _step_hook(loop: Loop) -> None:
    def shrink(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].mul_(0.9)

    loop.kept.append(loop.optimizer.register_step_post_hook(shrink))


def _global_hook(loop: Loop) -> None:
    def shrink(optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is loop.optimizer:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].mul_(0.9)

    loop.kept.append(register_optimizer_step_post_hook(shrink))


def _own_step(loop: Loop) -> None:
    plain = type(loop.optimizer).step

    def step(closure: Any = None) -> Any:
        out = plain(loop.optimizer, closure)
        with torch.no_grad():
            first(loop).mul_(0.8)
        return out

    loop.optimizer.step = step


def _another_optimizer(loop: Loop) -> None:
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.5)
    if loop.step is not None:
        loop.step.optimizer = loop.optimizer


def _tie(loop: Loop) -> None:
    with torch.no_grad():
        loop.model.norm.weight.data = loop.model.norm.bias.data  # one memory, two parameters


def _weight_by_hand(loop: Loop) -> None:
    with torch.no_grad():
        first(loop).mul_(0.5)


EDITS: dict[str, Callable[[Loop], Any]] = {
    "nothing": lambda loop: None,
    "rate": _set("lr", 0.2),
    "rate is whole": _set("lr", 1),
    "rate is a tensor": _set("lr", torch.tensor(0.03)),
    "decay begins": _set("weight_decay", 0.2),
    "decay ends": _set("weight_decay", 0),
    "betas": _set("betas", (0.7, 0.8)),
    "betas are a list": _set("betas", [0.5, 0.6]),
    "eps": _set("eps", 0.1),
    "momentum ends": _set("momentum", 0),
    "dampening": _set("dampening", 0.5),
    "nesterov": _set("nesterov", False),
    "maximize": _set("maximize", True),
    "amsgrad": _set("amsgrad", False),
    "one tensor after another": _set("foreach", False),
    "all tensors at once": _set("foreach", True),
    "weight by hand": _weight_by_hand,
    "weight's data": lambda loop: setattr(first(loop), "data", first(loop).data * 0.5),
    "weight's data, columns first": lambda loop: setattr(
        first(loop), "data", first(loop).data.t().contiguous().t()
    ),
    "weight replaced": lambda loop: setattr(
        loop.model.first, "weight", nn.Parameter(first(loop).detach() * 2)
    ),
    "frozen": lambda loop: first(loop).requires_grad_(False),
    "a gradient is left": lambda loop: setattr(first(loop), "grad", torch.ones_like(first(loop))),
    "one memory": _tie,
    "buffer replaced": lambda loop: setattr(
        loop.model.norm, "running_mean", torch.ones_like(loop.model.norm.running_mean)
    ),
    "buffer by hand": lambda loop: loop.model.norm.running_var.fill_(3.0),
    "evaluated": lambda loop: loop.model.eval(),
    "attribute": lambda loop: setattr(loop.model, "factor", 0.5),
    "layer": lambda loop: setattr(loop.model, "last", nn.Sequential(loop.model.last, nn.Tanh())),
    "forward": lambda loop: setattr(
        loop.model, "forward", lambda x: Net.forward(loop.model, x) * 3
    ),
    "forward hook": lambda loop: loop.kept.append(
        loop.model.last.register_forward_hook(lambda m, i, o: o * 2)
    ),
    "backward hook": lambda loop: loop.kept.append(
        loop.model.last.register_full_backward_hook(
            lambda m, i, o: tuple(g * 2 if g is not None else g for g in i)
        )
    ),
    "hook of a weight": _hook_scales,
    "hook behind a gradient": _hook_behind,
    "state replaced": _replace_state,
    "state by hand": lambda loop: next(v for n, v in _states(loop).items() if n != "step").mul_(
        0.3
    ),
    "states gone": _drop_states,
    "states are another dict": lambda loop: setattr(
        loop.optimizer, "state", copy.copy(loop.optimizer.state)
    ),
    "one state is another dict": lambda loop: loop.optimizer.state.__setitem__(
        first(loop), dict(_states(loop))
    ),
    "counters count on": _count_on,
    "counters are others": _count_anew,
    "loaded": _load,
    "scheduler": _scheduler,
    "step's hook": _step_hook,
    "all optimizers' hook": _global_hook,
    "step is another": _own_step,
    "another optimizer": _another_optimizer,
    "group added": lambda loop: loop.optimizer.add_param_group(
        {"params": [loop.optimizer.param_groups[0]["params"].pop()], "lr": 0.3}
    ),
    "groups are another list": lambda loop: setattr(
        loop.optimizer, "param_groups", [*loop.optimizer.param_groups]
    ),
    "member gone": lambda loop: loop.optimizer.param_groups[0]["params"].pop(0),
}


def assert_equal(ours: Loop, eager: Loop, what: str) -> None:
    for (name, a), b in zip(
        ours.model.state_dict().items(), eager.model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(
            a, b, rtol=2e-3, atol=2e-4, msg=lambda m, n=name: f"{what}: {n}: {m}"
        )
    for p, q in zip(ours.optimizer.state.values(), eager.optimizer.state.values(), strict=True):
        assert p.keys() == q.keys(), what
        for name in p:
            if isinstance(p[name], torch.Tensor):
                torch.testing.assert_close(
                    p[name],
                    q[name],
                    rtol=2e-3,
                    atol=2e-4,
                    msg=lambda m, n=name: f"{what}: {n}: {m}",
                )


def take(ours: Loop, eager: Loop, rng: random.Random, steps: int, what: str) -> None:
    for _ in range(steps):
        x, y = batch(rng)
        assert ours.train(x, y) == pytest.approx(eager.train(x, y), rel=2e-3, abs=2e-4), what
    assert_equal(ours, eager, what)


@pytest.mark.sampled(16)  # a case takes seconds: RM_HEAVY=1 runs all
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("edit", EDITS)
def test_the_step_behind_an_edit_is_eagers(edit: str, optimizer: str) -> None:
    rng = random.Random(f"{edit} {optimizer}")
    ours, eager = loops(optimizer)
    take(ours, eager, rng, 8, "before")
    assert ours.step._settled is not None
    try:
        for loop in (ours, eager):
            EDITS[edit](loop)
        take(ours, eager, rng, 1, edit)
        take(ours, eager, rng, 6, edit)
    finally:
        for loop in (ours, eager):
            for hook in loop.kept:
                getattr(hook, "remove", lambda: None)()


def test_settled_steps_are_counted_and_make_versions() -> None:
    ours, eager = loops("adam")
    rng = random.Random(1)
    take(ours, eager, rng, 8, "before")
    settled = ours.step._settled
    version, runs = first(ours)._version, ours.step.report()["compiled"]
    counter = _states(ours)["step"]._version
    take(ours, eager, rng, 4, "settled")
    assert ours.step._settled is settled  # none of them took the long way
    assert (
        ours.step.report()["compiled"]
        == runs + 4
        == sum(p["runs"] for p in ours.step.report()["programs"])
    )
    assert first(ours)._version == version + 4 and _states(ours)["step"]._version == counter + 4
    assert float(_states(ours)["step"]) == 12


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly": torch.autograd.detect_anomaly,
    "disabled": rm.disabled,
}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_seen(mode: str) -> None:
    ours, eager = loops("adam")
    rng = random.Random(2)
    take(ours, eager, rng, 8, "before")
    x, y = batch(rng)
    compiled = ours.step.report()["compiled"]
    found = []
    for loop in (ours, eager):
        with MODES[mode]():
            try:
                found.append(loop.train(x, y))
            except RuntimeError as error:
                found.append(str(error)[:40])
    assert (
        found[0] == pytest.approx(found[1], rel=2e-2)
        if isinstance(found[1], float)
        else found[0] == found[1]
    )
    assert ours.step.report()["compiled"] == compiled
    if mode in ("disabled", "anomaly"):
        take(ours, eager, rng, 4, mode)


def _requires(x: torch.Tensor, loop: Loop) -> torch.Tensor:
    return x.clone().requires_grad_()


BATCHES: dict[str, Callable[[torch.Tensor, Loop], torch.Tensor]] = {
    "requires a gradient": _requires,
    "columns first": lambda x, loop: x.t().contiguous().t(),
    "every second row": lambda x, loop: x.repeat_interleave(2, 0)[::2],
    "repeated": lambda x, loop: x[:1].expand(5, 6),
    "float64": lambda x, loop: x.double(),
    "a parameter": lambda x, loop: nn.Parameter(x),
    "more rows": lambda x, loop: torch.cat([x, x])[:7],
    "a weight's own memory": lambda x, loop: first(loop).detach()[:5],
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_another_kind(kind: str) -> None:
    ours, eager = loops("momentum")
    rng = random.Random(kind)
    take(ours, eager, rng, 8, "before")
    x, y = batch(rng)
    found = []
    for loop in (ours, eager):
        given = BATCHES[kind](x, loop)
        target = y if len(given) == 5 else torch.cat([y, y])[: len(given)]
        try:
            found.append(loop.train(given, target))
        except RuntimeError as error:
            found.append(str(error)[:40])
    assert (
        found[0] == pytest.approx(found[1], rel=2e-3)
        if isinstance(found[1], float)
        else found[0] == found[1]
    )
    if isinstance(found[1], float):
        take(ours, eager, rng, 6, kind)


def test_drawn_edits_behind_each_other() -> None:
    """What one edit leaves meets the next one; each loop is built and edited alike."""
    rng = random.Random(7)
    calm = [
        n
        for n in EDITS
        if n not in ("all optimizers' hook", "another optimizer", "layer", "rate is whole")
    ]
    for case in range(12):
        ours, eager = loops(rng.choice(list(OPTIMIZERS)))
        names = rng.sample(calm, 4)
        take(ours, eager, rng, rng.randrange(3, 9), f"case {case}")
        for name in names:
            outcome = []
            for loop in (ours, eager):
                try:
                    EDITS[name](loop)
                    outcome.append("")
                except (StopIteration, IndexError, AttributeError, KeyError, ValueError) as error:
                    outcome.append(type(error).__name__)
            assert outcome[0] == outcome[1]
            try:
                take(ours, eager, rng, rng.randrange(1, 6), f"case {case}: {names}, {name}")
            except RuntimeError:  # an edit that eager refuses, too
                with pytest.raises(RuntimeError):
                    eager.train(*batch(rng))
                break
