"""Training runs that a generator draws: a model, a loss, an optimiser, and edits between steps.

Written from docs/api.md alone. A case is made twice from one seed, as two `World`s that nothing is
shared between; every edit is done to both.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, CLASSES = 6, 5
STRENGTH = 1.0  # a global that the loss of a model may read


# ---- models --------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Reads an attribute that is a number, a buffer that nothing writes, and a global."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.7
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, WIDTH))

    def forward(self, x: Any) -> Any:
        x = x + self.scale * F.gelu(self.first(self.norm(x)) + self.shift)
        return self.second(x) * STRENGTH


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * 8)
        self.outer = nn.Linear(8, CLASSES)

    def forward(self, x: Any) -> Any:
        q, k, v = self.inner(x.unsqueeze(0)).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v)
        return self.outer(y.transpose(1, 2).reshape(-1, 8))


class Tied(nn.Module):
    """One table under two names, and a branch that only some calls take."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.b.weight = self.a.weight
        self.head, self.other = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)
        self.use_other = False

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.b(torch.relu(self.a(x))))
        return self.other(x) if self.use_other else self.head(x)


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, CLASSES)
    )


def _batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Dropout(0.0), nn.Linear(8, CLASSES)
    )


def _images() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "residual": Residual,
    "attention": Attention,
    "tied": Tied,
    "batch norm": _batch_norm,
    "images": _images,
}


# ---- losses --------------------------------------------------------------------------------------


class Smoothed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.smoothing = 0.1

    def forward(self, output: Any, target: Any) -> Any:
        return F.cross_entropy(output, target, label_smoothing=self.smoothing)


LOSSES: dict[str, Callable[[], Callable[..., Any]]] = {
    "cross entropy": lambda: F.cross_entropy,
    "smoothed": Smoothed,
    "square": lambda: lambda o, t: ((o - F.one_hot(t, CLASSES)) ** 2).mean(),
    "weighted": lambda: lambda o, t: F.cross_entropy(o, t, reduction="sum") / 3.0,
}


# ---- optimisers ----------------------------------------------------------------------------------


def _optimizer(draw: random.Random) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    ways: dict[str, Any] = draw.choice([{}, {}, {"foreach": True}, {"foreach": False}])
    decay = draw.choice([0.0, 0.02])
    if draw.random() < 0.4:
        momentum = draw.choice([0.0, 0.8])
        nesterov = bool(momentum) and draw.random() < 0.5
        return torch.optim.SGD, {
            "lr": 0.05,
            "momentum": momentum,
            "dampening": 0.0 if nesterov else draw.choice([0.0, 0.3]),
            "nesterov": nesterov,
            "weight_decay": decay,
            "maximize": draw.random() < 0.1,
            **draw.choice([ways, {"fused": True}]),
        }
    return draw.choice([torch.optim.Adam, torch.optim.AdamW]), {
        "lr": 0.01,
        "betas": draw.choice([(0.9, 0.999), (0.7, 0.95)]),
        "eps": draw.choice([1e-8, 1e-4]),
        "amsgrad": draw.random() < 0.3,
        "weight_decay": decay,
        "maximize": draw.random() < 0.1,
        **draw.choice([ways, {"fused": True}]),
    }


# ---- a case --------------------------------------------------------------------------------------


@dataclass
class World:
    """One of the two runs: everything that an edit may touch."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    clip_norm: float | None
    kept: dict[str, Any] = field(default_factory=dict)  # snapshots
    hooks: list[Any] = field(default_factory=list)
    eager_steps: int = 0  # to be made outside of the compiled step
    leave_gradients: bool = False  # after those
    mode: Callable[[], Any] | None = None  # a context around the next step

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def eager(self, x: torch.Tensor, y: torch.Tensor, clear: bool = True) -> torch.Tensor:
        self.optimizer.zero_grad()
        try:
            loss = self.loss_fn(self.model(x), y)
            loss.backward()
            if self.clip_norm is not None:
                held = [p for g in self.optimizer.param_groups for p in g["params"]]
                nn.utils.clip_grad_norm_(held, self.clip_norm)
            self.optimizer.step()
        finally:
            if clear:
                self.optimizer.zero_grad()
        return loss.detach()


@dataclass(frozen=True)
class Case:
    seed: int
    model: str
    loss: str
    edits: tuple[str, ...]  # before each step; "" is none

    def world(self) -> World:
        draw = random.Random(self.seed)
        torch.manual_seed(self.seed)
        model, loss_fn = MODELS[self.model](), LOSSES[self.loss]()
        kind, settings = _optimizer(draw)
        if draw.random() < 0.3:  # groups
            held = list(model.parameters())
            groups: Any = [
                {"params": held[::2]},
                {"params": held[1::2], "lr": 0.02, "weight_decay": 0.0},
            ]
        else:
            groups = model.parameters()
        return World(model, loss_fn, kind(groups, **settings), draw.choice([None, None, 0.5]))


def batch(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sizes repeat, now and then another one; the last is ragged."""
    draw = random.Random(case.seed * 1009 + step)
    g = torch.Generator().manual_seed(case.seed * 1009 + step)
    rows = 3 if step == len(case.edits) - 1 else draw.choice([8, 8, 8, 4])
    x = torch.randn(WIDTH, rows, generator=g).T if draw.random() < 0.2 else None
    x = torch.randn(rows, WIDTH, generator=g) if x is None else x
    return x, torch.randint(0, CLASSES, (rows,), generator=g)


# ---- edits: (world, what the draws come from) ----------------------------------------------------

Edit = Callable[[World, random.Random], None]
EDITS: dict[str, Edit] = {}


def edit(function: Edit) -> Edit:
    EDITS[function.__name__] = function
    return function


def _group(w: World, draw: random.Random) -> dict[str, Any]:
    return draw.choice(w.optimizer.param_groups)


@edit
def lr_is_changed(w: World, draw: random.Random) -> None:
    _group(w, draw)["lr"] *= draw.choice([0.5, 2.0, 0.0])


@edit
def lr_becomes_a_tensor(w: World, draw: random.Random) -> None:
    for group in w.optimizer.param_groups:
        if not group.get("foreach"):
            group["lr"] = torch.tensor(float(group["lr"]))


@edit
def decay_is_switched(w: World, draw: random.Random) -> None:
    group = _group(w, draw)
    group["weight_decay"] = 0.0 if group["weight_decay"] else 0.05


@edit
def decay_is_tiny_and_negative_zero(w: World, draw: random.Random) -> None:
    _group(w, draw)["weight_decay"] = draw.choice([-0.0, 1e-30])


@edit
def momentum_is_changed(w: World, draw: random.Random) -> None:
    for group in w.optimizer.param_groups:
        if "momentum" in group and not group["nesterov"]:
            group["momentum"] = draw.choice([0.0, 0.5, 0.9])
        if "betas" in group:
            group["betas"] = draw.choice([(0.5, 0.9), [0.8, 0.99], (0.0, 0.5)])


@edit
def maximize_is_switched(w: World, draw: random.Random) -> None:
    group = _group(w, draw)
    group["maximize"] = not group["maximize"]


@edit
def amsgrad_is_switched(w: World, draw: random.Random) -> None:
    for group in w.optimizer.param_groups:
        if group.get("amsgrad"):
            group["amsgrad"] = False
        elif "amsgrad" in group and draw.random() < 0.5:
            group["amsgrad"] = True
            for p in group["params"]:
                if w.optimizer.state.get(p):
                    w.optimizer.state[p].setdefault("max_exp_avg_sq", torch.zeros_like(p))


@edit
def decoupled_is_switched(w: World, draw: random.Random) -> None:
    for group in w.optimizer.param_groups:
        if "decoupled_weight_decay" in group:
            group["decoupled_weight_decay"] = not group["decoupled_weight_decay"]


@edit
def lr_is_a_number(w: World, draw: random.Random) -> None:
    for group in w.optimizer.param_groups:
        group["lr"] = float(group["lr"])


def _without_fused(w: World) -> None:
    """torch 2.13's fused kernels mix up the elements of a gradient and a state that are laid out
    in different orders."""
    for group in w.optimizer.param_groups:
        group["fused"] = None


@edit
def foreach_is_switched(w: World, draw: random.Random) -> None:
    for group in w.optimizer.param_groups:
        group["fused"], group["foreach"] = None, not group["foreach"]


@edit
def a_parameter_is_frozen(w: World, draw: random.Random) -> None:
    draw.choice(w.parameters()).requires_grad_(False)


@edit
def all_are_thawed(w: World, draw: random.Random) -> None:
    w.model.requires_grad_(True)


@edit
def all_are_frozen(w: World, draw: random.Random) -> None:
    w.model.requires_grad_(False)


@edit
def a_group_is_added(w: World, draw: random.Random) -> None:
    extra = nn.Linear(CLASSES, CLASSES)
    torch.manual_seed(3)
    nn.init.normal_(extra.weight, std=0.3)
    nn.init.zeros_(extra.bias)
    if isinstance(w.model, nn.Sequential):
        w.model.append(extra)
        w.optimizer.add_param_group({"params": extra.parameters(), "lr": 0.03})


@edit
def a_parameter_leaves_the_optimizer(w: World, draw: random.Random) -> None:
    group = _group(w, draw)
    if len(group["params"]) > 1:
        group["params"].pop(draw.randrange(len(group["params"])))


@edit
def all_are_in_the_optimizer(w: World, draw: random.Random) -> None:
    """Those of the model, and no others."""
    held = set(w.parameters())
    for group in w.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p in held]
    found = {p for group in w.optimizer.param_groups for p in group["params"]}
    w.optimizer.param_groups[0]["params"] += [p for p in w.parameters() if p not in found]
    for p in [p for p in w.optimizer.state if p not in held]:
        del w.optimizer.state[p]


@edit
def parameters_are_reordered(w: World, draw: random.Random) -> None:
    _group(w, draw)["params"].reverse()


@edit
def a_snapshot_is_taken(w: World, draw: random.Random) -> None:
    w.kept["optimizer"] = copy.deepcopy(w.optimizer.state_dict())
    w.kept["model"] = copy.deepcopy(w.model.state_dict())


@edit
def the_optimizer_is_loaded(w: World, draw: random.Random) -> None:
    if "optimizer" in w.kept:
        w.optimizer.load_state_dict(copy.deepcopy(w.kept["optimizer"]))


@edit
def the_model_is_loaded(w: World, draw: random.Random) -> None:
    if "model" in w.kept:
        w.model.load_state_dict(w.kept["model"])


@edit
def the_model_is_loaded_by_assignment(w: World, draw: random.Random) -> None:
    if "model" in w.kept:
        w.model.load_state_dict(copy.deepcopy(w.kept["model"]), assign=True)


@edit
def the_optimizers_state_is_cleared(w: World, draw: random.Random) -> None:
    w.optimizer.state.clear()


@edit
def one_parameters_state_is_cleared(w: World, draw: random.Random) -> None:
    w.optimizer.state.pop(draw.choice(w.parameters()), None)


@edit
def a_moment_is_written(w: World, draw: random.Random) -> None:
    for state in w.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and draw.random() < 0.5:
                value.mul_(0.5)
            elif isinstance(value, torch.Tensor) and value.dim():
                state[name] = value * 0.25


@edit
def a_counter_is_written(w: World, draw: random.Random) -> None:
    for state in w.optimizer.state.values():
        if "step" in state and draw.random() < 0.5:
            state["step"] = state["step"] + 3


@edit
def a_counter_is_a_number(w: World, draw: random.Random) -> None:
    for state in w.optimizer.state.values():
        if "step" in state and draw.random() < 0.3:
            state["step"] = float(state["step"])


@edit
def a_weight_is_written(w: World, draw: random.Random) -> None:
    p = draw.choice(w.parameters())
    with torch.no_grad():
        p.mul_(0.9).add_(0.01)


@edit
def a_weight_is_written_silently(w: World, draw: random.Random) -> None:
    p = draw.choice(w.parameters())
    p.detach().numpy()[...] *= 0.8


@edit
def a_weights_data_is_replaced(w: World, draw: random.Random) -> None:
    p = draw.choice(w.parameters())
    p.data = p.data.clone() * 1.1


@edit
def a_weights_data_is_transposed(w: World, draw: random.Random) -> None:
    _without_fused(w)
    p = draw.choice([q for q in w.parameters() if q.dim() > 1])
    p.data = p.data.transpose(0, 1).contiguous().transpose(0, 1)


@edit
def a_weight_is_a_new_parameter(w: World, draw: random.Random) -> None:
    for m in w.model.modules():
        if isinstance(m, nn.Linear) and m.bias is not None:
            m.bias = nn.Parameter(m.bias.detach() + 0.1)
            return


@edit
def gradients_are_left_over(w: World, draw: random.Random) -> None:
    for p in w.parameters():
        p.grad = torch.full_like(p, 3.0)


@edit
def gradients_are_zeros(w: World, draw: random.Random) -> None:
    for p in w.parameters():
        p.grad = torch.zeros_like(p)
    w.optimizer.zero_grad(set_to_none=draw.random() < 0.5)


@edit
def evaluated(w: World, draw: random.Random) -> None:
    w.model.eval()
    with torch.no_grad():
        w.model(torch.ones(4, WIDTH))
    w.model.train()


@edit
def evaluation_mode_stays(w: World, draw: random.Random) -> None:
    w.model.eval()


@edit
def training_mode(w: World, draw: random.Random) -> None:
    w.model.train()


@edit
def one_layer_evaluates(w: World, draw: random.Random) -> None:
    draw.choice(list(w.model.modules())).eval()


@edit
def eager_for_two_steps(w: World, draw: random.Random) -> None:
    w.eager_steps, w.leave_gradients = 2, draw.random() < 0.5


@edit
def a_gradient_hook(w: World, draw: random.Random) -> None:
    p = draw.choice([q for q in w.parameters() if q.requires_grad] or [None])
    if p is not None:
        w.hooks.append(p.register_hook(lambda g: g * 2.0))


@edit
def a_hook_behind_the_accumulation(w: World, draw: random.Random) -> None:
    p = draw.choice([q for q in w.parameters() if q.requires_grad] or [None])
    if p is not None:
        w.hooks.append(p.register_post_accumulate_grad_hook(lambda q: q.grad.mul_(0.5)))


@edit
def a_forward_hook(w: World, draw: random.Random) -> None:
    m = next(m for m in w.model.modules() if isinstance(m, nn.Linear))
    w.hooks.append(m.register_forward_hook(lambda m, a, o: o * 1.5))


@edit
def a_backward_hook(w: World, draw: random.Random) -> None:
    m = next(m for m in w.model.modules() if isinstance(m, nn.Linear))
    w.hooks.append(
        m.register_full_backward_hook(
            lambda m, i, o: tuple(None if g is None else g * 0.5 for g in i)
        )
    )


@edit
def a_hook_of_the_optimizer(w: World, draw: random.Random) -> None:
    def halve(optimizer: Any, a: Any, k: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    w.hooks.append(w.optimizer.register_step_pre_hook(halve))


@edit
def a_hook_behind_the_optimizer(w: World, draw: random.Random) -> None:
    def shrink(optimizer: Any, a: Any, k: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)

    w.hooks.append(w.optimizer.register_step_post_hook(shrink))


@edit
def a_hook_of_all_modules(w: World, draw: random.Random) -> None:
    register = torch.nn.modules.module.register_module_forward_hook
    w.hooks.append(register(lambda m, a, o: o * 1.01 if isinstance(m, nn.Linear) else None))


@edit
def a_backward_hook_of_all_modules(w: World, draw: random.Random) -> None:
    def halve(m: nn.Module, i: Any, o: Any) -> Any:
        return tuple(None if g is None else g * 0.5 for g in i) if type(m) is nn.Linear else None

    w.hooks.append(torch.nn.modules.module.register_module_full_backward_hook(halve))


@edit
def a_hook_of_several_gradients(w: World, draw: random.Random) -> None:
    def scale(gradients: Any) -> None:
        for g in gradients:
            if g is not None:
                g.mul_(2.0)

    held = [p for p in w.parameters() if p.requires_grad]
    if held:
        w.hooks.append(torch.autograd.graph.register_multi_grad_hook(held, scale))


@edit
def hooks_are_removed(w: World, draw: random.Random) -> None:
    while w.hooks:
        w.hooks.pop().remove()


@edit
def an_attribute_is_changed(w: World, draw: random.Random) -> None:
    for m in w.model.modules():
        if hasattr(m, "scale"):
            m.scale = draw.choice([0.1, 1.3])
        if hasattr(m, "use_other"):
            m.use_other = not m.use_other
        if hasattr(m, "momentum") and m.momentum is not None:
            m.momentum = 0.3
        if hasattr(m, "eps"):
            m.eps = 1e-3
    if hasattr(w.loss_fn, "smoothing"):
        w.loss_fn.smoothing = 0.3


@edit
def a_layer_is_exchanged(w: World, draw: random.Random) -> None:
    for m in w.model.modules():
        for name, child in m.named_children():
            if isinstance(child, (nn.ReLU, nn.SiLU)):
                setattr(m, name, nn.GELU())
                return


@edit
def forward_is_replaced(w: World, draw: random.Random) -> None:
    plain = w.model.forward
    w.model.forward = lambda x: plain(x) * 0.5  # type: ignore[method-assign]


@edit
def forward_is_the_classs(w: World, draw: random.Random) -> None:
    vars(w.model).pop("forward", None)


@edit
def a_buffer_is_written(w: World, draw: random.Random) -> None:
    for b in w.model.buffers():
        if b.is_floating_point():
            b.mul_(0.5).add_(0.1)


@edit
def a_buffer_is_replaced(w: World, draw: random.Random) -> None:
    for m in w.model.modules():
        for name, b in list(m._buffers.items()):
            if b is not None and b.is_floating_point():
                setattr(m, name, b * 0.9 + 0.05)


@edit
def weights_are_tied(w: World, draw: random.Random) -> None:
    square = [m for m in w.model.modules() if isinstance(m, nn.Linear)]
    for a in square:
        for b in square:
            if a is not b and a.weight.shape == b.weight.shape and a.weight is not b.weight:
                b.weight = a.weight
                return


@edit
def a_weight_is_normed(w: World, draw: random.Random) -> None:
    m = next(m for m in w.model.modules() if isinstance(m, nn.Linear))
    if not hasattr(m, "parametrizations"):
        nn.utils.parametrizations.weight_norm(m)


@edit
def a_weight_is_spectral(w: World, draw: random.Random) -> None:
    m = next(m for m in w.model.modules() if isinstance(m, nn.Linear))
    if not hasattr(m, "parametrizations"):
        nn.utils.parametrizations.orthogonal(m) if draw.random() < 0.2 else None


@edit
def without_gradients(w: World, draw: random.Random) -> None:
    w.mode = torch.no_grad


@edit
def under_autocast(w: World, draw: random.Random) -> None:
    w.mode = lambda: torch.autocast("cpu", torch.bfloat16)


@edit
def under_deterministic_algorithms(w: World, draw: random.Random) -> None:
    w.mode = lambda: torch.autograd.set_detect_anomaly(True)


@edit
def a_weight_is_infinite(w: World, draw: random.Random) -> None:
    with torch.no_grad():
        draw.choice(w.parameters()).view(-1)[0] = math.inf


@edit
def weights_are_numbers_again(w: World, draw: random.Random) -> None:
    with torch.no_grad():
        for p in [*w.parameters(), *w.model.buffers()]:
            p.nan_to_num_(0.1, 0.2, -0.2)
        for state in w.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.nan_to_num_(0.1, 0.2, 0.2)


@edit
def the_model_is_double(w: World, draw: random.Random) -> None:
    if draw.random() < 0.3:
        w.model.double()


@edit
def the_model_is_single(w: World, draw: random.Random) -> None:
    w.model.float()


@edit
def channels_go_last(w: World, draw: random.Random) -> None:
    _without_fused(w)
    w.model.to(memory_format=torch.channels_last)


@edit
def the_clip_is_changed(w: World, draw: random.Random) -> None:
    if w.clip_norm is not None:
        w.clip_norm = draw.choice([0.1, 1e9])


# What goes back to a step that compiles; else most runs would end in eager steps.
UNDONE_BY = {
    "a_parameter_is_frozen": "all_are_thawed",
    "all_are_frozen": "all_are_thawed",
    "a_parameter_leaves_the_optimizer": "all_are_in_the_optimizer",
    "a_weight_is_a_new_parameter": "all_are_in_the_optimizer",
    "the_model_is_loaded_by_assignment": "all_are_in_the_optimizer",
    "a_weight_is_normed": "all_are_in_the_optimizer",
    "evaluation_mode_stays": "training_mode",
    "one_layer_evaluates": "training_mode",
    "a_weight_is_infinite": "weights_are_numbers_again",
    "lr_becomes_a_tensor": "lr_is_a_number",
    "a_counter_is_a_number": "the_optimizers_state_is_cleared",
    "the_model_is_double": "the_model_is_single",
    "forward_is_replaced": "forward_is_the_classs",
}


def case_of(seed: int, steps: int) -> Case:
    """The case of this seed: an edit before every second step or so, many undone soon after."""
    draw = random.Random(seed)
    names = sorted(EDITS)
    model, loss = draw.choice(sorted(MODELS)), draw.choice(sorted(LOSSES))
    edits = [""] * steps
    for i in range(3, steps):
        if edits[i] or draw.random() < 0.5:
            continue
        edits[i] = draw.choice(names)
        undo = "hooks_are_removed" if "hook" in edits[i] else UNDONE_BY.get(edits[i], "")
        later = i + draw.choice([1, 2])
        if undo and later < steps and draw.random() < 0.8:
            edits[later] = undo
    return Case(seed, model, loss, tuple(edits))
