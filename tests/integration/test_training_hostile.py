"""Steps on what no program was made for: eager's behaviour or a typed error, and state intact."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rm_abstract as rm

ALLOW = {"fallback": "allow"}
Maker = Callable[[nn.Module, Any, torch.optim.Optimizer], Any]


def _loop_of(model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer) -> Any:
    compiled = rm.compile_loss(model, loss_fn, options=ALLOW)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = compiled(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step.report = compiled.report  # type: ignore[attr-defined]
    return step


MAKERS: dict[str, Maker] = {
    "step": lambda m, f, o: rm.compile_step(m, f, o, options=ALLOW),
    "loss": _loop_of,
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Maker:
    return MAKERS[request.param]


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def _batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 6, generator=g), torch.randint(0, 5, (rows,), generator=g)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = optimizer.state_dict()["state"]
    held = [v for state in moments.values() for v in state.values()]
    return [t.detach().clone() for t in [*model.state_dict().values(), *held]]


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in zip(a, b, strict=True)
    )


def _trained(make: Maker, loss_fn: Any = F.cross_entropy) -> tuple[Any, ...]:
    model = _mlp()
    optimizer = _adam(model)
    step = make(model, loss_fn, optimizer)
    for _ in range(4):
        step(*_batch())
    assert step.report()["compiled"] >= 2
    return model, optimizer, step


def _eager(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _twin(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    other = copy.deepcopy(model)
    theirs = _adam(other)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other, theirs


def test_gradients_that_are_no_numbers_are_written_as_eager_writes_them(make: Maker) -> None:
    model, optimizer, step = _trained(make)
    other, theirs = _twin(model, optimizer)
    x, y = _batch()
    x[0, 0] = float("nan")
    assert step(x, y).isnan() and _eager(other, theirs, x, y).isnan()
    for mine, wanted in zip(_state(model, optimizer), _state(other, theirs), strict=True):
        assert torch.equal(mine.isnan(), wanted.isnan())
    assert model[0].weight.isnan().any()


@pytest.mark.parametrize("bad", ["label", "width", "type", "empty"])
def test_a_batch_that_eager_refuses_is_its_error_and_changes_nothing(make: Maker, bad: str) -> None:
    model, optimizer, step = _trained(make)
    before = _state(model, optimizer)
    x, y = _batch()
    batch = {
        "label": (x, y + 5),
        "width": (x[:, :4], y),
        "type": (x.long(), y),
        "empty": (x, y[:0]),
    }[bad]
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        step(*batch)
    optimizer.zero_grad()
    assert _same(_state(model, optimizer), before)
    step(x, y)
    assert not _same(_state(model, optimizer), before)


def test_a_loss_that_is_no_scalar_is_eagers_error_and_changes_nothing(make: Maker) -> None:
    model = _mlp()
    optimizer = _adam(model)
    step = make(model, lambda o, t: F.cross_entropy(o, t, reduction="none"), optimizer)
    before = _state(model, optimizer)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="scalar"):
            step(*_batch())
    assert step.report()["compiled"] == 0
    assert _same(_state(model, optimizer), before)


def test_a_loss_that_is_no_tensor_is_an_error(make: Maker) -> None:
    model = _mlp()
    step = make(model, lambda o, t: 1.0, _adam(model))
    with pytest.raises((AttributeError, TypeError)):
        step(*_batch())


def test_shapes_never_seen_train_as_in_eager(make: Maker) -> None:
    model, optimizer, step = _trained(make)
    other, theirs = _twin(model, optimizer)
    for rows in (3, 1, 17, 3, 1):
        wanted = _eager(other, theirs, *_batch(rows))
        assert float(step(*_batch(rows))) == pytest.approx(float(wanted), rel=1e-4)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


def test_a_parameter_whose_memory_is_gone_is_never_read(make: Maker) -> None:
    model, optimizer, step = _trained(make)
    kept = model[0].weight.detach().clone()
    model[0].weight.untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, rm.Error)):
        step(*_batch())
    model[0].weight.untyped_storage().resize_(kept.nbytes)
    with torch.no_grad():
        model[0].weight.copy_(kept)
    optimizer.zero_grad()
    assert step(*_batch()).isfinite()


def test_a_parameter_that_was_replaced_is_the_one_that_is_trained(make: Maker) -> None:
    model, optimizer, step = _trained(make)
    model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    gc.collect()
    before = model[0].weight.detach().clone()
    for _ in range(3):
        step(*_batch())
    assert not torch.equal(model[0].weight, before)


def test_a_parameter_deleted_is_an_error_of_torch(make: Maker) -> None:
    model, _, step = _trained(make)
    del model[2].weight
    with pytest.raises((AttributeError, RuntimeError)):
        step(*_batch())


def test_a_moment_that_was_lost_is_eagers_to_mend() -> None:
    model, optimizer, step = _trained(MAKERS["step"])
    optimizer.state.clear()
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        step(*_batch())
    assert all(len(optimizer.state[p]) == 3 for p in model.parameters())
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_parameters_that_share_memory_are_eagers(make: Maker) -> None:
    model = _mlp()
    whole = torch.randn(20)
    model[2].bias = nn.Parameter(whole[:5])
    model[0].bias = nn.Parameter(whole[2:18])
    optimizer = _adam(model)
    other = _mlp()
    same = whole.detach().clone()
    other[2].bias, other[0].bias = nn.Parameter(same[:5]), nn.Parameter(same[2:18])
    theirs = _adam(other)
    step = make(model, F.cross_entropy, optimizer)
    for _ in range(4):
        wanted = _eager(other, theirs, *_batch())
        assert float(step(*_batch())) == pytest.approx(float(wanted), rel=1e-4)


def test_gradients_of_a_backward_before_do_not_outlive_a_step() -> None:
    model, _, step = _trained(MAKERS["step"])
    compiled = step.report()["compiled"]
    F.cross_entropy(model(_batch()[0]), _batch()[1]).backward()
    step(*_batch())
    assert step.report()["compiled"] == compiled + 1
    assert all(p.grad is None for p in model.parameters())


def test_a_counter_that_is_no_tensor_is_eagers_error_and_changes_nothing() -> None:
    model, optimizer, step = _trained(MAKERS["step"])
    state = optimizer.state[model[2].bias]
    state["step"] = float(state["step"])
    before = [p.detach().clone() for p in model.parameters()]
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    with pytest.raises(RuntimeError, match="singleton tensors"):
        step(*_batch())
    assert _same(before, [p.detach() for p in model.parameters()])
    assert _same(moments, [s["exp_avg"] for s in optimizer.state.values()])
