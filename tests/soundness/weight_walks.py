"""Walks over the ways that a script changes weights: what a served model gives after each step is
what a twin gives that PyTorch alone runs and that got the same change.

Written from the public contract alone. A walk is drawn from a seed: a network, the option that says
when weights are packed, and edits with calls of several sizes between them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.utils.parametrize as parametrize
from soundness import eager, quiet, routed
from torch import nn
from torch.nn.utils import parametrizations

import rm_abstract as rm

SIZE = 64
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


class Tied(nn.Module):
    """One tensor under two names, one storage under several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, SIZE)
        self.inner = nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, 32)
        self.head.weight = self.embed.weight
        flat = torch.randn(2 * SIZE) / 8
        self.first = nn.Parameter(flat[:SIZE])
        self.second = nn.Parameter(flat[SIZE:])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(self.embed(ids))) * self.first + self.second
        return self.head(x)


class Parametrized(nn.Module):
    """Weights that are computed from others at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, SIZE)
        self.normed = parametrizations.weight_norm(nn.Linear(SIZE, SIZE))
        self.bounded = parametrizations.spectral_norm(nn.Linear(SIZE, SIZE))
        self.plain = nn.Linear(SIZE, SIZE)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.normed(self.embed(ids)))
        return self.plain(torch.tanh(self.bounded(x)))


class Buffers(nn.Module):
    """Buffers of several types, one that is not saved, and tensors that nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, SIZE)
        self.norm = nn.BatchNorm1d(SIZE)
        self.register_buffer("order", torch.randperm(SIZE))
        self.register_buffer("mask", torch.rand(SIZE) > 0.3)
        self.register_buffer("shift", torch.randn(SIZE), persistent=False)
        self.large = torch.randn(SIZE, SIZE) / 8
        self.listed = [torch.randn(SIZE), {"inside": torch.randn(SIZE)}]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids).flatten(0, 1))[:, self.order]
        x = torch.where(self.mask, x, self.shift) @ self.large
        return x * self.listed[0] + self.listed[1]["inside"]


class Layouts(nn.Module):
    """Weights that do not lie as they are read, in containers of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, SIZE)
        self.turned = nn.Parameter((torch.randn(SIZE, SIZE) / 8).t())
        self.spread = nn.Parameter(torch.randn(SIZE, 2)[:, 0])
        self.listed = nn.ParameterList([torch.randn(SIZE) for _ in range(2)])
        self.named = nn.ParameterDict({"a": torch.randn(SIZE, SIZE) / 8})
        self.steps = nn.ModuleList([nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) @ self.turned * self.spread + self.listed[0]
        for step in self.steps:
            x = step(x)
        return torch.tanh(x) @ self.named["a"] + self.listed[1]


NETWORKS: tuple[type[nn.Module], ...] = (Tied, Parametrized, Buffers, Layouts)


@dataclass
class Side:
    """One of the two networks, and tensors that a script keeps between steps."""

    net: nn.Module
    rng: random.Random
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def pick(self, kind: str = "any") -> tuple[nn.Module, str, torch.Tensor]:
        """A registered tensor with its owner; kind: any, parameter or float."""
        found = []
        for _, part in self.net.named_modules():
            groups = (
                [part._parameters] if kind == "parameter" else [part._parameters, part._buffers]
            )
            for group in groups:
                for name, tensor in group.items():
                    if tensor is not None and (kind != "float" or tensor.is_floating_point()):
                        found.append((part, name, tensor))
        return self.rng.choice(found)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Other values of the same shape and type, contiguous."""
        draw = torch.Generator().manual_seed(self.rng.randrange(2**31))
        if tensor.dtype == torch.bool:
            return torch.rand(tensor.shape, generator=draw) > 0.5
        if not tensor.is_floating_point():
            many = max(tensor.numel(), 1)
            return torch.randperm(many, generator=draw).reshape(tensor.shape).to(tensor.dtype)
        # Variances and singular vectors stay sensible.
        values = torch.rand(tensor.shape, generator=draw) / 4 + 0.05
        return values.to(tensor.dtype)


Edit = Callable[[Side], Any]
EDITS: dict[str, Edit] = {}


def edit(work: Edit) -> Edit:
    EDITS[work.__name__] = work
    return work


def put(owner: nn.Module, name: str, value: torch.Tensor) -> None:
    if name in owner._parameters:
        setattr(owner, name, nn.Parameter(value, requires_grad=False))
    else:
        setattr(owner, name, value)


@edit
def attribute(s: Side) -> None:
    owner, name, tensor = s.pick()
    if not parametrize.is_parametrized(owner, name):
        put(owner, name, s.like(tensor))


@edit
def registry(s: Side) -> None:
    owner, name, tensor = s.pick()
    new = s.like(tensor)
    if name in owner._parameters:
        owner._parameters[name] = nn.Parameter(new)
    else:
        owner._buffers[name] = new


@edit
def data_assigned(s: Side) -> None:
    _, _, tensor = s.pick()
    tensor.data = s.like(tensor)


@edit
def data_assigned_in_another_layout(s: Side) -> None:
    _, _, tensor = s.pick()
    new = s.like(tensor)
    tensor.data = (
        new.t().contiguous().t() if new.dim() == 2 else torch.stack([new, new], -1)[..., 0]
    )


@edit
def data_copied(s: Side) -> None:
    _, _, tensor = s.pick("parameter")
    tensor.data.copy_(s.like(tensor))


@edit
def copied(s: Side) -> None:
    _, _, tensor = s.pick()
    with torch.no_grad():
        tensor.copy_(s.like(tensor))


@edit
def copied_in_inference_mode(s: Side) -> None:
    _, _, tensor = s.pick()
    with torch.inference_mode():
        tensor.copy_(s.like(tensor))


@edit
def pointed_elsewhere(s: Side) -> None:
    _, _, tensor = s.pick()
    with torch.no_grad():
        tensor.set_(s.like(tensor))


@edit
def swapped(s: Side) -> None:
    _, _, tensor = s.pick("parameter")
    torch.utils.swap_tensors(tensor, nn.Parameter(s.like(tensor)))


@edit
def loaded(s: Side) -> None:
    state = s.net.state_dict()
    name = s.rng.choice(sorted(state))
    s.net.load_state_dict({name: s.like(state[name])}, strict=False)


@edit
def loaded_by_assignment(s: Side) -> None:
    state = s.net.state_dict()
    names = s.rng.sample(sorted(state), s.rng.randint(1, 3))
    s.net.load_state_dict({n: s.like(state[n]) for n in names}, strict=False, assign=True)


@edit
def own_state_loaded_by_assignment(s: Side) -> None:
    s.net.load_state_dict({k: v.clone() for k, v in s.net.state_dict().items()}, assign=True)


@edit
def row_of_an_alias(s: Side) -> None:
    _, _, tensor = s.pick("parameter")
    tensor.detach().view_as(tensor)[0] = 0.25


@edit
def alias_kept(s: Side) -> None:
    _, _, tensor = s.pick("parameter")
    s.kept["alias"] = tensor.detach()


@edit
def kept_alias_written(s: Side) -> None:
    if "alias" in s.kept:
        s.kept["alias"].mul_(0.5)


@edit
def foreach(s: Side) -> None:
    tensors = [s.pick("float")[2] for _ in range(3)]
    unique = list({id(t): t for t in tensors}.values())
    with torch.no_grad():
        torch._foreach_mul_(unique, 0.75)


@edit
def out_of_another(s: Side) -> None:
    _, _, tensor = s.pick("float")
    with torch.no_grad():
        torch.add(tensor, 0.125, out=tensor)


@edit
def applied(s: Side) -> None:
    part = s.rng.choice(list(s.net.modules()))
    part._apply(lambda t: t * 0.9 if t.is_floating_point() else t)


@edit
def doubled_and_back(s: Side) -> None:
    s.net.double().float()


@edit
def optimizer_step(s: Side) -> None:
    named = [p for p in s.net.parameters()]
    kind = s.rng.choice(["sgd", "adamw", "fused", "foreach"])
    for p in named:
        p.requires_grad_(True)
        p.grad = torch.full_like(p, 0.01)
    if kind == "sgd":
        torch.optim.SGD(named, lr=0.1, momentum=0.9).step()
    else:
        more = {} if kind == "adamw" else {kind: True}
        torch.optim.AdamW(named, lr=0.01, **more).step()
    for p in named:
        p.grad = None


@edit
def removed_and_registered(s: Side) -> None:
    owner, name, tensor = s.pick()
    new = s.like(tensor)
    if name in owner._parameters and not isinstance(owner, parametrize.ParametrizationList):
        delattr(owner, name)
        owner.register_parameter(name, nn.Parameter(new))


@edit
def frozen(s: Side) -> None:
    s.net.requires_grad_(s.rng.random() < 0.5)


@edit
def part_copied(s: Side) -> None:
    """A part gives way to its copy; then the old one is written."""
    name, part = s.rng.choice(list(s.net.named_children()))
    setattr(s.net, name, copy.deepcopy(part))
    with torch.no_grad():
        for tensor in part.parameters():
            tensor.add_(1)


@edit
def shared_memory(s: Side) -> None:
    _, _, tensor = s.pick("parameter")
    if tensor.is_contiguous():
        tensor.data = tensor.data.clone()
        tensor.share_memory_()
        with torch.no_grad():
            tensor.mul_(0.5)


@edit
def one_vector(s: Side) -> None:
    vector = nn.utils.parameters_to_vector(s.net.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.875, s.net.parameters())


@edit
def tied(s: Side) -> None:
    if isinstance(s.net, Tied):
        own = nn.Parameter(s.like(s.net.head.weight))
        s.net.head.weight = s.rng.choice([own, s.net.embed.weight])


@edit
def parametrized(s: Side) -> None:
    if isinstance(s.net, Parametrized):
        part = s.rng.choice([s.net.normed, s.net.bounded, s.net.plain])
        if parametrize.is_parametrized(part, "weight"):
            parametrize.remove_parametrizations(part, "weight")
        else:
            parametrizations.weight_norm(part)


@edit
def unregistered(s: Side) -> None:
    """Tensors that are no parameters and no buffers."""
    if not isinstance(s.net, Buffers):
        return
    which = s.rng.randrange(5)
    if which == 0:
        s.net.large = s.like(s.net.large)
    elif which == 1:
        s.net.large.copy_(s.like(s.net.large))
    elif which == 2:
        s.net.listed[0] = s.like(s.net.listed[0])
    elif which == 3:
        s.net.listed[1]["inside"].mul_(0.5)
    else:
        s.net.listed[1] = {"inside": s.like(s.net.listed[0])}


@edit
def statistics(s: Side) -> None:
    """A call in training mode moves the running statistics."""
    if isinstance(s.net, Buffers):
        s.net.train()
        with torch.no_grad():
            s.net(torch.arange(6).reshape(2, 3))
        s.net.eval()
        if s.rng.random() < 0.3:
            s.net.norm.reset_running_stats()


@edit
def functional(s: Side) -> torch.Tensor:
    """Other weights for one call; the module's own are back behind it."""
    name, tensor = s.rng.choice(list(s.net.named_parameters()))
    ids = torch.arange(6).reshape(2, 3)
    with torch.no_grad():
        return torch.func.functional_call(s.net, {name: s.like(tensor)}, (ids,))


@dataclass
class Walked:
    edits: int = 0
    calls: int = 0
    routed: int = 0
    findings: list[str] = field(default_factory=list)


def outcome(work: Edit, side: Side) -> Any:
    """What an edit gives, or what it raises as text."""
    try:
        return work(side)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def walk(seed: int, steps: int) -> Walked:
    """One network through `steps` edits. Ends at the first difference, which is a finding."""
    rng = random.Random(seed)
    kind = NETWORKS[seed % len(NETWORKS)]
    pack = rng.choice(["never", "first", "auto"])
    rm.shutdown()
    rm.init("cpu", compile_options={"pack_weights": pack, "when_slower": "compiled"})
    torch.manual_seed(seed)
    net = kind().eval()
    torch.manual_seed(seed)
    with rm.disabled():  # not a copy: parametrized parts would share their class
        twin = Side(kind().eval(), random.Random(seed))
    mine = Side(net, random.Random(seed))
    rm.accelerate(net)
    result = Walked()
    done: list[str] = []

    def compare(number: int) -> str:
        for _ in range(number):
            ids = torch.tensor(rng.choices(range(32), k=3 * rng.choice([2, 2, 5, 9]))).view(-1, 3)
            right = eager(lambda ids=ids: twin.net(ids))
            now = quiet(lambda ids=ids: net(ids))
            result.calls += 1
            if not torch.allclose(now, right, **TOLERANCE, equal_nan=True):
                return f"off by {float((now - right).abs().max()):.3g}"
        return ""

    wrong = compare(3)
    while not wrong and result.edits < steps:
        name = rng.choice(sorted(EDITS))
        done.append(name)
        with rm.disabled():
            right = outcome(EDITS[name], twin)
        now = outcome(EDITS[name], mine)
        result.edits += 1
        if isinstance(right, torch.Tensor) and isinstance(now, torch.Tensor):
            same = torch.allclose(now, right, **TOLERANCE)
        else:
            same = now == right
        if not same:
            wrong = f"the edit gave {now}, PyTorch's {right}"
        wrong = wrong or compare(rng.choice([1, 2, 3, 4]))
    if wrong:
        told = ", ".join(done[-4:])
        result.findings.append(f"seed {seed}, {kind.__name__}, pack {pack}: {told}: {wrong}")
    result.routed = routed(net)
    rm.shutdown()
    return result
