"""`compile_step` trains what eager trains, and whoever looks sees torch's own tensors."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rm_abstract as rm

Make = Callable[[Any], torch.optim.Optimizer]
STRICT = {"fallback": "error"}


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)
    )


def _batches(count: int, rows: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 16, generator=g), torch.randn(rows, 4, generator=g))
        for _ in range(count)
    ]


def _square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def _eager(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = _square(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01
    ),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adam, decay": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.8, 0.99), maximize=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hundred_losses_are_eagers(name: str) -> None:
    ours, theirs = _mlp(), _mlp()
    a, b = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](theirs.parameters())
    step = rm.compile_step(ours, _square, a, options=STRICT)
    data = _batches(5)
    for i in range(100):
        loss, wanted = step(*data[i % 5]), _eager(theirs, b, *data[i % 5])
        assert float(loss) == pytest.approx(float(wanted), rel=1e-4)
    assert step.report()["compiled"] >= 98
    for (_, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-3, atol=1e-4)


def test_parameters_and_state_stay_the_tensors_they_were() -> None:
    model = _mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = rm.compile_step(model, _square, optimizer, options=STRICT)
    (batch,) = _batches(1)
    for _ in range(3):
        step(*batch)
    parameters = list(model.parameters())
    moments = [optimizer.state[p]["exp_avg"] for p in parameters]
    addresses = [t.data_ptr() for t in (*parameters, *moments)]
    versions = [p._version for p in parameters]
    before = [p.detach().clone() for p in parameters]
    step(*batch)
    assert step.report()["compiled"] == 2
    assert all(x is y for x, y in zip(model.parameters(), parameters, strict=True))
    assert [t.data_ptr() for t in (*parameters, *moments)] == addresses
    assert not any(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    assert all(p._version > v for p, v in zip(parameters, versions, strict=True))
    assert all(p.grad is None for p in parameters)
    assert all(float(optimizer.state[p]["step"]) == 4 for p in parameters)
    torch.testing.assert_close(model(batch[0]), nn.Sequential(*model)(batch[0]))


def test_a_checkpoint_continues_in_eager_and_compiled_alike(tmp_path: Any) -> None:
    data = _batches(4)
    model = _mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = rm.compile_step(model, _square, optimizer, options=STRICT)
    for i in range(10):
        step(*data[i % 4])
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "c.pt")
    other = _mlp()
    again = torch.optim.AdamW(other.parameters(), lr=1e-3)
    weights, state = torch.load(tmp_path / "c.pt")
    other.load_state_dict(weights)
    again.load_state_dict(copy.deepcopy(state))  # it keeps the tensors it is given
    for i in range(10):
        wanted = _eager(other, again, *data[i % 4])
        assert float(step(*data[i % 4])) == pytest.approx(float(wanted), rel=1e-4)
    model.load_state_dict(weights)  # the step goes on from what was loaded
    optimizer.load_state_dict(copy.deepcopy(state))
    other.load_state_dict(weights)
    again.load_state_dict(copy.deepcopy(state))  # it keeps the tensors it is given
    for i in range(4):
        wanted = _eager(other, again, *data[i])
        assert float(step(*data[i])) == pytest.approx(float(wanted), rel=1e-4)


def test_schedules_change_the_rate_without_another_program() -> None:
    ours, theirs = _mlp(), _mlp()
    pairs = []
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        pairs.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)))
    step = rm.compile_step(ours, _square, pairs[0][0], options=STRICT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # schedulers warn when they see no optimizer step
        for batch in _batches(10):
            loss, wanted = step(*batch), _eager(theirs, pairs[1][0], *batch)
            assert float(loss) == pytest.approx(float(wanted), rel=1e-4)
            for _, schedule in pairs:
                schedule.step()
    assert len(step.report()["programs"]) == 1


def test_groups_have_numbers_and_rules_of_their_own() -> None:
    def make(model: nn.Sequential) -> torch.optim.Optimizer:
        plain = [p for p in model.parameters() if p.dim() < 2]
        decayed = [p for p in model.parameters() if p.dim() > 1]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
            lr=1e-3,
        )

    ours, theirs = _mlp(), _mlp()
    a, b = make(ours), make(theirs)
    step = rm.compile_step(ours, _square, a, options=STRICT)
    for batch in _batches(20):
        assert float(step(*batch)) == pytest.approx(float(_eager(theirs, b, *batch)), rel=1e-4)


def test_gradients_are_clipped_as_torch_clips_them() -> None:
    ours, theirs = _mlp(), _mlp()
    a, b = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, theirs))
    step = rm.compile_step(ours, _square, a, clip_norm=0.1, options=STRICT)
    for x, y in _batches(10):
        loss = step(x, y)
        b.zero_grad()
        wanted = _square(theirs(x), y)
        wanted.backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        b.step()
        assert float(loss) == pytest.approx(float(wanted), rel=1e-4)
        assert float(step.grad_norm) == pytest.approx(float(norm), rel=1e-4)


def test_another_batch_size_has_a_program_of_its_own() -> None:
    ours, theirs = _mlp(), _mlp()
    a, b = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (ours, theirs))
    step = rm.compile_step(ours, _square, a, options=STRICT)
    for rows in (8, 8, 8, 3, 3, 3, 8, 1, 1, 3):
        batch = _batches(1, rows)[0]
        assert float(step(*batch)) == pytest.approx(float(_eager(theirs, b, *batch)), rel=1e-4)
    assert len(step.report()["programs"]) == 3


def test_the_memory_of_a_step_is_near_its_lower_bound() -> None:
    model = _mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = rm.compile_step(model, _square, optimizer, options=STRICT)
    for batch in _batches(3, 256):
        step(*batch)
    (row,) = step.memory_report()
    size = sum(p.nbytes for p in model.parameters())
    assert (row["parameters"], row["states"], row["packed"]) == (size, 2 * size, 0)
    # Activations and gradients of the layers, no second model.
    assert 0 < row["lower_bound"] <= row["arena"] <= 1.1 * row["lower_bound"]


def test_a_parameter_that_is_used_later_gets_its_state_from_eager() -> None:
    model = nn.ModuleDict({"a": nn.Linear(16, 4), "b": nn.Linear(16, 4)})
    twin = copy.deepcopy(model)

    class Chosen(nn.Module):
        def __init__(self, parts: nn.ModuleDict) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            y = self.parts["a"](x)
            return y + self.parts["b"](x) if both else y

    ours, theirs = Chosen(model), Chosen(twin)
    a, b = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (ours, theirs))
    step = rm.compile_step(ours, _square, a, options={"fallback": "allow"})
    (x, y), reports = _batches(1)[0], []
    for both in [False] * 4 + [True] * 5:
        loss = step((x, both), y)
        b.zero_grad()
        wanted = _square(theirs(x, both), y)
        wanted.backward()
        b.step()
        assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-4)
        reports.append(step.report()["compiled"])
    # Of the second kind: the state, then counters that differ within the group (eager from there).
    assert reports == [0, 0, 1, 2, 2, 2, 2, 2, 2]
    assert "different numbers of steps" in step.report()["reasons"]["RM701"]


def test_a_routed_model_is_trained_and_its_router_hears_of_every_step() -> None:
    with rm.init("cpu"):
        model = _mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        step = rm.compile_step(model, _square, optimizer, options=STRICT)
        (batch,) = _batches(1)
        for _ in range(3):
            step(*batch)
        rm.accelerate(model.eval())
        for _ in range(3):
            with torch.no_grad():
                before = [model(batch[0]) for _ in range(3)][-1]
            model.train()
            step(*batch)
            model.eval()
            with torch.no_grad(), rm.disabled():
                wanted = model(batch[0])
            with torch.no_grad():
                torch.testing.assert_close(model(batch[0]), wanted)
            assert not torch.equal(before, wanted)
        assert step.report()["reasons"] == {}
        assert step.report()["compiled"] >= 1


# ---- what changes between steps ------------------------------------------------------------------


def _trained(steps: int = 4) -> tuple[nn.Sequential, torch.optim.Optimizer, Any, Any]:
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = rm.compile_step(model, _square, optimizer, options={"fallback": "allow"})
    (batch,) = _batches(1)
    for _ in range(steps):
        step(*batch)
    assert step.report()["compiled"] > 0
    return model, optimizer, step, batch


def _same_as_eager(model: Any, optimizer: Any, step: Any, batch: Any, count: int = 4) -> None:
    """From here on the step does what eager does to a copy of everything."""
    twin = copy.deepcopy(model)
    other = type(optimizer)(twin.parameters(), lr=0.05, momentum=0.9)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(count):
        wanted = _eager(twin, other, *batch)
        assert float(step(*batch)) == pytest.approx(float(wanted), rel=1e-4)


def test_a_parameter_written_by_the_user_is_read() -> None:
    model, optimizer, step, batch = _trained()
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    model[2].weight.data = model[2].weight.data * 1.5
    _same_as_eager(model, optimizer, step, batch)
    assert step.report()["reasons"] == {}


def test_a_replaced_parameter_is_followed() -> None:
    model, optimizer, step, batch = _trained()
    optimizer.state.pop(model[0].weight)
    model[0].weight = nn.Parameter(torch.randn(32, 16) * 0.1)
    optimizer.param_groups[0]["params"][0] = model[0].weight
    _same_as_eager(model, optimizer, step, batch, 6)
    assert step.report()["programs"]


def test_a_parameter_that_is_the_models_no_more_is_left_to_eager() -> None:
    model, _, step, batch = _trained()
    model[0].weight = nn.Parameter(torch.randn(32, 16) * 0.1)
    before = model[0].weight.detach().clone()
    for _ in range(2):  # the first one is watched
        step(*batch)
    assert torch.equal(model[0].weight, before)  # the optimizer does not know it
    assert "RM703" in step.report()["reasons"]


def test_a_frozen_parameter_stays() -> None:
    model, optimizer, step, batch = _trained()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    _same_as_eager(model, optimizer, step, batch)
    assert torch.equal(model[0].weight, before)


def test_a_changed_module_is_noticed() -> None:
    model, optimizer, step, batch = _trained()
    model[1] = nn.Tanh()
    _same_as_eager(model, optimizer, step, batch)


def test_evaluation_mode_and_back() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 4)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = rm.compile_step(model, _square, optimizer, options={"fallback": "allow"})
    (batch,) = _batches(1)
    for _ in range(3):
        step(*batch)
    compiled = step.report()["compiled"]
    assert compiled > 0
    model.train()
    losses = {float(step(*batch)) for _ in range(5)}
    assert len(losses) == 5  # dropout draws
    assert step.report()["compiled"] == compiled + 3  # behind one watched and one compared
    model.eval()
    assert float(step(*batch)) not in losses


@pytest.mark.parametrize("kind", ["tensor", "module", "optimizer"])
def test_hooks_are_run_by_eager(kind: str) -> None:
    model, optimizer, step, batch = _trained()
    seen: list[int] = []

    def note(*_: Any) -> None:
        seen.append(1)

    handles = {
        "tensor": lambda: model[0].weight.register_hook(note),
        "module": lambda: model[0].register_full_backward_hook(note),
        "optimizer": lambda: optimizer.register_step_post_hook(note),
    }
    handle = handles[kind]()
    step(*batch)
    assert seen
    handle.remove()
    count = step.report()["compiled"]
    step(*batch)
    assert step.report()["compiled"] == count + 1


def test_shared_memory_is_left_to_eager() -> None:
    model, _, step, batch = _trained()
    shared = model[2].weight.data
    model[2].weight.data = shared[:, :]
    model[0].weight.data = shared[:, :16]
    step(*batch)
    assert "RM703" in step.report()["reasons"]


def test_a_batch_that_is_a_parameter_is_left_to_eager() -> None:
    model, _, step, batch = _trained()
    step(model[0].weight.detach()[:8], batch[1])
    assert "RM703" in step.report()["reasons"]


# ---- failures ------------------------------------------------------------------------------------


class _Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


def test_a_step_that_fails_changes_nothing() -> None:
    model = _Lookup()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = rm.compile_step(model, _square, optimizer, options=STRICT)
    ids, y = torch.tensor([1, 2, 2, 9]), torch.randn(4, 4)
    for _ in range(4):
        step(ids, y)
    assert step.report()["compiled"] == 2
    kept = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
    with pytest.raises((IndexError, rm.Error)):
        step(torch.tensor([1, 2, 2, 10]), y)
    torch.testing.assert_close(
        kept, [model.state_dict(), optimizer.state_dict()["state"]], rtol=0, atol=0
    )
    step(ids, y)
    assert step.report()["compiled"] == 3


def test_a_loss_that_is_no_scalar_raises_as_in_eager() -> None:
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = rm.compile_step(
        model, lambda o, t: (o - t) ** 2, optimizer, options={"fallback": "allow"}
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match="scalar"):
            step(*_batches(1)[0])
    assert step.report()["eager"] == 2


def test_nan_goes_where_it_goes_in_eager() -> None:
    model, optimizer, step, batch = _trained()
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    x = batch[0].clone()
    x[0, 0] = float("nan")
    for _ in range(2):
        assert torch.isnan(step(x, batch[1])) and torch.isnan(_eager(twin, other, x, batch[1]))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.isnan(), q.isnan())


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 5


class _Odd(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(16, 4), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.how == "detach":
            return y + y.detach()
        if self.how == "no_grad":
            with torch.no_grad():
                z = y * 2
            return y + z
        return _StraightThrough.apply(y)


@pytest.mark.parametrize("how", ["detach", "no_grad", "function"])
def test_gradients_that_values_do_not_show_are_eagers(how: str) -> None:
    torch.manual_seed(0)
    ours = _Odd(how)
    theirs = copy.deepcopy(ours)
    a, b = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (ours, theirs))
    step = rm.compile_step(ours, _square, a, options={"fallback": "allow"})
    for batch in _batches(5):
        assert float(step(*batch)) == pytest.approx(float(_eager(theirs, b, *batch)), rel=1e-5)
    assert torch.allclose(ours.inner.weight, theirs.inner.weight)
    assert step.report()["compiled"] == 0


def test_what_cannot_be_compiled_says_so_or_raises() -> None:
    model = _mlp()
    step = rm.compile_step(model, _square, torch.optim.Adagrad(model.parameters()), options=STRICT)
    with pytest.raises(rm.Error) as caught:
        step(*_batches(1)[0])
    assert caught.value.code == "RM701"
    step = rm.compile_step(model, _square, torch.optim.Adagrad(model.parameters()))
    with pytest.warns(rm.RoutingWarning, match="RM701"):
        step(*_batches(1)[0])


_SECOND = """
import sys
import torch
import rm_abstract as rm
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
if sys.argv[1] == "eval":
    model.eval()
optimizer = torch.optim.Adam(model.parameters(), lr=float(sys.argv[2]))
step = rm.compile_step(model, torch.nn.functional.cross_entropy, optimizer)
for _ in range(3):
    step(torch.randn(4, 8), torch.randint(0, 4, (4,)))
report = step.report()
print(report["captured"], report["found"], report["compiled"])
"""


@pytest.mark.sampled(4, of="second process")
def test_a_second_process_captures_nothing(tmp_path: Path) -> None:
    def run(mode: str, rate: str) -> str:
        environment = {**os.environ, "RM_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", _SECOND, mode, rate]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout.strip()

    assert run("train", "0.1") == "1 0 1"
    assert run("train", "0.2") == "0 1 1"  # a rate is a number of the step
    assert run("eval", "0.1") == "1 0 1"


def test_kernels_of_a_step_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from rm_abstract.training import stored

    made: list[Any] = []

    class Watched(stored.Stored):
        def __init__(self, settings: Any) -> None:
            super().__init__(settings)
            made.append(self)

    monkeypatch.setattr("rm_abstract.training.routed.Stored", Watched)
    model = torch.nn.Linear(7, 3)
    optimizer = torch.optim.Adam(model.parameters())
    step = rm.compile_step(model, torch.nn.functional.mse_loss, optimizer)
    for _ in range(3):
        step(torch.randn(5, 7), torch.randn(5, 3))
    assert step.report()["compiled"] == 1
    report = made[0].checks.report()
    assert report["checked"] + report["remembered"] > 0, report
