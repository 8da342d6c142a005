"""The small framework: every function's gradient by finite differences, recorded steps against
eager ones, the same numbers as torch, and what happens with bad input."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_cases import CASES, OPTIMIZERS, Case, Net, make_step

import rm_abstract as rm
from rm_abstract import functional as F
from rm_abstract import nn, optim
from rm_abstract.framework.random import Generator
from rm_abstract.framework.tensor import Node


@pytest.fixture(params=["cpu", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    rm.use_backend(request.param)
    yield request.param
    rm.use_backend("cpu")


@pytest.fixture(autouse=True)
def seeded(seed: int) -> None:
    torch.manual_seed(seed)


def _loss(function: Callable[..., Any], tensors: list[Any], weights: torch.Tensor | None) -> Any:
    y = function(*tensors)
    if weights is None:
        return y, torch.rand(y.shape, dtype=torch.float64) + 0.5
    return (y * rm.Tensor(weights)).sum(), weights


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}{c[2]}")
def test_the_gradient_is_the_slope(case: Case, backend: str) -> None:
    _, function, shapes = case
    values = [torch.randn(s, dtype=torch.float64) for s in shapes]
    values = [v + v.sign() * 0.05 for v in values]  # off the kinks
    _, weights = _loss(function, [rm.Tensor(v) for v in values], None)
    tensors = [rm.Tensor(v, requires_grad=True) for v in values]
    _loss(function, tensors, weights)[0].backward()
    for v, tensor in zip(values, tensors, strict=True):
        assert tensor.grad is not None
        flat, found = v.view(-1), tensor.grad.torch().reshape(-1)
        for j in range(0, flat.numel(), max(1, flat.numel() // 8)):
            kept, sums = flat[j].item(), []
            for step in (1e-6, -1e-6):
                flat[j] = kept + step
                with rm.no_grad():
                    sums.append(_loss(function, [rm.Tensor(x) for x in values], weights)[0].item())
            flat[j] = kept
            assert found[j].item() == pytest.approx((sums[0] - sums[1]) / 2e-6, rel=1e-5, abs=1e-7)


def test_every_function_is_differentiated_here() -> None:
    public = {n for n, f in inspect.getmembers(F, inspect.isfunction) if n in F.__all__}
    assert public == set(F.__all__) == {name for name, _, _ in CASES if name}


@pytest.mark.parametrize("ours, theirs, settings", OPTIMIZERS)
def test_optimizers_make_torchs_steps(
    ours: Any, theirs: Any, settings: dict[str, Any], backend: str
) -> None:
    p = nn.Parameter(torch.randn(5))
    q = torch.nn.Parameter(p.torch().clone())
    mine, other = ours([p], **settings), theirs([q], **settings)
    for rate in (settings["lr"], settings["lr"] / 2, settings["lr"] / 2):
        mine.lr = other.param_groups[0]["lr"] = rate
        mine.zero_grad()
        other.zero_grad()
        (p * p * p).sum().backward()
        (q * q * q).sum().backward()
        mine.step()
        other.step()
        torch.testing.assert_close(p.torch(), q.detach())


def test_a_recorded_step_trains_like_an_eager_one(backend: str) -> None:
    eager, recorded = Net(), Net()
    recorded.load_state_dict(eager.state_dict())
    # Adam divides a gradient by its own size: with the usual eps of 1e-8 an element whose gradient
    # is rounding noise moves by a whole step, in a direction that the order of a sum decides.
    first, second = (optim.AdamW(n.parameters(), lr=1e-2, eps=1e-2) for n in (eager, recorded))
    a, b = make_step(eager, first), rm.record(make_step(recorded, second))
    for number, size in enumerate((3, 3, 2, 3)):
        ids, target = (rm.Tensor(torch.randint(0, 4, (size, 6))) for _ in range(2))
        first.lr = second.lr = 1e-2 / (1 + number)
        assert b(ids, target).item() == pytest.approx(a(ids, target).item(), rel=1e-5)
    assert len(b.programs) == 2
    assert first.steps == second.steps == 4
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(recorded.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for p in recorded.parameters())


def test_replay_of_one_kernel_is_eager_bit_for_bit() -> None:
    x, w = rm.Tensor(torch.randn(33, 65)), rm.Tensor(torch.randn(17, 65))
    assert torch.equal(rm.record(F.linear)(x, w).torch(), F.linear(x, w).torch())


def test_both_backends_agree() -> None:
    net, ids = Net(), rm.Tensor(torch.randint(0, 11, (2, 5)))
    results = []
    for name in ("cpu", "torch"):
        rm.use_backend(name)
        results.append(net(ids).torch())
    rm.use_backend("cpu")
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_gradients_add_up_and_loops_work(backend: str) -> None:
    x = rm.Tensor(torch.tensor([2.0]), requires_grad=True)
    for power in range(1, 4):  # x, x², x³: only what ran is differentiated
        y = x
        for _ in range(power - 1):
            y = y * x
        if y.item() > 0:
            y.sum().backward()
    assert x.grad is not None and x.grad.item() == pytest.approx(1 + 4 + 12)


def test_no_grad_and_detach_remember_nothing() -> None:
    x = rm.Tensor(torch.ones(2), requires_grad=True)
    with rm.no_grad():
        assert (x * 2.0).creator is None
    assert (x.detach() * 2.0).creator is None
    assert isinstance((x * 2.0).creator, Node)


def test_a_module_is_saved_and_loaded(tmp_path: Path) -> None:
    first, second = Net(), Net()
    first.save(tmp_path / "net.safetensors")
    second.load(tmp_path / "net.safetensors")
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)
    assert [p.name for p in tmp_path.iterdir()] == ["net.safetensors"]
    with pytest.raises(ValueError, match="expected"):
        nn.Linear(2, 2).load(tmp_path / "net.safetensors")


def test_a_loader_of_torch_feeds_it() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(10, 4), torch.randint(0, 3, (10,)))
    layer = nn.Linear(4, 3)
    for x, y in torch.utils.data.DataLoader(data, batch_size=5):
        assert F.cross_entropy(layer(rm.Tensor(x)), rm.Tensor(y)).item() > 0
    assert layer(rm.Tensor(data[0][0].numpy())).shape == (3,)


# Random123's known answer for philox4x32-10 with key and counter 0.
_KNOWN = [
    ([0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
]


@pytest.mark.parametrize("state, words", _KNOWN)
def test_random_numbers_are_philoxs(state: list[int], words: list[int], backend: str) -> None:
    generator = Generator(state[0])
    drawn = generator.uniform((7,))
    assert drawn.torch()[:4].tolist() == [(w >> 8) * 2.0**-24 for w in words]
    assert generator.state.tolist() == [state[0], 1]


def test_both_backends_draw_the_same_and_never_again() -> None:
    drawn = []
    for name in ("cpu", "torch"):
        rm.use_backend(name)
        generator = Generator(0x1234_5678_9ABC_DEF0)
        drawn.append([generator.uniform((3, 1001), t).torch() for t in (torch.float32,) * 2])
    rm.use_backend("cpu")
    assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])
    assert not torch.equal(drawn[0][0], drawn[0][1])
    assert abs(float(drawn[0][0].mean()) - 0.5) < 0.03 and float(drawn[0][0].max()) < 1.0


def test_a_replay_draws_what_the_eager_step_would(backend: str) -> None:
    def step(x: Any) -> Any:
        return F.dropout(F.dropout(x, 0.5), 0.25)

    x, recorded = rm.Tensor(torch.ones(50)), rm.record(step)
    rm.manual_seed(5)
    wanted = [step(x).torch() for _ in range(3)]
    rm.manual_seed(5)
    found = [recorded(x).torch() for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert not torch.equal(found[0], found[1])
    kept = found[0][found[0] > 0]
    assert 0 < len(kept) < 50
    torch.testing.assert_close(kept, torch.full_like(kept, 2 / 0.75))
    layer = nn.Dropout(0.5)
    assert layer.eval()(x) is x


def test_batch_norm_moves_as_torchs(backend: str) -> None:
    ours, theirs = nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)
    recorded = rm.record(ours)
    for call in (ours, recorded, recorded):
        x = torch.randn(4, 3, 5, 2) * 3 + 1
        torch.testing.assert_close(call(rm.Tensor(x)).torch(), theirs(x).detach())
        torch.testing.assert_close(ours.running_mean.torch(), theirs.running_mean)
        torch.testing.assert_close(ours.running_var.torch(), theirs.running_var)
    torch.testing.assert_close(ours.eval()(rm.Tensor(x)).torch(), theirs.eval()(x).detach())
    with pytest.raises(ValueError, match="two values"):
        ours.train()(rm.Tensor(torch.ones(1, 3, 1, 1)))


# ---- bad input -----------------------------------------------------------------------------------


def test_what_the_forward_read_may_not_change_before_backward(backend: str) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([p], lr=0.1)
    loss = (p * p).sum()
    (p * 1.0).sum().backward()
    optimizer.step()
    with pytest.raises(rm.Error, match="changed in place") as caught:
        loss.backward()
    assert caught.value.code == "RM708"


def test_a_second_backward_is_refused() -> None:
    loss = (nn.Parameter(torch.ones(3)) * 2.0).sum()
    loss.backward()
    with pytest.raises(rm.Error) as caught:
        loss.backward()
    assert caught.value.code == "RM708"


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(ValueError, match="one number"):
        (nn.Parameter(torch.ones(3)) * 2.0).backward()
    with pytest.raises(ValueError, match="one number"):
        rm.Tensor(torch.ones(1)).backward()


def test_branches_on_numbers_are_refused_while_recording() -> None:
    p = nn.Parameter(torch.ones(3))
    before = p.torch().clone()

    def step(x: Any) -> Any:
        loss = (p * x).sum()
        loss.backward()
        if loss > 1.0:
            optim.SGD([p], lr=0.1).step()
        return loss

    with pytest.raises(rm.Error) as caught:
        rm.record(step)(rm.Tensor(torch.ones(3)))
    assert caught.value.code == "RM707"
    assert torch.equal(p.torch(), before) and p.grad is None
    step(rm.Tensor(torch.ones(3)))  # eager does it
    assert not torch.equal(p.torch(), before)


def test_what_a_replay_could_not_repeat_is_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([p], lr=0.1)

    def twice() -> None:
        (p * 2.0).sum().backward()
        optimizer.step()
        optimizer.step()

    for step in (twice, lambda: 3):
        with pytest.raises(rm.Error) as caught:
            rm.record(step)()
        assert caught.value.code == "RM709"
    (p * 2.0).sum().backward()  # gradients from before the step
    with pytest.raises(rm.Error) as caught:
        rm.record(lambda: (p * 2.0).sum().backward())()
    assert caught.value.code == "RM709"


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_state_that_a_recorded_step_updates_twice_holds_both_updates(backend: str) -> None:
    """Running means of a norm that sees two batches, and a parameter that two optimisers share."""
    torch.manual_seed(0)
    weight, rows = torch.randn(2, 2, 3, 3), torch.randn(3, 2, 2, 2, 4, 4)

    def trained(recorded: bool) -> list[torch.Tensor]:
        norm = nn.BatchNorm2d(2)
        p = nn.Parameter(weight.clone())
        adam, sgd = optim.Adam([p, *norm.parameters()], lr=0.1), optim.SGD([p], lr=0.01)

        def step(x: Any, y: Any) -> Any:
            adam.zero_grad()
            pair = (norm(x * p.sum()), norm(y) * p.sum())
            loss = (pair[0] * pair[1]).sum()
            loss.backward()
            adam.step()
            sgd.step()
            return loss + p.sum()

        run = rm.record(step) if recorded else step
        losses = [run(rm.Tensor(x), rm.Tensor(y)).torch() for x, y in rows]
        return [*losses, p.torch(), norm.running_mean.torch(), norm.running_var.torch()]

    rm.use_backend(backend)
    try:
        for got, wanted in zip(trained(True), trained(False), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    finally:
        rm.use_backend("cpu")


def test_gradients_of_the_torch_backend_have_memory_of_their_own() -> None:
    rm.use_backend("torch")
    try:
        x, y = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
        (x + y).sum().backward()
        first, second = (p.grad.data for p in (x, y))  # type: ignore[union-attr]
        first.mul_(3.0)
        assert torch.equal(first, torch.full((2, 3), 3.0))
        assert torch.equal(second, torch.ones(2, 3))
        flat = x.reshape(3, 2)
        flat.data.zero_()
        assert torch.equal(x.torch(), torch.ones(2, 3))
    finally:
        rm.use_backend("cpu")


def test_a_kernel_that_refuses_leaves_the_state_as_it_was() -> None:
    layer = nn.Embedding(4, 2)
    optimizer = optim.Adam(layer.parameters(), lr=0.1)

    @rm.record
    def step(ids: Any) -> Any:
        optimizer.zero_grad()
        loss = layer(ids).sum()
        loss.backward()
        optimizer.step()
        return loss

    step(rm.Tensor(torch.tensor([1, 2])))
    before = {n: v.clone() for n, v in layer.state_dict().items()}
    with pytest.raises(RuntimeError):
        step(rm.Tensor(torch.tensor([1, 9])))
    assert torch.equal(layer.weight.torch(), before["weight"])
    assert optimizer.steps == 1


def test_wrong_operands_are_named() -> None:
    x = rm.Tensor(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\[linear\]"):
        F.linear(x, x.reshape(3, 2))
    with pytest.raises(ValueError, match="f64"):
        x + rm.Tensor(torch.ones(3, dtype=torch.float64))
    with pytest.raises(TypeError, match="whole number"):
        rm.Tensor(torch.ones(3, dtype=torch.int64)) + 0.5
    with pytest.raises(IndexError):
        x[2]
    with pytest.raises(TypeError):
        rm.Tensor(torch.ones(3, dtype=torch.int64), requires_grad=True)
    with pytest.raises(ValueError, match="cpu"):
        rm.use_backend("abacus")
